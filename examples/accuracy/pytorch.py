"""Writes `pytorch.json`: the errors of PyTorch on the inputs of the example `accuracy`, bit for bit the same.

    python3 -m venv /tmp/torch && /tmp/torch/bin/pip install numpy==2.4.6 torch==2.15.0
    /tmp/torch/bin/python examples/accuracy/pytorch.py    # minutes, most of them for functions of every f32
    /tmp/torch/bin/python examples/accuracy/pytorch.py --keep-functions    # these as the table has them: for changes of cases.json

`cases.json` says what the inputs are, `inputs.rs` is the same generator; the table holds a checksum of every input.
"""

import argparse
import datetime
import json
import math
import platform
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F

HERE = Path(__file__).parent
MASK, GAMMA = (1 << 64) - 1, np.uint64(0x9E3779B97F4A7C15)
TYPES = {"f32": torch.float32, "f16": torch.float16, "bf16": torch.bfloat16}
# Exponents of `subnormal`, and the smallest normal numbers.
TINY = {"f32": -133, "f16": -17, "bf16": -129}
SMALLEST = {"f32": 2.0**-126, "f16": 2.0**-14, "bf16": 2.0**-126}


def seed_of(text: str) -> np.uint64:
    """FNV-1a."""
    hashed = 0xCBF29CE484222325
    for byte in text.encode():
        hashed = ((hashed ^ byte) * 0x100000001B3) & MASK
    return np.uint64(hashed)


def mix(z: np.ndarray) -> np.ndarray:
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def numbers(seed: np.uint64, at: np.ndarray) -> np.ndarray:
    """SplitMix64, numbers `at` of the stream."""
    return mix(seed + (at + np.uint64(1)) * GAMMA)


def normals(seed: np.uint64, at: np.ndarray) -> np.ndarray:
    """Irwin-Hall: the sum of twelve numbers of 21 bits each. Mean 0, deviation 1, exact in f64."""
    total = np.zeros(at.shape, np.int64)
    part = np.uint64((1 << 21) - 1)
    for word in range(4):
        bits = numbers(seed, at * np.uint64(4) + np.uint64(word))
        for shift in (0, 21, 42):
            total += ((bits >> np.uint64(shift)) & part).astype(np.int64)
    return (2 * total - 12 * ((1 << 21) - 1)) * 2.0**-22


def generate(spec: list, name: str, rows: int, width: int, count: int, dtype: str) -> np.ndarray:
    """Elements as f32: `count` of them, in rows of `width`, `rows` rows to a matrix."""
    kind, *numbers_of = spec
    seed, at = seed_of(name), np.arange(count, dtype=np.uint64)
    row = (np.arange(count) // width) % rows
    if kind == "normal":
        deviation, mean = numbers_of
        x = mean + deviation * normals(seed, at)
    elif kind == "uniform":
        low, high = numbers_of
        x = low + (high - low) * ((numbers(seed, at) >> np.uint64(11)) * 2.0**-53)
    elif kind == "repeat":
        of, deviation = numbers_of
        x = deviation * normals(seed, at - ((row - row % of) * width).astype(np.uint64))
    elif kind == "peak":
        peak, value, deviation = numbers_of
        x = np.where(row == peak, float(value), deviation * normals(seed, at))
    elif kind == "wide":
        (reach,) = numbers_of
        exponent = numbers(seed ^ np.uint64(MASK), at) % np.uint64(2 * reach + 1)
        x = np.ldexp(normals(seed, at), exponent.astype(np.int32) - reach)
    elif kind == "subnormal":
        x = normals(seed, at) * 2.0 ** TINY[dtype]
    elif kind == "mask":
        bits = numbers(seed, at)
        value = (((bits >> np.uint64(2)) & np.uint64(63)).astype(np.int64) - 32) / 8
        x = np.where((bits & np.uint64(3) == 0) & (np.arange(count) % width != 0), -np.inf, value)
    else:
        raise ValueError(kind)
    return x.astype(np.float32)


class Inputs:
    """Operands of a case in a type, and a checksum of all their bits."""

    def __init__(self, kind: str, case: dict, dtype: str):
        self.kind, self.case, self.dtype, self.checksum = kind, case, dtype, 0

    def operand(self, name: str, shape: list[int]) -> torch.Tensor:
        *_, rows, width = shape
        if self.kind == "softmax":
            rows, width = width, 1
        path = f"{self.kind}/{self.case['name']}/{name}"
        data = generate(self.case[name], path, rows, width, math.prod(shape), self.dtype)
        tensor = torch.from_numpy(data).to(TYPES[self.dtype]).reshape(shape)
        view, unsigned = (torch.int32, np.uint32) if self.dtype == "f32" else (torch.int16, np.uint16)
        bits = tensor.view(view).numpy().view(unsigned).astype(np.uint64).ravel()
        salted = bits + (np.arange(bits.size, dtype=np.uint64) + np.uint64(1)) * GAMMA
        self.checksum = (self.checksum * 31 + int(mix(salted).sum())) & MASK
        return tensor


def wide(tensor: torch.Tensor) -> np.ndarray:
    return tensor.to(torch.float64).numpy()


def figure(x: float) -> float | None:
    """Four digits; nothing for what is not finite."""
    return float(f"{x:.3e}") if math.isfinite(x) else None


def relative_to_largest(result: torch.Tensor, truth: np.ndarray) -> dict:
    error, largest = np.abs(wide(result) - truth), np.abs(truth).max()
    return {"max": figure(error.max() / largest), "rms": figure(np.sqrt((error**2).mean()) / largest)}


def attention(case: dict, inputs: Inputs) -> dict:
    b, h, kv, l, s, d, dv = case["shape"]
    q = inputs.operand("q", [b, h, l, d])
    k = inputs.operand("k", [b, kv, s, d])
    v = inputs.operand("v", [b, kv, s, dv])
    mask = inputs.operand("bias", [l, s]) if "bias" in case else None
    causal = case.get("causal", False)
    out = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=causal, enable_gqa=h != kv)
    truth = np.empty((b, h, l, dv))
    for item in range(b):
        for head in range(h):
            kv_head = head // (h // kv)
            scores = wide(q[item, head]) @ wide(k[item, kv_head]).T / math.sqrt(d)
            if mask is not None:
                scores += wide(mask)
            if causal:
                scores[np.triu_indices(l, 1, s)] = -np.inf
            p = np.exp(scores - scores.max(-1, keepdims=True))
            truth[item, head] = (p / p.sum(-1, keepdims=True)) @ wide(v[item, kv_head])
    return relative_to_largest(out, truth)


def softmax(case: dict, inputs: Inputs) -> dict:
    x = inputs.operand("x", case["shape"])
    p = wide(torch.softmax(x, -1))
    e = np.exp(wide(x) - wide(x).max(-1, keepdims=True))
    truth = e / e.sum(-1, keepdims=True)
    counted = truth >= SMALLEST["f32"]
    error = (np.abs(p - truth) / np.maximum(truth, SMALLEST[inputs.dtype]))[counted]
    return {
        "max": figure(error.max()),
        "rms": figure(np.sqrt((error**2).mean())),
        "sum": figure(np.abs(p.sum(-1) - 1).max()),
    }


def gemm(case: dict, inputs: Inputs) -> dict:
    m, n, k = case["shape"]
    a, b = inputs.operand("a", [m, k]), inputs.operand("b", [k, n])
    return relative_to_largest(torch.matmul(a, b), wide(a) @ wide(b))


class Worst:
    """The largest error in ulp and where it is, and the largest absolute error."""

    def __init__(self):
        self.ulp, self.at, self.absolute = 0.0, 0.0, 0.0

    def add(self, x: np.ndarray, y: np.ndarray, truth: np.ndarray, counted: np.ndarray) -> None:
        nearest = truth.astype(np.float32)
        finite = np.isfinite(nearest) & np.isfinite(y)
        same = (y == nearest) | (np.isnan(y) & np.isnan(nearest))
        error = np.abs(y - truth)
        exponent = np.maximum((nearest.view(np.uint32) >> 23 & 255).astype(np.int32), 1) - 150
        ulp = np.where(finite, np.ldexp(error, -exponent), np.where(same, 0.0, np.inf))
        ulp = np.where(counted, ulp, 0.0)
        worst = int(ulp.argmax())
        if ulp[worst] > self.ulp:
            self.ulp, self.at = float(ulp[worst]), float(x[worst])
        self.absolute = max(self.absolute, float(np.where(counted & finite, error, 0.0).max()))

    def figures(self, absolute: bool) -> dict:
        figures = {"ulp": figure(self.ulp), "at": self.at if math.isfinite(self.at) else None}
        return figures | {"absolute": figure(self.absolute)} if absolute else figures


def functions() -> dict:
    """exp, 2^t and tanh of every f32; the first two also where they are probabilities: up to 0, with results that are normal."""
    piece = 1 << 20
    worst = {name: Worst() for name in ("exp", "exp_nonpositive", "exp_attention", "exp2_nonpositive", "tanh")}
    for first in range(0, 1 << 32, piece):
        x = np.arange(first, first + piece, dtype=np.uint64).astype(np.uint32).view(np.float32)
        double, every = x.astype(np.float64), np.ones(piece, bool)
        tensor = torch.from_numpy(x)
        y, truth = torch.exp(tensor).numpy(), np.exp(double)
        worst["exp"].add(x, y, truth, every)
        worst["exp_nonpositive"].add(x, y, truth, (x <= 0) & (truth >= 2.0**-126))
        worst["exp_attention"].add(x, y, truth, (x <= 0) & (truth >= 2.0**-125))
        worst["tanh"].add(x, torch.tanh(tensor).numpy(), np.tanh(double), every)
        truth = np.exp2(double)
        worst["exp2_nonpositive"].add(x, torch.exp2(tensor).numpy(), truth, (x <= 0) & (truth >= 2.0**-126))
        if first % (1 << 28) == 0:
            print(f"functions: {100 * first >> 32} %", flush=True)
    return {name: worst.figures(name not in ("exp", "tanh")) for name, worst in worst.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description="Writes pytorch.json.")
    parser.add_argument("--keep-functions", action="store_true", help="keep what the table has of the functions")
    keep = parser.parse_args().keep_functions
    torch.set_num_threads(1)
    torch.set_grad_enabled(False)
    np.seterr(all="ignore")
    started = time.monotonic()
    table = {
        "torch": torch.__version__,
        "capability": torch.backends.cpu.get_cpu_capability(),
        "architecture": platform.machine(),
        "threads": 1,
        "date": datetime.date.today().isoformat(),
    }
    kept = None
    if keep:
        old = json.loads((HERE / "pytorch.json").read_text())
        if any(old[key] != table[key] for key in ("torch", "capability", "architecture")):
            raise SystemExit("the table is of another PyTorch or processor")
        kept = old["functions"]
    run = {"attention": attention, "softmax": softmax, "gemm": gemm}
    for kind, cases in json.loads((HERE / "cases.json").read_text()).items():
        table[kind] = {}
        for case in cases:
            figures = {}
            for dtype in case.get("types", TYPES):
                inputs = Inputs(kind, case, dtype)
                errors = run[kind](case, inputs)
                figures[dtype] = {"inputs": f"{inputs.checksum:016x}"} | errors
            table[kind][case["name"]] = figures
            print(f"{kind}: {case['name']}: {figures}", flush=True)
    table["functions"] = kept or functions()
    (HERE / "pytorch.json").write_text(json.dumps(table, indent=1) + "\n")
    print(f"{time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
