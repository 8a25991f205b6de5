"""A whole run: all rows of cases, element types, precisions and thread counts."""

import argparse
from pathlib import Path
from typing import TextIO

from . import environment
from .cases import Case
from .data import Inputs
from .environment import SetupError, say
from .measure import Measurement, Pace, temporary_files
from .table import OURS, SLOW, Table
from .team import Progress, Team

MAX_KV_BYTES = 2.2e9
# K and V that a peer holds, with the copies it makes of them.
COPIES = 2.5


def run(options: argparse.Namespace) -> bool:
    """Builds, measures, prints. Whether there are results, and ours are right."""
    binaries = environment.build_runners(options.peers)
    progress = Progress()
    with Team(options.peers, options.threads, binaries, progress) as team:
        if not options.json:
            return measure(options, team, progress, None)
        try:
            lines = options.json.open("w")
        except OSError as error:
            raise SetupError(f"cannot write {options.json}: {error.strerror}") from None
        with lines:
            return measure(options, team, progress, lines)


def write_models(case: Case, dtype: str, directory: Path) -> None:
    """The ONNX models that rten reads."""
    from workers.graphs import Graphs  # onnx is there only if rten is asked for

    graphs = Graphs(case, dtype)
    for name, model in (("attention", graphs.attention()), ("plain", graphs.plain())):
        if model is not None:
            (directory / f"{name}.onnx").write_bytes(model.SerializeToString())


def available_bytes() -> int:
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def too_large(case: Case, dtype: str) -> str | None:
    """Why the case cannot be run here."""
    size = case.kv_bytes(dtype)
    if size > MAX_KV_BYTES:
        return f"K and V take {size / 1e9:.1f} GB, more than {MAX_KV_BYTES / 1e9} GB"
    # The file in the page cache, and one peer.
    need, available = size * (1 + COPIES), available_bytes()
    if need > available:
        return f"it takes about {need / 1e9:.1f} GB of memory, {available / 1e9:.1f} GB are free"
    return None


def rows_of(options: argparse.Namespace) -> list[tuple[Case, str, str, int]]:
    """(case, dtype, precision, threads): the precision is one of f32 products, other types have one row."""
    return [
        (case, dtype, precision, threads)
        for case in options.cases
        for dtype in options.dtypes
        for precision in (options.precision if dtype == "f32" else options.precision[:1])
        for threads in options.threads
    ]


def measure(options: argparse.Namespace, team: Team, progress: Progress, lines: TextIO | None) -> bool:
    """Prints and writes all rows. Whether there are some, and ours are right."""
    rows, pace, inputs, fine = rows_of(options), Pace(), None, True
    table = Table(options.peers, [case.id for case in options.cases], len(options.precision) > 1)
    print(f"# {team.versions()}; level {team.level() or 'unknown'}\n{table.header()}", flush=True)
    printed, said = 0, set()
    for number, (case, dtype, precision, threads) in enumerate(rows, 1):
        progress.start(number, len(rows), f"{case.id} {dtype} threads {threads}")
        if inputs is None or (inputs.case, inputs.dtype) != (case, dtype):
            for path in temporary_files(team.directory):
                path.unlink()
            why = too_large(case, dtype)
            if why:
                progress.say(f"{case.id} {dtype} is skipped: {why}")
                continue
            progress.step("writing operands")
            inputs = Inputs.write(case, dtype, team.directory)
            if "rten" in options.peers and dtype == "f32":
                write_models(case, dtype, team.directory)
        workers = team.ready(threads)
        if not workers:
            raise SetupError("no peer is left")
        together = case.kv_bytes(dtype) * (1 + len(workers) * COPIES) < available_bytes()
        step = Measurement(inputs, precision, threads, options.seconds, pace, progress.step, team.died, together)
        row = step.row(workers, team.level())
        progress.clear()
        print(table.row(row), flush=True)
        for peer, note in row.notes.items():
            if note != SLOW and (peer, note) not in said:
                said.add((peer, note))
                say(f"{case.id} {dtype}: {peer} cannot: {note}")
        if lines:
            lines.write(row.to_json() + "\n")
            lines.flush()
        printed += 1
        fine &= OURS not in row.wrong()
    return fine and printed > 0
