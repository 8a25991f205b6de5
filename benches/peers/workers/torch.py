"""PyTorch: F.scaled_dot_product_attention, and nn.MultiheadAttention."""

import os

import numpy as np
import torch
import torch.nn.functional as F

from .serve import Prepared, Problem, Variant, serve, try_variants


def tensor(array: np.ndarray) -> torch.Tensor:
    if array.dtype == np.uint16:
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def output(result: torch.Tensor) -> np.ndarray:
    return result.float().numpy()


def prepare_layer(problem: Problem) -> Prepared:
    """In evaluation mode, with and without its fast path, batch first and (as it is by default) sequence first."""
    case, width = problem.case, problem.case.width
    x, weights = tensor(problem.q), tensor(problem.weights)

    def layer(batch_first: bool, fast: bool) -> Variant:
        module = torch.nn.MultiheadAttention(width, case.heads, batch_first=batch_first, dtype=x.dtype).eval()
        module.in_proj_weight.copy_(weights[: 3 * width])
        module.out_proj.weight.copy_(weights[3 * width : 4 * width])
        module.in_proj_bias.copy_(weights[4 * width : 4 * width + 3].flatten())
        module.out_proj.bias.copy_(weights[4 * width + 3])
        tokens = x if batch_first else x.transpose(0, 1).contiguous()

        def run() -> torch.Tensor:
            torch.backends.mha.set_fastpath_enabled(fast)
            return module(tokens, tokens, tokens, need_weights=case.need_weights)[0]

        return Variant(run, lambda out: output(out if batch_first else out.transpose(0, 1).contiguous()))

    return try_variants(
        {
            "fast path": lambda: layer(True, True),
            "batch first": lambda: layer(True, False),
            "sequence first": lambda: layer(False, False),
        }
    )


def prepare(problem: Problem) -> Prepared:
    case = problem.case
    torch.set_float32_matmul_precision(problem.precision)
    if case.kind == "layer":
        return prepare_layer(problem)
    q, k, v = tensor(problem.q), tensor(problem.k), tensor(problem.v)
    mask = None
    is_causal = case.causal and case.seqlen_q == case.seqlen_k
    if case.causal and not is_causal:
        mask = torch.from_numpy(problem.causal_mask())
    elif problem.mask is not None:
        mask = torch.from_numpy(problem.mask)
        mask = mask if case.mask == "key" else mask.to(q.dtype)
    grouped = case.group > 1

    def sdpa() -> torch.Tensor:
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=is_causal, enable_gqa=grouped)

    return try_variants({"sdpa": lambda: Variant(sdpa, output)})


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    torch.set_grad_enabled(False)
    serve(torch.__version__, prepare)
