"""One row of the table: all peers prepare the same problem, each answer is checked, then calls are timed in turns."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from .data import Inputs, tolerance
from .pace import Pace
from .table import OURS, SLOW, Answer, Row, best_answer
from .worker import Worker, WorkerDied, WorkerError

# Turns that a row aims at, each peer running for its share of a turn.
TURNS = 5
WITH_LAYERS = (OURS, "torch")


@dataclass
class Entry:
    """A variant of a peer that takes part in a row."""

    worker: Worker
    variant: str
    guess: float | None
    # The best of its first calls, in ms.
    trial: float = 0.0
    answer: Answer | None = None

    @property
    def peer(self) -> str:
        return self.worker.peer


@dataclass
class Measurement:
    """Measures one case, element type, precision and number of threads in about `seconds`."""

    inputs: Inputs
    precision: str
    threads: int
    seconds: float
    pace: Pace
    progress: Callable[[str], None]
    died: Callable[[Worker, WorkerError], None]
    # Whether all peers hold their operands at once; if not, each reads them again at each of its turns.
    together: bool = True
    notes: dict[str, str] = field(default_factory=dict)

    def row(self, workers: list[Worker], level: str | None) -> Row:
        case, dtype = self.inputs.case, self.inputs.dtype
        if self.together:
            entries = self._leave_out(self._prepare(workers))
            spent = self._in_turn(entries, self._check) / 1e3
            entries = [entry for entry in entries if entry.answer]
            self._take_turns(_contenders(entries), self.seconds - spent)
            self._release(workers)
        else:
            entries = self._one_at_a_time(workers)
        answers = {worker.peer: best_answer([e.answer for e in entries if e.peer == worker.peer]) for worker in workers}
        flops = self.inputs.flops()
        notes = {peer: why for peer, why in self.notes.items() if answers.get(peer) is None}
        return Row(case.id, dtype, self.precision, self.threads, level, flops, answers, notes)

    def _one_at_a_time(self, workers: list[Worker]) -> list[Entry]:
        """Operands are too large for all to hold them: two turns, forth and back."""
        entries = []
        for worker in workers:
            mine = self._leave_out(self._prepare([worker]))
            self._in_turn(mine, self._check)
            self._release([worker])
            entries += [entry for entry in mine if entry.answer]
        contenders = _contenders(entries)
        share = self.seconds / len(contenders) / 2 if contenders else 0.0
        for entry in contenders + contenders[::-1]:
            if entry.worker.alive and self._prepare([entry.worker]):
                self._in_turn([entry], self._turn, share)
                self._release([entry.worker])
        return entries

    def _who(self, peer: str, variant: str) -> tuple[object, ...]:
        return (peer, variant, self.inputs.dtype, self.precision)

    def _prepare(self, workers: list[Worker]) -> list[Entry]:
        """All workers at once: reading and compiling is not timed."""
        inputs = self.inputs
        self.progress("preparing")
        request = {
            "case": asdict(inputs.case),
            "dtype": inputs.dtype,
            "precision": self.precision,
            "threads": self.threads,
            "directory": str(inputs.directory),
        }
        if inputs.case.kind == "layer":
            without = [worker.peer for worker in workers if worker.peer not in WITH_LAYERS]
            self.notes.update(dict.fromkeys(without, "it has no such layer"))
            workers = [worker for worker in workers if worker.peer in WITH_LAYERS]
        asked = [worker for worker in workers if self._tell(worker, worker.send, "prepare", **request) is not None]
        entries = []
        for worker in asked:
            answer = self._tell(worker, worker.receive)
            if answer is None:
                continue
            for variant in answer["variants"]:
                guess = self.pace.guess(self._who(worker.peer, variant), inputs.case, self.threads)
                entries.append(Entry(worker, variant, guess))
            if not answer["variants"]:
                self.notes[worker.peer] = "; ".join(answer["failures"].values()) or "no way to do it"
        return entries

    def _tell(self, worker: Worker, action: Callable[..., Any], *arguments: str, **more: Any) -> dict[str, Any] | None:
        """What the worker answers, or None and a note if it refuses or dies."""
        try:
            return action(*arguments, **more) or {}
        except WorkerError as error:
            self.notes[worker.peer] = str(error)
            if isinstance(error, WorkerDied):
                self.died(worker, error)
            return None

    def _leave_out(self, entries: list[Entry]) -> list[Entry]:
        """Not those whose one call would cost much of the row and is, by what they did before, far from the best."""
        known = [entry for entry in entries if entry.guess is not None]
        best_peer = min((entry.guess for entry in known if entry.peer != OURS), default=0.0)
        slow, row = [], self.seconds * 1e3
        for entry in known:
            best_variant = min(other.guess for other in known if other.peer == entry.peer)
            slow_variant = entry.guess > max(row / 20, 1.5 * best_variant) or entry.guess > max(row / 4, best_variant)
            slow_peer = entry.guess > max(row / 4, 2.5 * best_peer) or entry.guess > max(row, 1.5 * best_peer)
            if slow_variant or (entry.peer != OURS and slow_peer):
                slow.append(entry)
                self.notes.setdefault(entry.peer, SLOW)
        return [entry for entry in entries if entry not in slow]

    @staticmethod
    def _in_turn(entries: list[Entry], action: Callable[..., float], *arguments: float) -> float:
        """One after the other, each worker at rest before the next begins. Returns the sum of milliseconds."""
        spent = 0.0
        for entry, following in zip(entries, [*entries[1:], None], strict=True):
            if entry.worker.alive:
                spent += action(entry, *arguments)
            if (following is None or following.worker is not entry.worker) and entry.worker.alive:
                entry.worker.settle()
        return spent

    def _check(self, entry: Entry) -> float:
        """The first call: its time, and its output against the reference; some more if they are short, as the first is
        seldom the best. Returns milliseconds."""
        worker = entry.worker
        self.progress(f"{entry.peer} {entry.variant}: checking")
        path = self.inputs.directory / f"out-{entry.peer}-{self.threads}.bin"
        answer = self._tell(worker, worker.ask, "check", variant=entry.variant, output=str(path))
        if answer is None:
            return 0.0
        error = self.inputs.max_error(np.fromfile(path, np.float32))
        path.unlink()
        limit = tolerance(self.inputs.dtype, self.precision)
        first, more = answer["ms"], []
        if first < self.seconds * 1e3 / 10:
            ran = self._tell(worker, worker.ask, "run", variant=entry.variant, seconds=first / 1e3)
            if ran is None:
                return first
            more = ran["ms"]
        entry.answer, entry.trial = Answer(entry.variant, first, error, limit, more), min([first, *more])
        self.pace.learn(self._who(entry.peer, entry.variant), self.inputs.case, self.threads, entry.trial)
        return first + sum(more)

    def _take_turns(self, entries: list[Entry], seconds: float) -> None:
        """Turns forth and back, so that a drift of the machine's speed meets all alike."""
        left = seconds * 1e3
        share = self.seconds * 1e3 / TURNS / max(1, len(entries))
        turn = 0
        while entries and (affordable := _affordable(entries, left, share)):
            ordered = affordable if turn % 2 == 0 else affordable[::-1]
            left -= self._in_turn(ordered, self._turn, share / 1e3)
            entries = [entry for entry in entries if entry.worker.alive]
            turn += 1
        for entry in entries:
            fastest = min([entry.trial, *entry.answer.ms])  # what a busy machine blurs the least
            self.pace.learn(self._who(entry.peer, entry.variant), self.inputs.case, self.threads, fastest)

    def _turn(self, entry: Entry, seconds: float) -> float:
        """Calls for some seconds: what they took in ms. Who fails now is wrong whatever it answered before."""
        self.progress(f"{entry.peer} {entry.variant}: timing")
        answer = self._tell(entry.worker, entry.worker.ask, "run", variant=entry.variant, seconds=seconds)
        if answer is None:
            entry.answer.error = math.inf
            return 0.0
        entry.answer.ms += answer["ms"]
        return sum(answer["ms"])

    def _release(self, workers: list[Worker]) -> None:
        for worker in workers:
            if worker.alive:
                self._tell(worker, worker.ask, "release")


def _contenders(entries: list[Entry]) -> list[Entry]:
    """Of each peer the right variants that were about as fast as its fastest right one; wrong ones if none is right."""
    kept = []
    for peer in dict.fromkeys(entry.peer for entry in entries):
        mine = [entry for entry in entries if entry.peer == peer]
        right = [entry for entry in mine if entry.answer.right]
        fastest = min(entry.trial for entry in right or mine)
        kept += [entry for entry in right or mine if entry.trial <= 1.3 * fastest]
    return kept


def _affordable(entries: list[Entry], left: float, share: float) -> list[Entry]:
    """Whom the remaining milliseconds suffice for: all, or ours and the best peer for the ratio's sake, or none."""

    def cost(some: list[Entry]) -> float:
        return sum(max(entry.trial, share) for entry in some)

    if cost(entries) <= left:
        return entries
    right = sorted((e for e in entries if e.peer != OURS and e.answer.right), key=lambda e: e.trial)
    two = [entry for entry in entries if entry.peer == OURS] + right[:1]
    return two if cost(two) <= left else []


def temporary_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.bin")) + sorted(directory.glob("*.onnx"))
