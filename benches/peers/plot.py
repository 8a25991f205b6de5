#!/usr/bin/env python3
"""Draws how time and memory of polyhead and PyTorch grow with sequence and threads: `python3 benches/peers/plot.py`.

Measures (1, 8, S, S, 64) f32, each point in a fresh process, writes the data beside the picture, and draws it;
`--draw-only` draws it again from the data.
"""

import argparse
import datetime
import json
import os
import shlex
import sys
from pathlib import Path
from typing import Any

from harness import environment
from harness.cli import Parser, end_with, positive, sequence_lengths
from harness.environment import SetupError

PEERS = {"ours": "polyhead", "torch": "PyTorch"}
SEQLENS = [2**i for i in range(7, 16)]
THREADS_SEQLEN = 4096
# Both can be told apart by who sees no red or no green, and are seen on white and on black.
COLOURS = {"ours": "#1f77b4", "torch": "#d95f02"}
MARKERS = {"ours": "o", "torch": "s"}


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(prog="plot.py", description=__doc__.splitlines()[0])
    here = environment.HERE
    parser.add_argument("--draw-only", action="store_true", help="do not measure, read the data")
    parser.add_argument("--seqlens", type=sequence_lengths, default=SEQLENS, help="default: 128 to 32768, doubling")
    parser.add_argument("--seconds", type=positive, default=2.0, help="for each point, one call at least (default: 2)")
    parser.add_argument("--svg", type=Path, default=here / "scaling.svg", help="default: beside this script")
    parser.add_argument("--json", type=Path, default=here / "scaling.json", help="default: beside this script")
    return parser.parse_args(arguments)


def cpu_model() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown")


def describe(options: argparse.Namespace) -> dict[str, Any]:
    """Measures, and says where, when and how beside the points."""
    from harness.points import measure  # now that its packages are there

    cores = len(os.sched_getaffinity(0))
    longest = min(THREADS_SEQLEN, max(options.seqlens))
    wanted = {(seqlen, cores) for seqlen in options.seqlens} | {(longest, threads + 1) for threads in range(cores)}
    points, about = measure(list(PEERS), sorted(wanted), options.seconds)
    return {
        "command": shlex.join(["python3", "benches/peers/plot.py", *sys.argv[1:]]),
        "date": datetime.date.today().isoformat(),
        "cpu": cpu_model(),
        "cores": cores,
        "level": about["ours"]["level"],
        "versions": {"ours": environment.revision(), "torch": about["torch"]["version"]},
        "shape": "batch 1, 8 heads, S queries and keys, head dim 64, f32",
        "threads_seqlen": longest,
        "points": points,
    }


def draw(data: dict[str, Any], path: Path) -> None:
    import matplotlib

    matplotlib.use("svg")
    # Text stays text, and the same data give the same file.
    matplotlib.rcParams.update({"svg.fonttype": "none", "svg.hashsalt": "polyhead", "font.size": 10})
    import matplotlib.pyplot as plt

    figure, axes = plt.subplots(2, 2, figsize=(10, 7), layout="constrained")
    cores, longest = data["cores"], data["threads_seqlen"]
    by_seqlen = [point for point in data["points"] if point["threads"] == cores]
    by_threads = sorted((p for p in data["points"] if p["seqlen"] == longest), key=lambda point: point["threads"])
    plural = "s" if cores > 1 else ""
    for column, (points, axis, title) in enumerate(
        [(by_seqlen, "seqlen", f"{cores} thread{plural}"), (by_threads, "threads", f"S = {longest}")]
    ):
        for row, (value, label) in enumerate(
            [("ms", "time of a call, ms"), ("peak_mib", "peak memory of a call, MiB")]
        ):
            panel = axes[row][column]
            for peer, name in PEERS.items():
                mine = [(point[axis], point[value]) for point in points if point["peer"] == peer]
                x, y = zip(*mine, strict=True)
                panel.plot(x, y, color=COLOURS[peer], marker=MARKERS[peer], markersize=5, label=name)
            style_panel(panel, axis, sorted({point[axis] for point in points}), label, title if row == 0 else "")
    axes[0][0].legend(frameon=False)
    versions = f"polyhead {data['versions']['ours']} at level {data['level']}, PyTorch {data['versions']['torch']}"
    figure.suptitle(f"{data['shape']}\n{versions}; {data['cpu']}, {cores} cores, {data['date']}", fontsize=10)
    figure.savefig(path, metadata={"Date": None})


def style_panel(panel: Any, axis: str, ticks: list[int], label: str, title: str) -> None:
    from matplotlib import ticker

    if axis == "seqlen":
        panel.set_xscale("log", base=2)
        panel.set_yscale("log")
        panel.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
        panel.yaxis.set_major_formatter(ticker.FuncFormatter(lambda value, _: f"{value:g}"))
        panel.yaxis.set_minor_locator(ticker.NullLocator())
        panel.set_xlabel("S, queries and keys")
    else:
        panel.set_ylim(0, 1.08 * panel.get_ylim()[1])
        panel.set_xlabel("threads")
    panel.set_xticks(ticks, [str(tick) for tick in ticks], fontsize=8)
    panel.set_ylabel(label)
    panel.set_title(title, fontsize=10)
    panel.grid(alpha=0.3)


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    names = ["numpy", "matplotlib"] if options.draw_only else ["numpy", "torch", "matplotlib"]
    environment.enter_venv(environment.ensure_venv(names))
    try:
        if options.draw_only:
            data = json.loads(options.json.read_text())
        else:
            data = describe(options)
            options.json.write_text(json.dumps(data, indent=1) + "\n")
        draw(data, options.svg)
    except OSError as error:
        raise SetupError(f"{error.filename}: {error.strerror}") from None
    except (ValueError, KeyError) as error:
        raise SetupError(f"{options.json} is not what this script writes: {error}") from None
    return 0


if __name__ == "__main__":
    end_with("plot.py", main)
