#!/usr/bin/env python3
"""polyhead beside other libraries on the same problems, threads and cores, in one run: `python3 benches/peers/compare.py`.

README.md beside this file says what is compared, how it is timed, and what the columns mean.
"""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import NoReturn

from harness import environment
from harness.cases import DTYPES, PRECISIONS, select
from harness.environment import DEFAULT_PEERS, PEERS, SetupError, say


def words(known: tuple[str, ...]) -> Callable[[str], list[str]]:
    def parse(text: str) -> list[str]:
        chosen = list(dict.fromkeys(word for word in text.split(",") if word))
        unknown = [word for word in chosen if word not in known]
        if unknown or not chosen:
            raise argparse.ArgumentTypeError(f"{', '.join(unknown) or 'nothing'} is not of {', '.join(known)}")
        return chosen

    return parse


def thread_counts(text: str) -> list[int]:
    cores = len(os.sched_getaffinity(0))
    try:
        counts = [int(word) for word in text.split(",")]
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of numbers") from None
    if not all(1 <= count <= cores for count in counts):
        raise argparse.ArgumentTypeError(f"{text} is not of 1 to {cores}, the cores this process may use")
    return list(dict.fromkeys(counts))


def positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < 1e6:
        raise argparse.ArgumentTypeError(f"{text!r} is not a positive number")
    return value


class Parser(argparse.ArgumentParser):
    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(prog="compare.py", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", metavar="REGEX", default="", help="cases whose id it finds (default: all)")
    parser.add_argument("--dtypes", type=words(tuple(DTYPES)), default=["f32"], help="of f32,bf16,f16 (default: f32)")
    parser.add_argument("--threads", type=thread_counts, default=[1], help="thread counts, as 1,2 (default: 1)")
    parser.add_argument(
        "--seconds", type=positive, default=1.0, help="for each row (default: 1); with more, more calls and peers"
    )
    parser.add_argument(
        "--precision", type=words(PRECISIONS), default=["highest"], help="of f32 products (default: highest)"
    )
    parser.add_argument(
        "--peers",
        type=words(PEERS),
        default=list(DEFAULT_PEERS),
        help=f"of {','.join(PEERS)} (default: {','.join(DEFAULT_PEERS)})",
    )
    parser.add_argument("--json", metavar="FILE", type=Path, help="write each row there as a line of JSON")
    parser.add_argument("--list", action="store_true", help="print the ids of the cases and stop")
    options = parser.parse_args(arguments)
    try:
        options.cases = select(options.cases)
    except ValueError as error:
        parser.error(str(error))
    return options


def main(arguments: list[str]) -> int:
    options = parse(arguments)
    if options.list:
        print("\n".join(case.id for case in options.cases))
        return 0
    try:
        environment.enter_venv(environment.ensure_venv(environment.packages(options.peers)))
        from harness.run import run  # now that its packages are there

        fine = run(options)
    except SetupError as error:
        say(f"compare.py: {error}")
        return 1
    return 0 if fine else 1


def stop(*_: object) -> None:
    raise KeyboardInterrupt


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, stop)
    try:
        sys.exit(main(sys.argv[1:]))
    except KeyboardInterrupt:
        sys.exit("\ncompare.py: interrupted")
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)
