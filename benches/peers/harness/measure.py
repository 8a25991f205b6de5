"""One row of the table: all peers prepare the same problem, each answer is checked, then calls are timed in turns."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np

from .cases import Case
from .data import Inputs, tolerance
from .table import OURS, SLOW, Answer, Row, best_answer
from .worker import Worker, WorkerDied, WorkerError

# Turns that a row aims at, each peer running for its share of a turn.
TURNS = 5


@dataclass
class Pace:
    """Time per operation of each (peer, variant, kind of problem) so far: what a call will take is guessed from it."""

    _ms_per_flop: dict[tuple[object, ...], float] = field(default_factory=dict)

    @staticmethod
    def _key(peer: str, variant: str, case: Case, *settings: object) -> tuple[object, ...]:
        return (peer, variant, case.kind, case.group, case.causal, case.mask, *settings)

    def learn(self, peer: str, variant: str, ms: float, case: Case, *settings: object) -> None:
        self._ms_per_flop[self._key(peer, variant, case, *settings)] = ms / case.flops()

    def guess(self, peer: str, variant: str, case: Case, *settings: object) -> float | None:
        pace = self._ms_per_flop.get(self._key(peer, variant, case, *settings))
        return None if pace is None else pace * case.flops()


@dataclass
class Entry:
    """A variant of a peer that takes part in a row."""

    worker: Worker
    variant: str
    guess: float | None
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
    notes: dict[str, str] = field(default_factory=dict)

    def row(self, workers: list[Worker], level: str | None) -> Row:
        case, dtype = self.inputs.case, self.inputs.dtype
        entries = self._leave_out(self._prepare(workers))
        spent = sum(self._check(entry) for entry in entries) / 1e3
        entries = [entry for entry in entries if entry.answer]
        self._take_turns(_contenders(entries), self.seconds - spent)
        self._release(workers)
        answers = {worker.peer: best_answer([e.answer for e in entries if e.peer == worker.peer]) for worker in workers}
        flops = 4.0 * case.dim * self.inputs.visible_pairs()
        notes = {peer: why for peer, why in self.notes.items() if answers.get(peer) is None}
        return Row(case.id, dtype, self.precision, self.threads, level, flops, answers, notes)

    @property
    def _settings(self) -> tuple[object, ...]:
        return (self.inputs.dtype, self.precision, self.threads)

    def _prepare(self, workers: list[Worker]) -> list[Entry]:
        """All workers at once: reading and compiling is not timed."""
        inputs = self.inputs
        self.progress("preparing")
        asked, entries = [], []
        for worker in workers:
            request = {
                "case": asdict(inputs.case),
                "dtype": inputs.dtype,
                "precision": self.precision,
                "threads": self.threads,
                "directory": str(inputs.directory),
            }
            if self._tell(worker, lambda: worker.send("prepare", **request)) is not None:
                asked.append(worker)
        for worker in asked:
            answer = self._tell(worker, worker.receive)
            if answer is None:
                continue
            for variant in answer["variants"]:
                guess = self.pace.guess(worker.peer, variant, inputs.case, *self._settings)
                entries.append(Entry(worker, variant, guess))
            if not answer["variants"]:
                self.notes[worker.peer] = "; ".join(answer["failures"].values()) or "no way to do it"
        return entries

    def _tell(self, worker: Worker, action: Callable[[], object]) -> object:
        """What the action gives, or None and a note if the worker refuses or dies."""
        try:
            return action() or {}
        except WorkerError as error:
            self.notes[worker.peer] = str(error)
            if isinstance(error, WorkerDied):
                self.died(worker, error)
            return None

    def _leave_out(self, entries: list[Entry]) -> list[Entry]:
        """Without those whose one call would cost much of the row's time and cannot be the best, by what they did before."""
        guesses = {entry.peer: min((e.guess or 0.0 for e in entries if e.peer == entry.peer)) for entry in entries}
        best_peer = min((guess for peer, guess in guesses.items() if peer != OURS), default=0.0)
        kept = []
        for entry in entries:
            guess = entry.guess or 0.0
            slow_variant = guess > self.seconds * 1e3 / 20 and guess > 1.5 * guesses[entry.peer]
            slow_peer = entry.peer != OURS and guess > self.seconds * 1e3 / 4 and guess > 1.5 * best_peer
            if slow_variant or slow_peer:
                self.notes.setdefault(entry.peer, SLOW)
            else:
                kept.append(entry)
        return kept

    def _check(self, entry: Entry) -> float:
        """The first call: its time, and its output against the reference. Returns milliseconds."""
        worker, case = entry.worker, self.inputs.case
        self.progress(f"{entry.peer} {entry.variant}: checking")
        path = self.inputs.directory / f"out-{entry.peer}-{self.threads}.bin"
        ask = lambda: worker.ask("check", variant=entry.variant, output=str(path))  # noqa: E731
        answer = self._tell(worker, ask)
        if answer is None:
            return 0.0
        error = self.inputs.max_error(np.fromfile(path, np.float32))
        path.unlink()
        limit = tolerance(self.inputs.dtype, self.precision)
        entry.answer = Answer(entry.variant, answer["ms"], error, limit)
        worker.settle()
        self.pace.learn(entry.peer, entry.variant, answer["ms"], case, *self._settings)
        return answer["ms"]

    def _take_turns(self, entries: list[Entry], seconds: float) -> None:
        """Turns forth and back, so that a drift of the machine's speed meets all alike."""
        left = seconds * 1e3
        share = self.seconds * 1e3 / TURNS / max(1, len(entries))
        turn = 0
        while entries and (affordable := _affordable(entries, left, share)):
            for entry in affordable if turn % 2 == 0 else reversed(affordable):
                self.progress(f"{entry.peer} {entry.variant}: turn {turn + 1}")
                answer = self._tell(entry.worker, lambda: self._run(entry, share / 1e3))
                if answer is None:
                    entries = [other for other in entries if other.worker is not entry.worker]
                    entry.answer.error = float("inf")
                    break
                left -= sum(answer["ms"])
                entry.answer.ms += answer["ms"]
                entry.worker.settle()
            turn += 1
        for entry in entries:
            self.pace.learn(entry.peer, entry.variant, entry.answer.median_ms, self.inputs.case, *self._settings)

    @staticmethod
    def _run(entry: Entry, seconds: float) -> dict[str, object]:
        return entry.worker.ask("run", variant=entry.variant, seconds=seconds)

    def _release(self, workers: list[Worker]) -> None:
        for worker in workers:
            if worker.alive:
                self._tell(worker, lambda: worker.ask("release"))


def _contenders(entries: list[Entry]) -> list[Entry]:
    """Of each peer the right variants that were about as fast as its fastest right one; the fastest if all are wrong."""
    kept = []
    for peer in dict.fromkeys(entry.peer for entry in entries):
        mine = [entry for entry in entries if entry.peer == peer]
        right = [entry for entry in mine if entry.answer.right]
        fastest = min(entry.answer.first_ms for entry in right or mine)
        kept += [entry for entry in right or mine if entry.answer.first_ms <= 1.3 * fastest]
    return kept


def _affordable(entries: list[Entry], left: float, share: float) -> list[Entry]:
    """Whom the remaining milliseconds suffice for: all, or ours and the best peer for the ratio's sake, or none."""
    cost = lambda some: sum(max(entry.answer.median_ms, share) for entry in some)  # noqa: E731
    if cost(entries) <= left:
        return entries
    right = sorted((e for e in entries if e.peer != OURS and e.answer.right), key=lambda e: e.answer.median_ms)
    two = [entry for entry in entries if entry.peer == OURS] + right[:1]
    return two if cost(two) <= left else []


def temporary_files(directory: Path) -> list[Path]:
    return sorted(directory.glob("*.bin")) + sorted(directory.glob("*.onnx"))
