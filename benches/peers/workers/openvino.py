"""OpenVINO: the operation ScaledDotProductAttention."""

import numpy as np
import openvino as ov
from openvino import opset13 as ops

from .serve import Prepared, Problem, Variant, serve, try_variants

TYPES = {"f32": ov.Type.f32, "bf16": ov.Type.bf16, "f16": ov.Type.f16}
CORE = ov.Core()


def tensor(array: np.ndarray, dtype: str) -> ov.Tensor:
    if dtype == "bf16":
        return ov.Tensor(array, ov.Shape(array.shape), ov.Type.bf16)
    return ov.Tensor(array, shared_memory=True)


def compiled(problem: Problem, model: ov.Model) -> Variant:
    # Rounding f32 operands to bf16 is what a faster precision allows.
    hint = TYPES["bf16"] if problem.dtype == "f32" and problem.precision == "medium" else TYPES[problem.dtype]
    settings = {
        "INFERENCE_NUM_THREADS": problem.threads,
        "INFERENCE_PRECISION_HINT": hint,
        "PERFORMANCE_HINT": "LATENCY",
        "NUM_STREAMS": 1,
        "ENABLE_CPU_PINNING": False,
    }
    request = CORE.compile_model(model, "CPU", settings).create_infer_request()
    for i, array in enumerate((problem.q, problem.k, problem.v)):
        request.set_input_tensor(i, tensor(array, problem.dtype))
    if problem.mask is not None:
        request.set_input_tensor(3, ov.Tensor(problem.mask, shared_memory=True))

    def output(_: None) -> np.ndarray:
        result = request.get_output_tensor(0).data
        return (result.view(np.uint16) if problem.dtype == "bf16" else result).reshape(problem.case.q_shape)

    return Variant(request.infer, output)


def prepare(problem: Problem) -> Prepared:
    case, of = problem.case, TYPES[problem.dtype]
    if case.causal:
        # What the compiler makes of the operation's own `causal`, a constant that takes it seconds; calls take as long.
        problem.mask = problem.additive_mask()
    mask_type = ov.Type.boolean if problem.mask is not None and problem.mask.dtype == bool else ov.Type.f32

    def parameters() -> list[ov.Node]:
        shapes = [(case.q_shape, of), (case.kv_shape, of), (case.kv_shape, of)]
        if problem.mask is not None:
            shapes.append((problem.mask.shape, mask_type))
        return [ops.parameter(list(shape), kind) for shape, kind in shapes]

    def attend(inputs: list[ov.Node], q: ov.Node, k: ov.Node, v: ov.Node) -> ov.Model:
        mask = inputs[3] if len(inputs) > 3 else None
        if mask is not None and mask_type != ov.Type.boolean:
            mask = ops.convert(mask, of)
        node = ops.scaled_dot_product_attention(q, k, v, mask)
        return ov.Model([node], inputs)

    def sdpa() -> Variant | None:
        if case.group > 1:
            return None
        inputs = parameters()
        return compiled(problem, attend(inputs, *inputs[:3]))

    def grouped_rows() -> Variant | None:
        """The queries of a group as the queries of its one KV head: possible if no mask tells them apart."""
        if case.group == 1 or case.causal or problem.mask is not None:
            return None
        inputs = parameters()
        q = ops.reshape(inputs[0], [case.batch, case.kv_heads, case.group * case.seqlen_q, case.dim], False)
        return compiled(problem, attend(inputs, q, *inputs[1:3]))

    def repeated_heads() -> Variant | None:
        """KV heads repeated by a broadcast, as exported models do."""
        if case.group == 1:
            return None
        inputs = parameters()
        wide = [case.batch, case.kv_heads, case.group, case.seqlen_k, case.dim]
        k, v = (
            ops.reshape(
                ops.broadcast(ops.unsqueeze(x, 2), wide), [case.batch, case.heads, case.seqlen_k, case.dim], False
            )
            for x in inputs[1:3]
        )
        return compiled(problem, attend(inputs, inputs[0], k, v))

    return try_variants({"sdpa": sdpa, "grouped_rows": grouped_rows, "repeated_heads": repeated_heads})


if __name__ == "__main__":
    serve(ov.__version__.partition("-")[0], prepare)
