"""numpy: two products and a softmax between, in place. It multiplies 16-bit types without BLAS: they are left out."""

import numpy as np

from .serve import Prepared, Problem, Variant, serve, try_variants


def prepare(problem: Problem) -> Prepared:
    case = problem.case
    if problem.dtype != "f32":
        return {}, {"plain": f"no fast product of {problem.dtype}"}
    mask = problem.additive_mask()
    # The queries of a group are the rows of one product, unless a mask tells them apart.
    rows = case.q_shape
    k, v = problem.k, problem.v
    if mask is None:
        rows = (case.batch, case.kv_heads, case.group * case.seqlen_q, case.dim)
    elif case.group > 1:
        k, v = k[:, :, None], v[:, :, None]
        rows = (case.batch, case.kv_heads, case.group, case.seqlen_q, case.dim)
    q = problem.q.reshape(rows)
    keys, scale = k.swapaxes(-1, -2), np.float32(case.dim**-0.5)

    def plain() -> np.ndarray:
        scores = np.matmul(q * scale, keys)
        if mask is not None:
            scores += mask
        scores -= scores.max(axis=-1, keepdims=True)
        np.exp(scores, out=scores)
        scores /= scores.sum(axis=-1, keepdims=True)
        return np.matmul(scores, v)

    return try_variants({"plain": lambda: Variant(plain, lambda result: result.reshape(case.q_shape))})


if __name__ == "__main__":
    serve(np.__version__, prepare)
