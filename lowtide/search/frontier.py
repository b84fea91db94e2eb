"""Everything that was seen of memory against time: the archive from which any budget is answered.

Each point is a whole schedule with recomputation. The sweep does not know the budget that will be asked for, so that two budgets
are answered from the same points: less memory never gives a higher peak, more memory never a slower program.

The sweep goes down from the peak of the best order without recomputation, in even steps, until eviction finds nothing any more, and up
again. At each level it evicts under several weights, from every order given and from the best schedules seen so far; then it lets go of
some of what the best one recomputes and has eviction repair what that breaks (large neighbourhood search). Effort is counted in states:
schedules built and costed.
"""

from __future__ import annotations

import time
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from lowtide.ir.problem import Ints
from lowtide.search.evict import Weights, evict
from lowtide.search.runs import RunProblem, cost_of

_WEIGHTS = tuple(Weights(a, b, c) for a in (0.5, 1.0, 1.6) for b in (0.5, 1.0, 1.4) for c in (0.0, 0.4, 1.0))


@dataclass(frozen=True, eq=False)
class Point:
    """A schedule with recomputation, and what it costs."""

    peak_bytes: int
    time_us: float
    problem: int  # which of the problems it is a schedule of
    runs: Ints


@dataclass
class Archive:
    """The points that no other beats in both, by ascending peak and descending time."""

    points: list[Point] = field(default_factory=list)

    def add(self, point: Point) -> bool:
        """Whether the point belongs here; those that it beats are let go."""
        peaks = [each.peak_bytes for each in self.points]
        place = bisect_right(peaks, point.peak_bytes)
        if place and self.points[place - 1].time_us <= point.time_us:
            return False
        start = bisect_left(peaks, point.peak_bytes)
        end = start
        while end < len(self.points) and self.points[end].time_us >= point.time_us:
            end += 1
        self.points[start:end] = [point]
        return True

    def within(self, memory_bytes: int) -> Point | None:
        """The fastest point within so many bytes."""
        place = bisect_right([each.peak_bytes for each in self.points], memory_bytes)
        return self.points[place - 1] if place else None

    def under(self, time_us: float) -> Point | None:
        """The point of least peak that takes no longer."""
        return next((each for each in self.points if each.time_us <= time_us), None)


@dataclass(frozen=True)
class Sweep:
    """How far to look.

    levels: steps from the peak without recomputation to what is resident. max_states: schedules built, in all. max_seconds: only a cap.
    """

    levels: int = 48
    max_states: int = 12_000
    max_seconds: float = 60.0

    def explore(self, problems: Sequence[RunProblem], orders: Sequence[Sequence[Ints]]) -> Archive:
        """The archive of these problems, each with some orders of its nodes as sequences; the same input always gives the same one."""
        return _Search(self, problems, orders).done()


class _Search:
    def __init__(self, sweep: Sweep, problems: Sequence[RunProblem], orders: Sequence[Sequence[Ints]]) -> None:
        self.sweep, self.problems, self.orders = sweep, problems, orders
        self.archive, self.states = Archive(), 0
        self.random = np.random.default_rng(0)
        self.deadline = time.monotonic() + sweep.max_seconds
        self.good: list[Weights] = list(_WEIGHTS)

    def done(self) -> Archive:
        for which, orders in enumerate(self.orders):
            for order in orders:
                self.see(which, order)
        levels = self.levels()
        lowest = self.descend(levels)
        share = max(0, self.sweep.max_states - self.states) // max(1, 2 * lowest)
        for limit in [*levels[:lowest], *reversed(levels[:lowest])]:
            self.improve(limit, share)
        return self.archive

    def levels(self) -> list[int]:
        """Limits from just under the least peak seen down to what is resident."""
        top, floor = self.archive.points[0].peak_bytes, min(problem.problem.resident_bytes for problem in self.problems)
        return [top - (top - floor) * step // self.sweep.levels for step in range(1, self.sweep.levels)]

    def descend(self, levels: Sequence[int]) -> int:
        """Evict at each level until nothing is found; how many levels have an answer. The smallest limit is then found by halving."""
        for place, limit in enumerate(levels):
            if not self.seed(limit):
                self.halve(limit, levels[place - 1] if place else self.archive.points[0].peak_bytes)
                return place
        return len(levels)

    def halve(self, low: int, high: int) -> None:
        """Between a limit that has no answer and one that has."""
        while high - low > max(1, high // 500) and not self.over():
            middle = (low + high) // 2
            if self.seed(middle):
                high = min(middle, self.archive.points[0].peak_bytes)
            else:
                low = middle

    def seed(self, limit: int) -> bool:
        """Evict from every order, and from the leanest schedule seen, under all weights."""
        found = False
        for which, orders in enumerate(self.orders):
            for order in orders:
                for weights in self.good:
                    found |= self.try_one(which, order, limit, weights)
        near = self.archive.points[0]
        for weights in self.good:
            found |= self.try_one(near.problem, near.runs, limit, weights)
        return found

    def improve(self, limit: int, states: int) -> None:
        """Let go of some recomputation and repair, again and again; what is no slower goes on."""
        point = self.archive.within(limit)
        if point is None:
            return
        which, runs, problem = point.problem, point.runs, self.problems[point.problem]
        best = point.time_us
        for _ in range(states):
            again = _repeats(runs, problem.problem.node_count)
            if len(again) == 0 or self.over():
                return
            weights = self.good[self.random.integers(len(self.good))]
            found = evict(problem, np.delete(runs, self.chosen(again)), limit, weights)
            self.states += 1
            if found is None:
                continue
            time_us = float(problem.cost_us[found].sum())
            if time_us <= best:
                if time_us < best:
                    self.see(which, found)
                best, runs = time_us, found

    def chosen(self, again: NDArray[np.intp]) -> NDArray[np.intp]:
        """Some of the repeated runs: scattered, or a stretch of them."""
        count = int(self.random.integers(1, 9))
        if self.random.integers(2):
            return self.random.choice(again, min(count, len(again)), replace=False)
        start = int(self.random.integers(len(again)))
        return again[start : start + 2 * count]

    def try_one(self, which: int, runs: Ints, limit: int, weights: Weights) -> bool:
        if self.over():
            return False
        found = evict(self.problems[which], runs, limit, weights)
        self.states += 1
        if found is None:
            return False
        self.see(which, found)
        return True

    def see(self, which: int, runs: Ints) -> None:
        cost = cost_of(self.problems[which], runs)
        self.archive.add(Point(cost.peak_bytes, cost.time_us, which, runs))

    def over(self) -> bool:
        return self.states >= self.sweep.max_states or time.monotonic() > self.deadline


def _repeats(runs: Ints, node_count: int) -> NDArray[np.intp]:
    """The places of runs that are not their node's first."""
    first = np.full(node_count, len(runs), np.int64)
    np.minimum.at(first, runs, np.arange(len(runs)))
    return np.flatnonzero(first[runs] < np.arange(len(runs)))
