#!/usr/bin/env python3
"""Sentences a second of all-MiniLM-L6-v2, the example minilm beside PyTorch: `benches/peers/minilm.py --model DIR`.

Both embed the same batches of token ids, in turns, on the same cores; tokenization is not timed. README.md says more.
"""

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from harness import environment
from harness.cli import Parser, end_with, positive, thread_counts
from harness.environment import ROOT, SetupError, say

PINS = {"transformers": "5.24.0"}
TOLERANCE = 1e-4


def counts(text: str) -> list[int]:
    numbers = [int(word) if word.isdigit() else 0 for word in text.split(",")]
    if not all(1 <= number <= 4096 for number in numbers):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers")
    return list(dict.fromkeys(numbers))


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(prog="minilm.py", description=__doc__.splitlines()[0])
    model = os.environ.get("POLYHEAD_MINILM")
    parser.add_argument("--model", type=Path, default=model and Path(model), help="the model's folder (default: $POLYHEAD_MINILM)")
    parser.add_argument("--batch", type=counts, default=[1, 32], help="sentences of a call (default: 1,32)")
    parser.add_argument("--threads", type=thread_counts, default=[1], help="thread counts, as 1,2 (default: 1)")
    parser.add_argument("--turns", type=int, default=5, help="of each, forth and back (default: 5)")
    parser.add_argument("--seconds", type=positive, default=0.5, help="of each turn and batch (default: 0.5)")
    parser.add_argument("--json", metavar="FILE", type=Path, help="write each row there as a line of JSON")
    options = parser.parse_args(arguments)
    if options.model is None:
        parser.error("--model DIR is missing")
    if options.turns < 1:
        parser.error("--turns is at least 1")
    if not (options.model / "config.json").is_file():
        parser.error(f"{options.model} is not a model's folder: no config.json")
    return options


def build() -> Path:
    """The example, as any user gets it."""
    say("building the example minilm")
    target = environment.directory() / "cargo-minilm"
    manifest = str(ROOT / "Cargo.toml")
    command = ["cargo", "build", "--release", "--locked", "--example", "minilm", "--manifest-path", manifest]
    log = environment.directory() / "cargo-minilm.log"
    environment.run_step([*command, "--target-dir", str(target)], log, "cannot build the example")
    return target / "release/examples/minilm"


class Ours:
    """The example, started for each turn."""

    def __init__(self, binary: Path, options: argparse.Namespace, threads: int, cores: list[int]) -> None:
        self._command = [str(binary), "--model", str(options.model), "--threads", str(threads)]
        self._threads, self._cores = threads, cores

    def run(self, *arguments: str) -> dict[str, Any]:
        with tempfile.TemporaryDirectory() as directory:
            report, picture = Path(directory) / "report.json", Path(directory) / "picture.svg"
            done = subprocess.run(
                [*self._command, *arguments, "--json", str(report), "--svg", str(picture)],
                capture_output=True,
                text=True,
                env=environment.worker_env(self._threads),
                preexec_fn=lambda: os.sched_setaffinity(0, self._cores),
            )
            if done.returncode:
                raise SetupError((done.stderr.strip().splitlines() or ["the example failed"])[-1])
            return json.loads(report.read_text())


def batches(sentences: list[str], size: int) -> list[list[str]]:
    """The example's: all sentences, again from the first where they do not fill the last batch."""
    endless = itertools.cycle(sentences)
    return [list(itertools.islice(endless, size)) for _ in range(-(-len(sentences) // size))]


def largest_difference(ours: list[list[float]], theirs: list[list[float]]) -> float:
    return max(abs(x - y) for a, b in zip(ours, theirs, strict=True) for x, y in zip(a, b, strict=True))


def measure(options: argparse.Namespace, binary: Path, threads: int, directory: Path) -> list[dict[str, Any]]:
    """A row for each batch size."""
    from harness.worker import Worker

    cores = sorted(os.sched_getaffinity(0))[:threads]
    ours = Ours(binary, options, threads, cores)
    torch = Worker("torch", threads, [sys.executable, "-m", "workers.minilm"], cores, directory / f"{threads}.log")
    try:
        torch.wait_ready()
        torch.ask("load", model=str(options.model.absolute()))
        about = ours.run("--seconds", "0")
        sentences = about["sentences"]
        error = largest_difference(
            about["embeddings"], torch.ask("embed", batches=batches(sentences, 1))["embeddings"]
        )
        rates: dict[tuple[str, int], list[float]] = {}
        for turn in range(options.turns):
            for size in options.batch:
                work = batches(sentences, size)

                def run_ours(size: int = size) -> float:
                    report = ours.run("--batch", str(size), "--seconds", str(options.seconds))
                    return report["sentences_per_second"][str(size)]

                def run_torch(work: list[list[str]] = work) -> float:
                    passes = torch.ask("time", batches=work, seconds=options.seconds)["ms"]
                    torch.settle()
                    return sum(map(len, work)) / statistics.median(passes) * 1e3

                pair = [("ours", run_ours), ("torch", run_torch)]
                for name, run in pair if turn % 2 == 0 else pair[::-1]:
                    rates.setdefault((name, size), []).append(run())
        rows = []
        for size in options.batch:
            mine, theirs = (statistics.median(rates[name, size]) for name in ("ours", "torch"))
            row = {"batch": size, "threads": threads, "level": about["level"], "ours": mine, "torch": theirs}
            rows.append({**row, "ratio": mine / theirs, "error": error, "versions": torch.about["version"]})
        return rows
    finally:
        torch.kill()


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    environment.PINS.update(PINS)
    environment.enter_venv(environment.ensure_venv(["numpy", "torch", *PINS]))
    from harness.worker import WorkerError

    os.environ |= {"HF_HUB_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
    binary = build()
    rows = []
    with tempfile.TemporaryDirectory() as directory:
        for threads in options.threads:
            try:
                rows += measure(options, binary, threads, Path(directory))
            except WorkerError as error:
                raise SetupError(f"PyTorch: {error}") from None
            if len(rows) == len(options.batch):
                about = f"PyTorch {rows[0]['versions']}; level {rows[0]['level']}"
                print(f"# {about}; sentences a second, tokenization excluded")
                print("batch threads      ours   PyTorch  ratio    error", flush=True)
            for row in rows[-len(options.batch) :]:
                wrong = "" if row["error"] <= TOLERANCE else " WRONG"
                figures = f"{row['ours']:>10.1f}{row['torch']:>10.1f}{row['ratio']:>7.2f}{row['error']:>9.1e}"
                print(f"{row['batch']:>5}{row['threads']:>8}{figures}{wrong}", flush=True)
    if options.json:
        try:
            options.json.write_text("".join(json.dumps(row) + "\n" for row in rows))
        except OSError as error:
            raise SetupError(f"cannot write {options.json}: {error.strerror}") from None
    return 0 if all(row["error"] <= TOLERANCE for row in rows) else 1


if __name__ == "__main__":
    end_with("minilm.py", main)
