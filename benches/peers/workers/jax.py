"""JAX: jax.nn.dot_product_attention, compiled. Operands are (batch, seq, heads, dim) there."""

import jax
import jax.numpy as jnp
import numpy as np

from .serve import Prepared, Problem, Variant, serve, try_variants


def array(values: np.ndarray) -> jax.Array:
    values = values.view(jnp.bfloat16) if values.dtype == np.uint16 else values
    return jnp.asarray(values.swapaxes(1, 2))


def output(result: jax.Array) -> np.ndarray:
    return np.asarray(result.astype(jnp.float32)).swapaxes(1, 2)


def prepare(problem: Problem) -> Prepared:
    case = problem.case
    jax.config.update("jax_default_matmul_precision", problem.precision.replace("medium", "default"))
    q, k, v = array(problem.q), array(problem.k), array(problem.v)
    mask = bias = None
    if case.causal and case.seqlen_q != case.seqlen_k:
        mask = jnp.asarray(problem.causal_mask())
    elif case.mask == "key":
        mask = jnp.asarray(problem.mask)
    elif case.mask:
        bias = jnp.asarray(problem.mask, q.dtype)
    causal = case.causal and mask is None
    attend = jax.jit(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, bias, mask, is_causal=causal))
    compiled = attend.lower(q, k, v).compile()
    return try_variants({"dpa": lambda: Variant(lambda: compiled(q, k, v).block_until_ready(), output)})


if __name__ == "__main__":
    serve(jax.__version__, prepare)
