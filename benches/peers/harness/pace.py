"""What a call will take, guessed from what calls took before."""

import math
from dataclasses import dataclass, field

from .cases import Case


@dataclass
class Pace:
    """Time per operation of each (peer, variant, ...), kind of problem, number of threads and size, as last seen."""

    _ms_per_flop: dict[tuple[object, ...], dict[int, dict[float, float]]] = field(default_factory=dict)

    @staticmethod
    def _keys(who: tuple[object, ...], case: Case) -> list[tuple[object, ...]]:
        """Problems of the same kind and, if there were none, of any kind."""
        return [(who, case.kind, case.group, case.causal, case.mask), (who,)]

    def learn(self, who: tuple[object, ...], case: Case, threads: int, ms: float) -> None:
        for key in self._keys(who, case):
            by_size = self._ms_per_flop.setdefault(key, {}).setdefault(threads, {})
            by_size[case.flops()] = ms / case.flops()

    def guess(self, who: tuple[object, ...], case: Case, threads: int) -> float | None:
        """Milliseconds by the problem nearest in size, None if nothing is known. Fewer threads bound it, since more
        should not be slower: one slow moment of the machine then leaves nobody out."""
        size = case.flops()
        for key in self._keys(who, case):
            paces = [
                by_size[min(by_size, key=lambda seen: abs(math.log(seen / size)))]
                for count, by_size in self._ms_per_flop.get(key, {}).items()
                if count <= threads
            ]
            if paces:
                return min(paces) * size
        return None
