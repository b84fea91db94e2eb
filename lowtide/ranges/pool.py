"""All that was found for a range, judged at sampled points: what each sequence takes there, and the few that suffice under every limit.

Under a limit of memory the fastest that fits at a point is best there, under one of time the leanest that keeps to it. Whatever the limit
is, the best is on the frontier of that point: what no other beats in both. A few are kept: one after another that which spares most time
under all limits at all sampled points together, long delays above all, until what is kept is nearly as fast as what was found wherever that
only just fits, or `MOST` are. As the limit has no say in which, a larger one is never slower at any shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide.planning.request import Request
from lowtide.problems.order import Bytes, Ints
from lowtide.ranges.candidate import Ranged

MOST = 24  # members of a family
SAME = 1 + 1e-9  # times this near differ by the rounding of their sums alone
_ENOUGH = 0.01  # by so much more time a member may take than what it stands for
_MISSING = 0.5  # what counts for a part that nothing stands for
_TINY_US = 1e-3
_APART = 0.005  # parts of a frontier are so far apart in time


@dataclass(frozen=True, eq=False)
class JudgedSequences:
    """Sequences at points."""

    which: tuple[int, ...]  # [sequences] the candidate that each is of
    sequences: tuple[Ints, ...]
    peak_bytes: Bytes  # [sequences, points]
    time_us: NDArray[np.float64]  # [sequences, points]

    @classmethod
    def of(
        cls, pool: Sequence[tuple[int, Ints]], candidates: Sequence[Ranged], points: Sequence[Mapping[str, int]], request: Request
    ) -> JudgedSequences:
        """What the distinct ones of a pool take at each of these points."""
        distinct = {(which, sequence.tobytes()): sequence for which, sequence in pool}
        owners = tuple(which for which, _ in distinct)
        costs = np.zeros((len(distinct), len(points), 2))
        for which in set(owners):
            rows = [row for row, owner in enumerate(owners) if owner == which]
            sequences = [sequence for (owner, _), sequence in distinct.items() if owner == which]
            costs[rows] = candidates[which].remat_problem(request).costs(sequences, points)
        return cls(owners, tuple(distinct.values()), costs[..., 0].astype(np.int64), costs[..., 1])

    @property
    def order_us(self) -> NDArray[np.float64]:
        """[points] the time without recomputation, of the fastest."""
        least: NDArray[np.float64] = self.time_us.min(axis=0)
        return least

    def few(self) -> list[int]:
        """The sequences to keep, by their place here.

        Where nothing has to be computed again nothing is: what takes no longer than the fastest is stood for by what takes no longer, too.
        The leanest at the first point is kept, so that what can be kept to there at all is.
        """
        delays = self._delays()
        kept = [int(self.peak_bytes[:, 0].argmin())]
        left = delays[kept[0]]
        while len(kept) < MOST and left.max() > _ENOUGH:
            spared = (left**2 - np.minimum(left, delays) ** 2).sum(axis=1)
            kept.append(int(spared.argmax()))
            left = np.minimum(left, delays[kept[-1]])
        return sorted(set(kept))

    def _delays(self) -> NDArray[np.float64]:
        """[sequences, parts of frontiers] the share by which each is slower where a part only just fits; `_MISSING` if it does not fit."""
        parts = [(place, row) for place in range(self.time_us.shape[1]) for row in self._frontier(place)]
        places, rows = (np.array(each) for each in zip(*parts, strict=True))
        least_us, most_bytes = self.time_us[rows, places], self.peak_bytes[rows, places]
        delays = self.time_us[:, places] / np.maximum(least_us, _TINY_US) - 1
        misses = (self.peak_bytes[:, places] > most_bytes) | ((least_us <= self.order_us[places] * SAME) & (delays > SAME - 1))
        rounded: NDArray[np.float64] = np.where(misses, _MISSING, delays.clip(0, _MISSING))
        return rounded

    def _frontier(self, place: int) -> list[int]:
        """What no other beats at a point, the leanest first; of neighbours in time the leaner one, and the fastest of all."""
        frontier: list[int] = []
        us, enough = self.time_us[:, place], np.inf
        fastest = us.min() * SAME
        for row in np.lexsort((us, self.peak_bytes[:, place])).tolist():
            if us[row] < enough:
                frontier.append(row)
                enough = us[row] / (1 + _APART) if us[row] > fastest * (1 + _APART) else min(us[row] / SAME, fastest)
        return frontier
