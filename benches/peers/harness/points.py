"""Time and memory of single calls, each point in a process of its own."""

import shutil
from dataclasses import asdict
from statistics import median
from typing import Any

import numpy as np

from . import environment
from .cases import Case
from .data import Inputs, tolerance
from .environment import SetupError, say
from .team import scratch_directory
from .worker import Worker, WorkerError, start


def measure(
    peers: list[str], wanted: list[tuple[int, int]], seconds: float
) -> tuple[list[dict[str, Any]], dict[str, dict[str, Any]]]:
    """Points of each peer at each (seqlen, threads), shape (1, 8, S, S, 64) in f32, and what the peers say they are."""
    binaries = environment.build_runners(peers)
    points, about, inputs = [], {}, None
    directory = scratch_directory()
    try:
        (directory / "small").mkdir()
        small = Inputs.write(_case(64), "f32", directory / "small")
        for number, (seqlen, threads) in enumerate(wanted, 1):
            if inputs is None or inputs.case.seqlen_q != seqlen:
                inputs = Inputs.write(_case(seqlen), "f32", directory)
            for peer in peers:
                say(f"[{number}/{len(wanted)}] {peer} S {seqlen} threads {threads}")
                worker = start(peer, threads, binaries, directory)
                try:
                    worker.wait_ready()
                    about[peer] = worker.about
                    _call(worker, small, threads)  # loads code and starts threads, which is not the call's memory
                    point = _point(worker, inputs, threads, seconds)
                except WorkerError as error:
                    raise SetupError(f"{peer} at S {seqlen}, threads {threads}: {error}") from None
                finally:
                    worker.kill()
                points.append({"peer": peer, "seqlen": seqlen, "threads": threads} | point)
    finally:
        shutil.rmtree(directory, ignore_errors=True)
    return points, about


def _case(seqlen: int) -> Case:
    return Case("prefill", 1, 8, 8, seqlen, seqlen, 64)


def _point(worker: Worker, inputs: Inputs, threads: int, seconds: float) -> dict[str, float]:
    """Median time of `seconds` of calls, one at least, and the memory that the first took besides its operands."""
    variant, peak_kib, error = _call(worker, inputs, threads)
    times = worker.ask("run", variant=variant, seconds=seconds)["ms"]
    return {"ms": median(times), "calls": len(times), "peak_mib": peak_kib / 1024, "error": error}


def _call(worker: Worker, inputs: Inputs, threads: int) -> tuple[str, int, float]:
    """One checked call: variant, peak of memory in KiB, error."""
    request = {"dtype": "f32", "precision": "highest", "threads": threads, "directory": str(inputs.directory)}
    (variant,) = worker.ask("prepare", case=asdict(inputs.case), **request)["variants"]
    path = inputs.directory / "out.bin"
    first = worker.ask("check", variant=variant, output=str(path))
    error = inputs.max_error(np.fromfile(path, np.float32))
    if error > tolerance("f32", "highest"):
        raise WorkerError(f"wrong by {error:.0e} of max|v|")
    return variant, first["peak_kib"], error
