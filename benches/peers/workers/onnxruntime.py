"""ONNX Runtime: its contrib operators, the standard Attention operator, and a plain graph of products and softmax."""

import os
from collections.abc import Callable

import numpy as np
import onnxruntime as ort
from onnx import ModelProto

from .graphs import Graphs, pack, unpack
from .serve import Prepared, Problem, Variant, serve, try_variants


class Binder:
    """Sessions for one problem, with operands bound so that a run copies nothing."""

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._of = problem.q.dtype

    def variant(
        self, model: ModelProto | None, feeds: Callable[[], dict[str, np.ndarray]], shared: bool = False
    ) -> Variant | None:
        """`shared`: outputs present_k and present_v are the inputs k and v, a cache that is written in place."""
        if model is None:
            return None
        options = ort.SessionOptions()
        options.intra_op_num_threads = self._problem.threads
        options.log_severity_level = 3
        session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        binding = session.io_binding()
        values = {name: ort.OrtValue.ortvalue_from_numpy(array) for name, array in feeds().items()}
        for name, value in values.items():
            binding.bind_ortvalue_input(name, value)
        shape = session.get_outputs()[0].shape
        out = ort.OrtValue.ortvalue_from_numpy(np.zeros(shape, self._of))
        binding.bind_ortvalue_output("out", out)
        if shared:
            binding.bind_ortvalue_output("present_k", values["k"])
            binding.bind_ortvalue_output("present_v", values["v"])

        def output(_: None) -> np.ndarray:
            result, q_shape = out.numpy(), self._problem.case.q_shape
            return result if len(shape) == 4 else unpack(result, q_shape)

        return Variant(lambda: session.run_with_iobinding(binding), output)

    def operands(self) -> dict[str, np.ndarray]:
        problem = self._problem
        return {"q": problem.q, "k": problem.k, "v": problem.v}

    def masked(self, mask: np.ndarray | None) -> dict[str, np.ndarray]:
        """Operands and mask, a float one in the type of the operands."""
        if mask is None:
            return self.operands()
        return self.operands() | {"mask": mask if mask.dtype in (bool, np.int32) else mask.astype(self._of)}

    def attention(self, graphs: Graphs) -> Variant | None:
        case = self._problem.case
        mask = self._problem.causal_mask() if graphs.explicit_causal else self._problem.mask
        if mask is not None:
            # The operator takes no mask of fewer rows than there are queries.
            rows = (mask.shape[0], mask.shape[1], case.seqlen_q, case.seqlen_k)
            mask = np.ascontiguousarray(np.broadcast_to(mask, rows))
        return self.variant(graphs.attention(mask.shape if mask is not None else None), lambda: self.masked(mask))

    def plain(self) -> dict[str, np.ndarray]:
        return self.masked(self._problem.additive_mask())

    def packed(self, graphs: Graphs) -> Variant | None:
        # It transposes all keys and values: nothing for a few queries.
        if self._problem.case.seqlen_q < 16:
            return None
        return self.variant(graphs.multi_head(True), lambda: self.multi_head(True))

    def multi_head(self, packed: bool) -> dict[str, np.ndarray]:
        mask = self._problem.mask
        if mask is not None and mask.dtype == bool:
            mask = mask[:, 0, 0].astype(np.int32)
        feeds = self.masked(mask)
        return feeds | {name: pack(feeds[name]) for name in ("qkv" if packed else "q")}

    def group_query(self) -> dict[str, np.ndarray]:
        problem, case = self._problem, self._problem.case
        newest = slice(case.seqlen_k - case.seqlen_q, None)
        return {
            "q": pack(problem.q),
            "new_k": pack(problem.k[:, :, newest]),
            "new_v": pack(problem.v[:, :, newest]),
            "k": problem.k,
            "v": problem.v,
            "last_key": np.full(case.batch, case.seqlen_k - 1, np.int32),
            "total": np.array(case.seqlen_k, np.int32),
        }


def prepare(problem: Problem) -> Prepared:
    if problem.dtype == "bf16":
        return {}, {"all": "no bf16 on CPU"}
    graphs, binder = Graphs(problem.case, problem.dtype), Binder(problem)
    return try_variants(
        {
            "attention": lambda: binder.attention(graphs),
            "plain": lambda: binder.variant(graphs.plain(), binder.plain),
            "mha": lambda: binder.variant(graphs.multi_head(False), lambda: binder.multi_head(False)),
            "mha_packed": lambda: binder.packed(graphs),
            "gqa": lambda: binder.variant(graphs.group_query(), binder.group_query, shared=True),
        }
    )


if __name__ == "__main__":
    os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
    serve(ort.__version__, prepare)
