"""PyTorch: all-MiniLM-L6-v2 by transformers, on the fused attention of its own (sdpa)."""

import os
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
import transformers
from transformers import AutoModel, AutoTokenizer

from .serve import Variant, serve_answers, times


class Embedder:
    def __init__(self) -> None:
        self._model: Any = None
        self._tokenizer: Any = None

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        op = request["op"]
        if op == "load":
            folder = request["model"]
            self._tokenizer = AutoTokenizer.from_pretrained(folder)
            self._model = AutoModel.from_pretrained(folder, attn_implementation="sdpa", dtype=torch.float32).eval()
            return {}
        batches = [self._prepare(sentences) for sentences in request["batches"]]
        if op == "embed":
            return {"embeddings": [row for batch in batches for row in batch().tolist()]}
        if op == "time":
            passes = times(Variant(lambda: [batch() for batch in batches], lambda _: None), request["seconds"])
            return {"ms": passes}
        raise ValueError(f"there is no op {op}")

    def _prepare(self, sentences: list[str]) -> Callable[[], torch.Tensor]:
        """From token ids to embeddings: tokens are made here, padded to the longest sentence."""
        inputs = self._tokenizer(sentences, padding=True, return_tensors="pt")
        mask = inputs["attention_mask"]
        weights = mask.unsqueeze(-1).float()
        if mask.all():
            del inputs["attention_mask"]  # one sentence, or all of one length: less to do

        def run() -> torch.Tensor:
            states = self._model(**inputs).last_hidden_state
            return F.normalize((states * weights).sum(1) / weights.sum(1), dim=-1)

        return run


if __name__ == "__main__":
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))
    with torch.inference_mode():
        serve_answers(f"{torch.__version__}, transformers {transformers.__version__}", Embedder().answer)
