"""What the commands share: values of options, errors in a line, an end without broken files."""

import argparse
import os
import signal
import sys
from collections.abc import Callable
from typing import NoReturn

from .environment import SetupError, say


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


def sequence_lengths(text: str) -> list[int]:
    try:
        lengths = sorted({int(word) for word in text.split(",")})
    except ValueError:
        lengths = [0]
    if not all(1 <= length <= 2**20 for length in lengths):
        raise argparse.ArgumentTypeError(f"{text!r} is not a list of lengths")
    return lengths


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


def end_with(name: str, main: Callable[[list[str]], int]) -> NoReturn:
    """Runs `main` and exits with its status, 1 if something is missing, 130 if interrupted."""
    signal.signal(signal.SIGTERM, _interrupt)
    try:
        sys.exit(main(sys.argv[1:]))
    except SetupError as error:
        say(f"{name}: {error}")
        sys.exit(1)
    except KeyboardInterrupt:
        say(f"\n{name}: interrupted")
        sys.exit(130)
    except BrokenPipeError:  # who reads our output has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        sys.exit(1)


def _interrupt(*_: object) -> NoReturn:
    raise KeyboardInterrupt
