"""The attention problems that are compared. Nothing here needs a package."""

import re
from collections.abc import Iterator
from dataclasses import dataclass

DTYPES = {"f32": 4, "bf16": 2, "f16": 2}
PRECISIONS = ("highest", "high", "medium")
MASKS = ("key", "float")


@dataclass(frozen=True)
class Case:
    """One problem. Causality is bottom-right: the last query sees all keys.

    `mask` is None, "key" (bool, (batch, 1, 1, seqlen_k), true is seen) or "float" ((1, 1, seqlen_q, seqlen_k), added to
    the scores). `source` names real operands in place of random ones.

    A `layer` is self-attention with its projections: tokens (batch, seqlen_q, heads * dim), four weights with biases;
    `need_weights` asks for the attention weights, averaged over the heads, too.
    """

    kind: str
    batch: int
    heads: int
    kv_heads: int
    seqlen_q: int
    seqlen_k: int
    dim: int
    causal: bool = False
    mask: str | None = None
    source: str | None = None
    need_weights: bool = False

    @property
    def id(self) -> str:
        source = f"{self.source}_" if self.source else ""
        groups = f"_kv{self.kv_heads}" if self.kv_heads != self.heads else ""
        sizes = f"b{self.batch}_h{self.heads}{groups}_q{self.seqlen_q}_k{self.seqlen_k}_d{self.dim}"
        options = ("_causal" if self.causal else "") + (f"_{self.mask}mask" if self.mask else "")
        options += "_weights" if self.need_weights else ""
        return f"{self.kind}/{source}{sizes}{options}"

    @property
    def q_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.heads, self.seqlen_q, self.dim)

    @property
    def kv_shape(self) -> tuple[int, int, int, int]:
        return (self.batch, self.kv_heads, self.seqlen_k, self.dim)

    @property
    def mask_shape(self) -> tuple[int, int, int, int]:
        """Of the mask, or of causality as one."""
        return (self.batch, 1, 1, self.seqlen_k) if self.mask == "key" else (1, 1, self.seqlen_q, self.seqlen_k)

    @property
    def width(self) -> int:
        """Of a token."""
        return self.heads * self.dim

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    def kv_bytes(self, dtype: str) -> int:
        return 2 * self.batch * self.kv_heads * self.seqlen_k * self.dim * DTYPES[dtype]

    def flops(self) -> float:
        """Operations with all pairs counted, for estimates."""
        attention = 4.0 * self.batch * self.heads * self.seqlen_q * self.seqlen_k * self.dim
        projections = 8.0 * self.batch * self.seqlen_q * self.width**2
        return attention + projections if self.kind == "layer" else attention


def _cases() -> Iterator[Case]:
    for dim in (64, 128):
        for seqlen in (512, 2048, 4096):
            for causal in (False, True):
                yield Case("prefill", 1, 8, 8, seqlen, seqlen, dim, causal)
    for causal in (False, True):
        yield Case("gqa", 1, 32, 8, 1024, 1024, 128, causal)
    yield Case("bert", 8, 12, 12, 128, 128, 64)
    yield Case("vit", 4, 12, 12, 197, 197, 64)
    yield Case("tiny", 32, 8, 8, 10, 10, 64)
    yield Case("cross", 1, 8, 8, 100, 1500, 64)
    for batch in (1, 8):
        for kv_heads in (32, 8):
            for seqlen in (512, 2048, 4096, 16384, 65536):
                yield Case("decode", batch, 32, kv_heads, 1, seqlen, 128)
    for kv_heads in (32, 8):
        for causal in (False, True):
            yield Case("decode", 1, 32, kv_heads, 4, 4096, 128, causal)
    for seqlen in (512, 2048):
        for mask in MASKS:
            yield Case("masked", 1, 8, 8, seqlen, seqlen, 64, mask=mask)
    yield Case("masked", 8, 12, 12, 28, 28, 32, mask="key", source="minilm")
    for seqlen, batch, width, heads in (
        (10, 32, 512, 8),
        (128, 8, 768, 12),
        (512, 4, 1024, 16),
        (2048, 1, 1024, 16),
        (1, 1, 1024, 16),
    ):
        for need_weights in (False, True):
            yield Case("layer", batch, heads, heads, seqlen, seqlen, width // heads, need_weights=need_weights)


CASES = tuple(_cases())


def select(pattern: str) -> list[Case]:
    """Cases whose id the regular expression finds; ValueError says why there are none."""
    try:
        found = [case for case in CASES if re.search(pattern, case.id)]
    except re.error as error:
        raise ValueError(f"--cases {pattern!r} is not a regular expression: {error}") from None
    if not found:
        kinds = ", ".join(dict.fromkeys(case.kind for case in CASES))
        raise ValueError(f"--cases {pattern!r} matches no case; kinds are {kinds}, and --list names all")
    return found
