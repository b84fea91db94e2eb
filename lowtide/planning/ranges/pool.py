"""All that was found for a range, judged at sampled points: what each sequence takes there, and the few that suffice.

Under a limit of memory the fastest that fits at a point is best there, under one of time the leanest that keeps to it, without a limit the
leanest of all. A few are kept, so that at each sampled point one of them is as good as the best there, within a tolerance; where more than
`MOST` would be needed, the tolerance doubles. At the sampled points at which nothing fits, nothing is asked of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide.planning.ranges.ranged import Ranged
from lowtide.planning.request import Budget, Request
from lowtide.problems.order import Bytes, Ints
from lowtide.remat.cost import cost_of
from lowtide.schedule.family import fewest

MOST = 7  # members of a family, beside the fastest and the leanest of all
SAME = 1 + 1e-9  # times this near differ by the rounding of their sums alone
_TOLERANCE = 0.02


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
        costs = np.zeros((len(distinct), len(points), 2))
        for place, point in enumerate(points):
            numeric = {which: candidates[which].at(point) for which, _ in distinct}
            problems = {
                which: each.remat_problem(request.granule_bytes, request.links, request.swap_state) for which, each in numeric.items()
            }
            for row, ((which, _), sequence) in enumerate(distinct.items()):
                cost = cost_of(problems[which], sequence)
                costs[row, place] = cost.peak_bytes, cost.time_us
        owners = tuple(which for which, _ in distinct)
        return cls(owners, tuple(distinct.values()), costs[..., 0].astype(np.int64), costs[..., 1])

    @property
    def order_us(self) -> NDArray[np.float64]:
        """[points] the time without recomputation, of the fastest."""
        least: NDArray[np.float64] = self.time_us.min(axis=0)
        return least

    def fits(self, budget: Budget) -> NDArray[np.bool_]:
        """[sequences, points] which keep to a budget."""
        if budget.memory_bytes is not None:
            return self.peak_bytes <= budget.memory_bytes
        assert budget.latency is not None, "one of them is the limit"
        kept: NDArray[np.bool_] = self.time_us <= budget.latency * self.order_us * SAME
        return kept

    def few(self, budget: Budget) -> list[int]:
        """The sequences to keep, by their place here.

        Where nothing has to be computed again nothing is: under a limit of memory one that takes no longer than the fastest, at as many
        points as can be, is kept whatever the tolerance. At points that were not looked at something must keep to the limit, too: so under
        one of memory the leanest at the first point is among them, where not all points fit, under one of time the fastest.
        """
        fits = self.fits(budget)
        if budget.memory_bytes is None:
            return sorted({*few(np.where(fits, self.peak_bytes, np.inf)), int(self.time_us[:, 0].argmin())})
        free = fits & (self.time_us <= self.order_us * SAME)
        first = int(free.sum(axis=1).argmax())
        kept = {*few(np.where(fits, self.time_us, np.inf)[:, ~free[first]]), *([first] if free[first].any() else [])}
        return sorted(kept if fits.any(axis=0).all() else {*kept, int(self.peak_bytes[:, 0].argmin())})


def few(cost: NDArray[np.float64], tolerance: float = _TOLERANCE) -> list[int]:
    """Few rows of [rows, points] of which one is as good as the best at each point, within the tolerance; inf is what is not allowed."""
    served = cost[:, np.isfinite(cost).any(axis=0)]
    if not served.shape[1]:
        return []
    least = served.min(axis=0)
    ranks = np.where(np.isfinite(served), served / np.maximum(least, 1e-9) * 2**20, 2**40).astype(np.int64)
    worthy = np.flatnonzero((served <= least * (1 + tolerance)).any(axis=1))
    kept = fewest(served[worthy] <= least * (1 + tolerance), ranks[worthy])
    return sorted(int(worthy[each]) for each in kept) if len(kept) <= MOST else few(cost, 2 * tolerance)
