"""A peer in a process of its own, told what to do by lines of JSON."""

import contextlib
import json
import os
import select
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from .environment import HERE, worker_env

START_SECONDS = 180
REPLY_SECONDS = 600


class WorkerError(Exception):
    """What a worker says it cannot do."""


class WorkerDied(WorkerError):
    """A worker that is no more, or silent for too long."""


class Worker:
    """A child pinned to its cores: one core a thread."""

    def __init__(self, peer: str, threads: int, command: list[str], cores: list[int], log: Path) -> None:
        self.peer, self.threads, self.log = peer, threads, log
        with log.open("w") as errors:
            self._child = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                cwd=HERE,
                env=worker_env(threads),
                preexec_fn=lambda: os.sched_setaffinity(0, cores),
            )
        self._unread = b""
        self.about: dict[str, Any] = {}

    def wait_ready(self) -> None:
        """Reads the first line: versions, level."""
        self.about = self._receive(START_SECONDS)

    def send(self, op: str, **arguments: Any) -> None:
        try:
            self._child.stdin.write(json.dumps({"op": op, **arguments}).encode() + b"\n")
            self._child.stdin.flush()
        except (OSError, ValueError):  # it is gone, or its pipe was closed then
            raise self._death() from None

    def receive(self) -> dict[str, Any]:
        return self._receive(REPLY_SECONDS)

    def ask(self, op: str, **arguments: Any) -> dict[str, Any]:
        self.send(op, **arguments)
        return self.receive()

    def _receive(self, seconds: float) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while b"\n" not in self._unread:
            if not select.select([self._child.stdout], [], [], max(0.0, end - time.monotonic()))[0]:
                self.kill()
                raise WorkerDied(f"no answer in {seconds:.0f} s")
            part = os.read(self._child.stdout.fileno(), 1 << 16)
            if not part:
                raise self._death()
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\n")
        answer = json.loads(line)
        if "error" in answer:
            raise WorkerError(answer["error"])
        return answer

    @property
    def alive(self) -> bool:
        return self._child.poll() is None

    def _death(self) -> WorkerDied:
        self.kill()
        lines = [line.strip() for line in self.log.read_text(errors="replace").splitlines() if line.strip()]
        return WorkerDied(f"ended with status {self._child.returncode}" + (f": {lines[-1]}" if lines else ""))

    def settle(self) -> None:
        """Waits, 0.2 s at the most, until threads that spin after their work have gone to sleep."""
        if self.threads == 1:
            return
        used = self._cpu_ns()
        for _ in range(40):
            time.sleep(0.005)  # the clock of a running thread moves with the scheduler's ticks, of up to 4 ms
            used, before = self._cpu_ns(), used
            if used - before < 500_000:
                return

    def _cpu_ns(self) -> int:
        total = 0
        for path in Path(f"/proc/{self._child.pid}/task").glob("*/schedstat"):
            try:
                total += int(path.read_text().split()[0])
            except (OSError, IndexError):
                continue
        return total

    def kill(self) -> None:
        self._child.kill()
        self._child.wait()
        self._child.stdout.close()
        with contextlib.suppress(OSError):  # what it did not read
            self._child.stdin.close()


def start(peer: str, threads: int, binaries: dict[str, Path], directory: Path) -> Worker:
    """A worker on the first `threads` cores; its errors go to a file of `directory`."""
    binary = binaries.get(peer)
    command = [str(binary), peer] if binary else [sys.executable, "-m", f"workers.{peer}"]
    cores = sorted(os.sched_getaffinity(0))[:threads]
    return Worker(peer, threads, command, cores, directory / f"{peer}-{threads}.log")
