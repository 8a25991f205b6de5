#!/usr/bin/env python3
"""polyhead beside other libraries, same problems, threads and cores, in one run: `python3 benches/peers/compare.py`.

README.md beside this file says what is compared, how it is timed, and what the columns mean.
"""

import argparse
from pathlib import Path

from harness import environment
from harness.cases import DTYPES, PRECISIONS, select
from harness.cli import Parser, end_with, positive, thread_counts, words
from harness.environment import DEFAULT_PEERS, PEERS


def parse(arguments: list[str]) -> argparse.Namespace:
    parser = Parser(prog="compare.py", description=__doc__.splitlines()[0])
    parser.add_argument("--cases", metavar="REGEX", default="", help="cases whose id it finds (default: all)")
    parser.add_argument("--dtypes", type=words(tuple(DTYPES)), default=["f32"], help="of f32,bf16,f16 (default: f32)")
    parser.add_argument("--threads", type=thread_counts, default=[1], help="thread counts, as 1,2 (default: 1)")
    parser.add_argument(
        "--seconds",
        type=positive,
        default=0.6,
        help="for each row (default: 0.6); with more, more calls and slower peers",
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
    environment.enter_venv(environment.ensure_venv(environment.packages(options.peers)))
    from harness.run import run  # now that its packages are there

    return 0 if run(options) else 1


if __name__ == "__main__":
    end_with("compare.py", main)
