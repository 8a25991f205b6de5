"""Results: who is right, who is best, and how it is shown."""

import json
import math
from dataclasses import dataclass, field
from statistics import median

OURS = "ours"


@dataclass
class Answer:
    """What one variant of a peer did: milliseconds of its calls and largest error. The first call, which was checked,
    counts only if there was no time for another."""

    variant: str
    first_ms: float
    error: float
    tolerance: float
    ms: list[float] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        return median(self.ms or [self.first_ms])

    @property
    def right(self) -> bool:
        return self.error <= self.tolerance


def best_answer(answers: list[Answer]) -> Answer | None:
    """The fastest right one; the fastest wrong one if none is right."""
    return min(answers, key=lambda answer: (not answer.right, answer.median_ms), default=None)


@dataclass
class Row:
    case: str
    dtype: str
    precision: str
    threads: int
    level: str | None
    # 4 * head_dim for each visible (query, key) pair.
    flops: float
    # None: the peer cannot do this case.
    answers: dict[str, Answer | None]
    # Why an answer is missing.
    notes: dict[str, str] = field(default_factory=dict)

    @property
    def ours_ms(self) -> float | None:
        ours = self.answers.get(OURS)
        return ours.median_ms if ours else None

    @property
    def best_peer(self) -> str | None:
        right = {name: a.median_ms for name, a in self.answers.items() if name != OURS and a and a.right}
        return min(right, key=right.__getitem__, default=None)

    @property
    def ratio(self) -> float | None:
        """How many times as long the best peer takes as we; None if there is no best peer, or we are wrong."""
        ours, best = self.answers.get(OURS), self.best_peer
        return self.answers[best].median_ms / ours.median_ms if best and ours and ours.right else None

    @property
    def gflops(self) -> float | None:
        return self.flops / self.ours_ms / 1e6 if self.ours_ms else None

    def wrong(self) -> list[str]:
        return [name for name, answer in self.answers.items() if answer and not answer.right]

    def to_json(self) -> str:
        answers = self.answers.items()
        peers = {name: a and a.median_ms for name, a in answers if name != OURS}
        errors = {name: a and (a.error if math.isfinite(a.error) else "inf") for name, a in answers}
        return json.dumps(
            {
                "case": self.case,
                "dtype": self.dtype,
                "precision": self.precision,
                "threads": self.threads,
                "level": self.level,
                "ours_ms": self.ours_ms,
                "peers": peers,
                "best_peer": self.best_peer,
                "ratio": self.ratio,
                "gflops": self.gflops,
                "error": errors,
                "wrong": self.wrong(),
                "variants": {name: a.variant for name, a in answers if a},
                "calls": {name: max(1, len(a.ms)) for name, a in answers if a},
                "notes": self.notes,
            }
        )


class Table:
    """Lines of fixed columns, so that each can be printed when it is known."""

    def __init__(self, peers: list[str], cases: list[str], show_precision: bool) -> None:
        self._peers = peers
        self._case_width = max(map(len, cases))
        self._show_precision = show_precision

    def header(self) -> str:
        cells = [f"{peer:>15}" for peer in self._peers]
        return self._line("case", "dtype", "precision", "threads", cells, "best peer", "ratio", "GFLOP/s")

    def row(self, row: Row) -> str:
        cells = [f"{self._cell(row, peer):>15}" for peer in self._peers]
        ratio = f"{row.ratio:.2f}" if row.ratio else "-"
        gflops = f"{row.gflops:.1f}" if row.gflops else "-"
        threads = str(row.threads)
        return self._line(row.case, row.dtype, row.precision, threads, cells, row.best_peer or "-", ratio, gflops)

    @staticmethod
    def _cell(row: Row, peer: str) -> str:
        answer = row.answers.get(peer)
        if answer is None:
            return row.notes.get(peer, "") if row.notes.get(peer) == SLOW else "-"
        return f"{'' if answer.right else 'WRONG '}{number(answer.median_ms)} {short(answer.error)}"

    def _line(
        self, case: str, dtype: str, precision: str, threads: str, cells: list[str], best: str, ratio: str, gflops: str
    ) -> str:
        middle = f" {precision:<9}" if self._show_precision else ""
        start = f"{case:<{self._case_width}} {dtype:<5}{middle} {threads:>7}"
        return f"{start}{''.join(cells)}  {best:<11} {ratio:>5} {gflops:>7}"


# Stands in the table for a peer that was left out since one call would take far longer than the best peer's.
SLOW = "slow"


def number(ms: float) -> str:
    """Three digits."""
    rounded = float(f"{ms:.3g}")
    return f"{rounded:.{max(0, 2 - math.floor(math.log10(rounded)))}f}" if rounded else "0"


def short(error: float) -> str:
    return f"{error:.0e}".replace("e-0", "e-").replace("e+00", "") if math.isfinite(error) else "inf"
