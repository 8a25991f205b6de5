"""PyTorch: F.scaled_dot_product_attention."""

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


def prepare(problem: Problem) -> Prepared:
    case = problem.case
    torch.set_float32_matmul_precision(problem.precision)
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
