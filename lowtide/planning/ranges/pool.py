"""All that was found for a range, judged at sampled points: what each sequence takes there, and the few that suffice under every limit.

Under a limit of memory the fastest that fits at a point is best there, under one of time the leanest that keeps to it. Whatever the limit
is, the best is on the frontier of that point: what no other beats in both. A few are kept, so that at each sampled point each part of that
frontier has one that is nearly as lean and nearly as fast; where more than `MOST` would be needed, the tolerances double. As the limit has
no say in which, a larger one is never slower at any shape.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide.planning.ranges.ranged import Ranged
from lowtide.planning.request import Request
from lowtide.problems.order import Bytes, Ints
from lowtide.schedule.family import one_by_one

MOST = 24  # members of a family
SAME = 1 + 1e-9  # times this near differ by the rounding of their sums alone
_SLOWER, _HEAVIER = 0.02, 0.005  # by how much more time and memory a member may take than what it stands for
_APART = 0.005  # parts of a frontier are so far apart in time


@dataclass(frozen=True, eq=False)
class Judged:
    """Sequences at points."""

    which: tuple[int, ...]  # [sequences] the candidate that each is of
    sequences: tuple[Ints, ...]
    peak_bytes: Bytes  # [sequences, points]
    time_us: NDArray[np.float64]  # [sequences, points]

    @classmethod
    def of(
        cls, pool: Sequence[tuple[int, Ints]], candidates: Sequence[Ranged], points: Sequence[Mapping[str, int]], request: Request
    ) -> Judged:
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
        parts = [(place, row) for place in range(self.time_us.shape[1]) for row in self._frontier(place)]
        places, rows = (np.array(each) for each in zip(*parts, strict=True))
        most_us, most_bytes = self.time_us[rows, places], self.peak_bytes[rows, places]
        is_free = most_us <= self.order_us[places] * SAME
        tolerance = 1
        while True:
            slower = np.where(is_free, SAME, 1 + tolerance * _SLOWER)
            near = (self.time_us[:, places] <= most_us * slower) & (self.peak_bytes[:, places] <= most_bytes * (1 + tolerance * _HEAVIER))
            kept = sorted({*one_by_one(near), int(self.peak_bytes[:, 0].argmin())})
            if len(kept) <= MOST:
                return kept
            tolerance *= 2

    def _frontier(self, place: int) -> list[int]:
        """What no other beats at a point, the leanest first; of neighbours in time the leaner one, and the fastest of all."""
        found: list[int] = []
        us, enough = self.time_us[:, place], np.inf
        fastest = us.min() * SAME
        for row in np.lexsort((us, self.peak_bytes[:, place])).tolist():
            if us[row] < enough:
                found.append(row)
                enough = us[row] / (1 + _APART) if us[row] > fastest * (1 + _APART) else min(us[row] / SAME, fastest)
        return found
