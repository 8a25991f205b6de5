"""ONNX models of one attention problem, inputs q, k, v and perhaps mask, output out."""

from dataclasses import dataclass

import numpy as np
from onnx import ModelProto, NodeProto, TensorProto, helper

from harness.cases import Case

TYPES = {"f32": TensorProto.FLOAT, "f16": TensorProto.FLOAT16, "bf16": TensorProto.BFLOAT16}
Shape = tuple[int, ...] | list[int]


@dataclass
class Graphs:
    """Makes the models of a case; operands are (batch, heads, seq, dim) if nothing else is said."""

    case: Case
    dtype: str

    @property
    def explicit_causal(self) -> bool:
        """Whether causality must be a mask: the operators' own has the first query at the first key."""
        return self.case.causal and self.case.seqlen_q != self.case.seqlen_k

    def attention(self, mask_shape: Shape | None = None) -> ModelProto:
        """The standard operator, of opset 23; its mask is of the case's shape if no other is given."""
        case, boolean = self.case, self.case.mask == "key" or self.explicit_causal
        masked = boolean or case.mask is not None
        node = helper.make_node(
            "Attention",
            ["q", "k", "v"] + ["mask"] * masked,
            ["out"],
            is_causal=int(case.causal and not self.explicit_causal),
        )
        inputs = self._operands()
        if masked:
            shape = mask_shape or case.mask_shape
            inputs["mask"] = (TensorProto.BOOL if boolean else TYPES[self.dtype], shape)
        return self._model([node], inputs, case.q_shape)

    def plain(self) -> ModelProto | None:
        """Product, softmax, product, a mask added between. The queries of a group are rows of one product, unless a
        mask tells them apart. None if causal, where half of that work is for nothing."""
        case = self.case
        if case.causal or (case.mask and case.group > 1):
            return None
        rows = [case.batch, case.kv_heads, case.group * case.seqlen_q, case.dim]
        nodes = [
            helper.make_node("Reshape", ["q", "rows"], ["grouped"]),
            helper.make_node("Transpose", ["k"], ["keys"], perm=[0, 1, 3, 2]),
            helper.make_node("MatMul", ["grouped", "keys"], ["products"]),
            helper.make_node("Mul", ["products", "scale"], ["scores"]),
            *([helper.make_node("Add", ["scores", "mask"], ["masked"])] if case.mask else []),
            helper.make_node("Softmax", ["masked" if case.mask else "scores"], ["weights"], axis=-1),
            helper.make_node("MatMul", ["weights", "v"], ["averages"]),
            helper.make_node("Reshape", ["averages", "shape"], ["out"]),
        ]
        constants = [
            helper.make_tensor("rows", TensorProto.INT64, [4], rows),
            helper.make_tensor("shape", TensorProto.INT64, [4], case.q_shape),
            helper.make_tensor("scale", TYPES[self.dtype], [], [case.dim**-0.5]),
        ]
        inputs = self._operands()
        if case.mask:
            inputs["mask"] = (TYPES[self.dtype], case.mask_shape)
        return self._model(nodes, inputs, case.q_shape, constants)

    def multi_head(self, packed: bool) -> ModelProto | None:
        """ONNX Runtime's MultiHeadAttention: queries are (batch, seq, heads * dim), keys and values too if `packed`."""
        case = self.case
        if case.group > 1 or self.explicit_causal:
            return None
        names = ["q", "k", "v"]
        inputs = self._operands()
        for name in names if packed else ["q"]:
            inputs[name] = (inputs[name][0], self.packed(inputs[name][1]))
        if case.mask == "key":
            names += ["", "mask"]
            inputs["mask"] = (TensorProto.INT32, (case.batch, case.seqlen_k))
        elif case.mask:
            names += ["", "", "mask"]
            inputs["mask"] = (TYPES[self.dtype], case.mask_shape)
        node = helper.make_node(
            "MultiHeadAttention",
            names,
            ["out"],
            domain="com.microsoft",
            num_heads=case.heads,
            unidirectional=int(case.causal),
        )
        return self._model([node], inputs, self.packed(case.q_shape))

    def group_query(self) -> ModelProto | None:
        """ONNX Runtime's GroupQueryAttention, always causal: the newest seqlen_q keys join a cache of all others."""
        case = self.case
        if case.mask or not (case.causal or case.seqlen_q == 1):
            return None
        of, new = TYPES[self.dtype], self.packed((case.batch, case.kv_heads, case.seqlen_q, case.dim))
        inputs = {
            "q": (of, self.packed(case.q_shape)),
            "new_k": (of, new),
            "new_v": (of, new),
            "k": (of, case.kv_shape),
            "v": (of, case.kv_shape),
            "last_key": (TensorProto.INT32, (case.batch,)),
            "total": (TensorProto.INT32, ()),
        }
        node = helper.make_node(
            "GroupQueryAttention",
            ["q", "new_k", "new_v", "k", "v", "last_key", "total"],
            ["out", "present_k", "present_v"],
            domain="com.microsoft",
            num_heads=case.heads,
            kv_num_heads=case.kv_heads,
        )
        presents = {"present_k": (of, case.kv_shape), "present_v": (of, case.kv_shape)}
        return self._model([node], inputs, self.packed(case.q_shape), more_outputs=presents)

    def packed(self, shape: Shape) -> Shape:
        batch, heads, seqlen, dim = shape
        return (batch, seqlen, heads * dim)

    def _operands(self) -> dict[str, tuple[int, Shape]]:
        of, case = TYPES[self.dtype], self.case
        return {"q": (of, case.q_shape), "k": (of, case.kv_shape), "v": (of, case.kv_shape)}

    def _model(
        self,
        nodes: list[NodeProto],
        inputs: dict[str, tuple[int, Shape]],
        out: Shape,
        constants: list[TensorProto] | None = None,
        more_outputs: dict[str, tuple[int, Shape]] | None = None,
    ) -> ModelProto:
        values = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in inputs.items()]
        outputs = {"out": (TYPES[self.dtype], out)} | (more_outputs or {})
        results = [helper.make_tensor_value_info(name, kind, shape) for name, (kind, shape) in outputs.items()]
        graph = helper.make_graph(nodes, "attention", values, results, constants)
        opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def pack(array: np.ndarray) -> np.ndarray:
    """(batch, heads, seq, dim) to (batch, seq, heads * dim)."""
    batch, heads, seqlen, dim = array.shape
    return np.ascontiguousarray(array.swapaxes(1, 2)).reshape(batch, seqlen, heads * dim)


def unpack(array: np.ndarray, shape: Shape) -> np.ndarray:
    batch, heads, seqlen, dim = shape
    return array.reshape(batch, seqlen, heads, dim).swapaxes(1, 2)
