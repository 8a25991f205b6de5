"""The workers of a run, and how its progress is shown."""

import os
import shutil
import sys
import tempfile
from contextlib import AbstractContextManager
from pathlib import Path

from . import environment
from .environment import say
from .table import OURS
from .worker import Worker, WorkerError, start

MAX_DEATHS = 3


class Progress:
    """What is happening, on standard error: one changing line on a terminal, a line for each row elsewhere."""

    def __init__(self) -> None:
        self._terminal = sys.stderr.isatty()
        self.row = ""

    def start(self, number: int, total: int, row: str) -> None:
        self.row = f"[{number}/{total}] {row}"
        if not self._terminal:
            say(self.row)

    def step(self, text: str) -> None:
        if self._terminal:
            width = shutil.get_terminal_size().columns - 1
            print(f"\r\x1b[K{f'{self.row}: {text}'[:width]}", end="", file=sys.stderr, flush=True)

    def clear(self) -> None:
        if self._terminal:
            print("\r\x1b[K", end="", file=sys.stderr, flush=True)

    def say(self, text: str) -> None:
        self.clear()
        say(text)


def scratch_directory() -> Path:
    """A new one, on disk as operands can be large. Those that killed runs left behind are removed."""
    parent = environment.directory()
    for old in parent.glob("run-*"):
        if not Path(f"/proc/{old.name.split('-')[1]}").exists():
            shutil.rmtree(old, ignore_errors=True)
    return Path(tempfile.mkdtemp(prefix=f"run-{os.getpid()}-", dir=parent))


class Team(AbstractContextManager):
    """Workers of all peers and thread counts, and the directory that they read operands from."""

    def __init__(self, peers: list[str], threads: list[int], binaries: dict[str, Path], progress: Progress) -> None:
        self._peers, self._threads, self._binaries, self._progress = peers, threads, binaries, progress
        self._workers: dict[tuple[str, int], Worker] = {}
        self._deaths: dict[str, int] = {}
        self.directory = scratch_directory()

    def __enter__(self) -> "Team":
        try:
            for threads in self._threads:
                for peer in self._peers:
                    self._start(peer, threads)
            for worker in list(self._workers.values()):
                self._progress.step(f"starting {worker.peer}")
                self._welcome(worker)
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers.values():
            worker.kill()
        shutil.rmtree(self.directory, ignore_errors=True)

    def _start(self, peer: str, threads: int) -> None:
        self._workers[peer, threads] = start(peer, threads, self._binaries, self.directory)

    def _welcome(self, worker: Worker) -> None:
        try:
            worker.wait_ready()
        except WorkerError as error:
            self._deaths[worker.peer] = MAX_DEATHS
            self._progress.say(f"{worker.peer} is left out, it did not start: {error}")

    def died(self, worker: Worker, error: Exception) -> None:
        self._deaths[worker.peer] = self._deaths.get(worker.peer, 0) + 1
        more = "" if self._deaths[worker.peer] < MAX_DEATHS else "; it is left out from now on"
        self._progress.say(f"{self._progress.row}: {worker.peer} {error}{more}")

    def ready(self, threads: int) -> list[Worker]:
        """Those that live; one that crashed is started again, some times."""
        team = []
        for peer in self._peers:
            if self._deaths.get(peer, 0) < MAX_DEATHS:
                if not self._workers[peer, threads].alive:
                    self._start(peer, threads)
                    self._welcome(self._workers[peer, threads])
                if self._workers[peer, threads].alive:
                    team.append(self._workers[peer, threads])
        return team

    def versions(self) -> str:
        found = {worker.peer: worker.about.get("version") for worker in self._workers.values() if worker.alive}
        found |= {OURS: environment.revision()} if OURS in found else {}
        return ", ".join(f"{peer} {version}" for peer, version in found.items())

    def level(self) -> str | None:
        levels = (worker.about.get("level") for worker in self._workers.values())
        return next((level for level in levels if level), None)
