"""Local moves at the end of a round of the search, on what it has found: the archive is better at its levels, below and between them.

They go on where eviction finds nothing (`remat.local_moves`): from the leanest schedule to the levels below, from the best one of each
level, in long runs where the time rises steeply over some levels, and at limits between two levels where it rises most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lowtide.remat.archive import Archive, Point
from lowtide.remat.local_moves import MOVES_A_STATE, LocalMoves
from lowtide.remat.problem import RematProblem

_POLISHED, _REACH = 8, 32  # shares of a round: local moves at all levels take about so much more, one try of them to go lower so much
# So many of the levels to which the time rises most over a few, if by such a share of the least; the share of a round for one long run of
# moves, and the levels above whose schedules these start from. Where the best schedule has another shape than those of levels beside it,
# short runs do not come by it.
_STEEP, _OVER, _RISE, _LONG, _FROM_ABOVE = 8, 3, 0.01, 36, (1, 4)
# Limits between two: so many for each level, but none where so small a share of a level is between, or the time rises by so little of the
# least; the share of a round for local moves from one schedule, and the levels above whose schedules these go on from. First few limits and
# many moves at each. Then many limits and few moves, which in the first round would be too few.
_BETWEEN = ((0.25, 16, 0.0, 150, (0, 1, 2, 4)), (0.6, 32, 0.005, 480, (0, 2, 8)))


@dataclass(frozen=True)
class Refinement:
    """What a round has found, and what is made of it.

    archive: added to. before: what rounds before have found, empty in the first. states, runs: the effort of the round, of which moves have
    shares. is_halted: whether to stop.
    """

    archive: Archive
    before: Archive
    problems: Sequence[RematProblem]
    states: int
    runs: int
    random: np.random.Generator
    is_halted: Callable[[], bool]

    def refine(self, levels: Sequence[int]) -> None:
        """All of it, at limits from the highest down."""
        self._go_lower(levels)
        reached = [limit for limit in levels if self.archive.within(limit) is not None]
        for limit in reached:
            self._move(limit, limit, _POLISHED * len(reached))
        if self.before.points:
            self._smooth(reached)
        self._go_between(reached)

    def _go_lower(self, levels: Sequence[int]) -> None:
        """From the leanest schedule to the levels below, until one is not come by."""
        for point in self.before.points:
            self.archive.add(point)
        for limit in levels:
            point = self.archive.points[0]
            if limit < point.peak_bytes and not self._moved(point, limit, _REACH):
                return

    def _smooth(self, reached: Sequence[int]) -> None:
        """Long runs where the time rises most over some levels, from levels above."""
        times_us = [point.time_us for limit in reached if (point := self.archive.within(limit)) is not None]
        rises_us = [late - early for early, late in zip([*times_us[:1] * _OVER, *times_us], times_us, strict=False)]
        for at in sorted(range(len(times_us)), key=lambda at: -rises_us[at])[:_STEEP]:
            for levels in _FROM_ABOVE:
                if levels <= at and rises_us[at] > _RISE * times_us[0]:
                    self._move(reached[at - levels], reached[at], _LONG)

    def _go_between(self, reached: Sequence[int]) -> None:
        """At limits halfway between two, where the time rises most from one to the other.

        Near the leanest schedule it rises by tenths from level to level, and so would an answer by where a level happens to lie, or by how
        times were measured that day. Moves go on from schedules of levels above, too: these are not stuck where those of the limit are.
        """
        limits = sorted({*reached, self.archive.points[0].peak_bytes})
        step = max((above - below for above, below in pairwise(reached)), default=0)  # the last levels lie closer
        for for_each, narrow, flat, tried, levels_above in _BETWEEN if self.before.points else _BETWEEN[:1]:
            for _ in range(int(len(reached) * for_each)):
                times_us = [point.time_us for limit in limits if (point := self.archive.within(limit)) is not None]
                wide = [at for at in range(1, len(limits)) if limits[at] - limits[at - 1] > step // narrow]
                at = max(wide, key=lambda at: times_us[at - 1] - times_us[at], default=0)
                if not wide or times_us[at - 1] - times_us[at] < flat * times_us[-1]:
                    break
                limit = (limits[at - 1] + limits[at]) // 2
                above = [self.archive.within(higher) for higher in (limits[at], *(limit + levels * step for levels in levels_above))]
                for point in dict.fromkeys(above):
                    if point is not None:
                        self._moved(point, limit, tried)
                limits.insert(at, limit)

    def _move(self, higher: int, limit: int, share: int) -> None:
        """Local moves from the best schedule within a limit to another."""
        if (point := self.archive.within(higher)) is not None:
            self._moved(point, limit, share)

    def _moved(self, point: Point, limit: int, share: int) -> bool:
        """Local moves from a point, as many as take about one in so many parts of the round; whether they kept the limit."""
        if self.is_halted():
            return False
        states = min(self.states, self.runs // len(point.sequence))
        moves = LocalMoves(states * MOVES_A_STATE // share)
        known = moves.improved(self.problems[point.problem], point.sequence, limit, self.random)
        if known is not None:
            self.archive.add(Point.of(self.problems[point.problem], point.problem, known))
        return known is not None
