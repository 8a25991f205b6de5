"""The protocol of a Python worker: requests are lines of JSON on standard input, answers lines on standard output."""

import json
import os
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from harness.cases import Case
from harness.data import decode


@dataclass
class Problem:
    """A case with its operands, as heap arrays: float32, float16, or bfloat16 as uint16; mask bool or float32."""

    case: Case
    dtype: str
    precision: str
    threads: int
    q: np.ndarray
    k: np.ndarray
    v: np.ndarray
    mask: np.ndarray | None

    @classmethod
    def read(cls, request: dict[str, Any]) -> "Problem":
        case, directory = Case(**request["case"]), Path(request["directory"])
        dtype = request["dtype"]
        of = {"f32": np.float32, "f16": np.float16, "bf16": np.uint16}[dtype]
        q, k, v = (
            np.fromfile(directory / f"{name}.bin", of).reshape(shape)
            for name, shape in (("q", case.q_shape), ("k", case.kv_shape), ("v", case.kv_shape))
        )
        mask = None
        if case.mask:
            mask = np.fromfile(directory / "mask.bin", bool if case.mask == "key" else np.float32)
            mask = mask.reshape(case.mask_shape)
        return cls(case, dtype, request["precision"], request["threads"], q, k, v, mask)

    def additive_mask(self) -> np.ndarray | None:
        """Mask and causality as f32 to add to scores."""
        mask = self.mask
        if mask is not None and mask.dtype == bool:
            mask = np.where(mask, np.float32(0), np.float32(-np.inf))
        if self.case.causal:
            causal = np.where(self.causal_mask(), np.float32(0), np.float32(-np.inf))
            mask = causal if mask is None else mask + causal
        return mask

    def causal_mask(self) -> np.ndarray:
        """True is seen; the last query sees all keys."""
        case = self.case
        return np.tri(case.seqlen_q, case.seqlen_k, case.seqlen_k - case.seqlen_q, dtype=bool)[None, None]


@dataclass
class Variant:
    """One way of a peer to compute a problem: `run` is what is timed, and of what it returned `output` makes an array
    (batch, heads, seq, dim)."""

    run: Callable[[], Any]
    output: Callable[[Any], np.ndarray]


# Variants by name, and why others cannot be.
Prepared = tuple[dict[str, Variant], dict[str, str]]


def try_variants(makers: dict[str, Callable[[], Variant | None]]) -> Prepared:
    """Makes what can be made; None is not applicable."""
    variants, failures = {}, {}
    for name, make in makers.items():
        try:
            variant = make()
        except Exception as error:  # whatever a library raises: it is reported
            failures[name] = describe(error)
        else:
            if variant is not None:
                variants[name] = variant
    return variants, failures


def describe(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


class Server:
    def __init__(self, prepare: Callable[[Problem], Prepared]) -> None:
        self._prepare = prepare
        self._variants: dict[str, Variant] = {}

    def answer(self, request: dict[str, Any]) -> dict[str, Any]:
        op = request["op"]
        if op == "release":
            self._variants = {}
            return {}
        if op == "prepare":
            self._variants = {}
            self._variants, failures = self._prepare(Problem.read(request))
            return {"variants": list(self._variants), "failures": failures}
        variant = self._variants[request["variant"]]
        if op == "check":
            return self._check(variant, Path(request["output"]))
        if op == "run":
            return {"ms": times(variant, request["seconds"])}
        raise ValueError(f"there is no op {op}")

    def _check(self, variant: Variant, path: Path) -> dict[str, Any]:
        """One call: its time, the memory it took at its peak, its output written as f32."""
        resident = reset_peak()
        start = time.perf_counter_ns()
        result = variant.run()
        elapsed = time.perf_counter_ns() - start
        peak = status_kib("VmHWM") - resident
        np.ascontiguousarray(decode(variant.output(result)), np.float32).tofile(path)
        return {"ms": elapsed / 1e6, "peak_kib": peak}


def times(variant: Variant, seconds: float) -> list[float]:
    """Milliseconds of each call, one at least."""
    run, clock = variant.run, time.perf_counter_ns
    end = clock() + int(seconds * 1e9)
    spent = []
    while True:
        start = clock()
        run()
        stop = clock()
        spent.append((stop - start) / 1e6)
        if stop >= end:
            return spent


def reset_peak() -> int:
    """Sets the peak of resident memory back, and returns what is resident, in KiB."""
    Path("/proc/self/clear_refs").write_text("5")
    return status_kib("VmRSS")


def status_kib(name: str) -> int:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name + ":"))


def serve(version: str, prepare: Callable[[Problem], Prepared]) -> None:
    """Answers about problems until standard input ends."""
    serve_answers(version, Server(prepare).answer)


def serve_answers(version: str, answer_to: Callable[[dict[str, Any]], dict[str, Any]]) -> None:
    """Answers until standard input ends. What libraries print goes to standard error."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)

    def say(answer: dict[str, Any]) -> None:
        answers.write(json.dumps(answer) + "\n")
        answers.flush()

    say({"version": version})
    for line in sys.stdin:
        try:
            answer = answer_to(json.loads(line))
        except Exception as error:  # the parent decides what an error means
            answer = {"error": describe(error)}
        say(answer)
