"""What a call will take, guessed from what calls took before."""

from dataclasses import dataclass, field

from .cases import Case


@dataclass
class Pace:
    """Time per operation of each (peer, variant, ...), number of threads and kind of problem, as last seen."""

    _ms_per_flop: dict[tuple[object, ...], dict[int, float]] = field(default_factory=dict)

    @staticmethod
    def _keys(who: tuple[object, ...], case: Case) -> list[tuple[object, ...]]:
        """Problems of the same kind and, if there were none, of any kind."""
        return [(who, case.kind, case.group, case.causal, case.mask), (who,)]

    def learn(self, who: tuple[object, ...], case: Case, threads: int, ms: float) -> None:
        for key in self._keys(who, case):
            self._ms_per_flop.setdefault(key, {})[threads] = ms / case.flops()

    def guess(self, who: tuple[object, ...], case: Case, threads: int) -> float | None:
        """Milliseconds, None if nothing is known. Fewer threads bound it, since more should not be slower: one slow
        moment of the machine then leaves nobody out."""
        for key in self._keys(who, case):
            paces = [pace for count, pace in self._ms_per_flop.get(key, {}).items() if count <= threads]
            if paces:
                return min(paces) * case.flops()
        return None
