"""Operands of a case, written once for all workers, and the f64 reference that answers are held against."""

import json
import math
import struct
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np

from .cases import Case

# Random numbers repeat after a prime number of elements, so that no two rows of one head are alike.
PERIOD = 16_777_213
MINILM = Path(__file__).parents[3] / "tests/data/minilm_heads.safetensors"

# Largest error as a share of max|v|. f32 arithmetic gives 1e-7; "high" lets operands keep 11 bits (TF32), 16-bit types
# round probabilities and outputs, some peers scores too. A wrong mask, head or scale gives 1e-1.
TOLERANCE = {"highest": 1e-5, "high": 1e-3, "medium": 2e-2, "bf16": 2e-2, "f16": 4e-3}


def tolerance(dtype: str, precision: str) -> float:
    return TOLERANCE[precision if dtype == "f32" else dtype]


def encode(values: np.ndarray, dtype: str) -> np.ndarray:
    """The bits of f32 values rounded to nearest: float32, float16, or bfloat16 as uint16."""
    if dtype == "f32":
        return values
    if dtype == "f16":
        return values.astype(np.float16)
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def decode(bits: np.ndarray) -> np.ndarray:
    """f32 values of what `encode` made."""
    if bits.dtype == np.uint16:
        return (bits.astype(np.uint32) << 16).view(np.float32)
    return bits.astype(np.float32)


def safetensors(path: Path) -> dict[str, np.ndarray]:
    raw = path.read_bytes()
    (length,) = struct.unpack_from("<Q", raw)
    types = {"F32": np.float32, "I32": np.int32}
    tensors = {}
    for name, about in json.loads(raw[8 : 8 + length]).items():
        start, end = (8 + length + offset for offset in about["data_offsets"])
        tensors[name] = np.frombuffer(raw[start:end], types[about["dtype"]]).reshape(about["shape"])
    return tensors


@dataclass
class Inputs:
    """Encoded operands in memory and as files q.bin, k.bin, v.bin, mask.bin (bool or f32) of `directory`."""

    case: Case
    dtype: str
    directory: Path
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mask: np.ndarray | None

    @classmethod
    def write(cls, case: Case, dtype: str, directory: Path) -> "Inputs":
        if case.kind == "layer":
            return LayerInputs.write_layer(case, dtype, directory)
        if case.source:
            tensors = safetensors(MINILM)
            q, k, v = (encode(np.ascontiguousarray(tensors[name]), dtype) for name in "qkv")
            lengths = tensors["lengths"]
        else:
            q, k, v = (
                _noise(shape, dtype, seed) for seed, shape in enumerate([case.q_shape, case.kv_shape, case.kv_shape])
            )
            lengths = np.full(case.batch, case.seqlen_k - case.seqlen_k // 4)
        mask = None
        if case.mask == "key":
            mask = (np.arange(case.seqlen_k) < lengths[:, None])[:, None, None, :]
        elif case.mask == "float":
            mask = decode(_noise(case.mask_shape, dtype, 3))
        inputs = cls(case, dtype, directory, q, k, v, mask)
        for name in ("q", "k", "v", "mask"):
            array = getattr(inputs, name)
            if array is not None:
                array.tofile(directory / f"{name}.bin")
        return inputs

    def visible_pairs(self) -> int:
        """(query, key) pairs that count."""
        case = self.case
        pairs = case.seqlen_q * case.seqlen_k
        if case.causal:
            offset = case.seqlen_k - case.seqlen_q
            pairs = sum(min(max(query + offset + 1, 0), case.seqlen_k) for query in range(case.seqlen_q))
        if case.mask == "key":
            return case.heads * case.seqlen_q * int(self.mask.sum())
        return case.batch * case.heads * pairs

    def flops(self) -> float:
        return 4.0 * self.case.dim * self.visible_pairs()

    def max_error(self, output: np.ndarray) -> float:
        """Largest error of the sampled rows of an output as a share of max|v|; infinite if one is not a number."""
        actual = output.reshape(-1, self.case.dim)[self.rows].astype(np.float64)
        error = float(np.abs(actual - self.expected).max()) / self.scale
        return error if math.isfinite(error) else math.inf

    @cached_property
    def rows(self) -> np.ndarray:
        """Sampled (batch, head, query) rows of the output, first and last always among them."""
        case = self.case
        total = case.batch * case.heads * case.seqlen_q
        count = min(total, 4096, max(16, 2**24 // (case.seqlen_k * case.dim)))
        chosen = np.random.default_rng(0).choice(total, count, replace=False)
        return np.unique(np.concatenate([chosen, [0, total - 1]]))

    @cached_property
    def expected(self) -> np.ndarray:
        """Those rows in f64."""
        heads, queries = np.divmod(self.rows, self.case.seqlen_q)
        return np.concatenate([self._head(head, queries[heads == head]) for head in np.unique(heads)])

    @cached_property
    def scale(self) -> float:
        return float(np.abs(decode(self.v.reshape(-1)[:PERIOD])).max())

    def _head(self, head: int, queries: np.ndarray) -> np.ndarray:
        case = self.case
        b, h = divmod(int(head), case.heads)
        q = decode(self.q[b, h, queries]).astype(np.float64)
        k, v = (decode(x[b, h // case.group]).astype(np.float64) for x in (self.k, self.v))
        scores = q @ k.T / math.sqrt(case.dim)
        if case.causal:
            last = queries[:, None] + case.seqlen_k - case.seqlen_q
            scores = np.where(np.arange(case.seqlen_k) <= last, scores, -np.inf)
        if case.mask == "key":
            scores = np.where(self.mask[b, 0], scores, -np.inf)
        elif case.mask == "float":
            scores = scores + self.mask[0, 0, queries]
        weights = np.exp(scores - scores.max(axis=1, keepdims=True))
        return weights @ v / weights.sum(axis=1, keepdims=True)


@dataclass
class LayerInputs(Inputs):
    """Tokens in q.bin, (batch, seq, width); in weights.bin the rows of W_q, W_k, W_v and W_o, each (width, width), then
    their biases."""

    weights: np.ndarray

    @classmethod
    def write_layer(cls, case: Case, dtype: str, directory: Path) -> "LayerInputs":
        x = _noise((case.batch, case.seqlen_q, case.width), dtype, 0)
        rows = 4 * case.width + 4
        weights = encode(decode(_noise((rows, case.width), dtype, 1)) * np.float32(case.width**-0.5), dtype)
        x.tofile(directory / "q.bin")
        weights.tofile(directory / "weights.bin")
        return cls(case, dtype, directory, x, x, x, None, weights)

    def flops(self) -> float:
        return self.case.flops()

    def max_error(self, output: np.ndarray) -> float:
        """Of the sampled rows, as a share of the largest output."""
        actual = output.reshape(-1, self.case.width)[self.rows].astype(np.float64)
        error = float(np.abs(actual - self.expected).max()) / self.scale
        return error if math.isfinite(error) else math.inf

    @cached_property
    def rows(self) -> np.ndarray:
        """Sampled tokens of the first and the last item."""
        case = self.case
        choose = np.random.default_rng(0).choice
        queries = choose(case.seqlen_q, min(case.seqlen_q, 64), replace=False)
        return np.unique(np.concatenate([queries, queries + (case.batch - 1) * case.seqlen_q]))

    @cached_property
    def expected(self) -> np.ndarray:
        """Those tokens in f64."""
        case, width = self.case, self.case.width
        w = decode(self.weights).astype(np.float64)
        weights, biases = w[: 4 * width].reshape(4, width, width), w[4 * width :]
        items = []
        for item in np.unique(self.rows // case.seqlen_q):
            x = decode(self.q[item]).astype(np.float64)
            queries = self.rows[self.rows // case.seqlen_q == item] % case.seqlen_q
            inputs = (x[queries], x, x)
            q, k, v = (
                (of @ weights[i].T + biases[i]).reshape(-1, case.heads, case.dim).swapaxes(0, 1)
                for i, of in enumerate(inputs)
            )
            scores = q @ k.swapaxes(1, 2) / math.sqrt(case.dim)
            shares = np.exp(scores - scores.max(axis=2, keepdims=True))
            heads = shares @ v / shares.sum(axis=2, keepdims=True)
            items.append(heads.swapaxes(0, 1).reshape(-1, width) @ weights[3].T + biases[3])
        return np.concatenate(items)

    @cached_property
    def scale(self) -> float:
        return float(np.abs(self.expected).max())


def _noise(shape: tuple[int, ...], dtype: str, seed: int) -> np.ndarray:
    count = math.prod(shape)
    block = np.random.default_rng(seed).standard_normal(min(count, PERIOD), np.float32)
    return np.resize(encode(block, dtype), shape)
