"""Schedules that pin less on the host: the part of the search that looks beneath limits of both memories.

First, at each limit of the device, it goes on from schedules that pin nothing and take more than that: what is left over the limit is
stored, so that less is computed again than where a search begins from orders. Then it goes over pairs of limits, of the device and of the
host, at which the fastest schedule that is known pins more than the host's. At each it evicts as that schedule was made, as its neighbours
were, and from the orders, with no more buffers than the host's limit has room for; then it climbs. The host's limits are steps below the
most that any known schedule pins, whatever anybody asks for: what is found belongs into the one archive that answers every question, so
that more host memory never gives a slower program, nor less a leaner one.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from lowtide.problems.order import Ints
from lowtide.remat.archive import Archive, Point, Recipe, pinned_step
from lowtide.remat.eviction import attempt
from lowtide.remat.neighbours import Neighbours
from lowtide.remat.problem import RematProblem

_STEPS = 24  # below the most that is pinned: six powers of two
_NEAR = 2  # points on either side of a limit whose recipes are tried there
_ABOVE = 8  # schedules above a limit that are tried there
_COARSE = 4  # of so many limits of the device, and of so many steps of the host, one is tried first


@dataclass(eq=False)
class HostLevels:
    """A search over problems and their orders, from what is known of them, as far as some effort goes."""

    problems: Sequence[RematProblem]
    orders: Sequence[Sequence[Ints]]
    known: Archive
    max_states: int
    max_runs: int
    deadline: float
    archive: Archive = field(default_factory=Archive)
    neighbours: Neighbours = field(default_factory=Neighbours)
    tried: set[bytes] = field(default_factory=set)
    runs: int = 0

    def explored(self, limits: Sequence[int]) -> Archive:
        """What is found at these limits of the device, each beneath limits of the host. Interrupted, it holds what was found by then."""
        try:
            for limit in reversed(limits):
                self._from_above(limit)
            self.known = self.known.copy()
            self.known.merge(self.archive)
            pairs = self._pairs(limits)
            for seed in (self._as_known, self._from_orders, self._as_near):
                for limit, pinned_bytes in pairs:
                    seed(limit, pinned_bytes)
            before = -1
            while not self._over() and self.archive.states > before:
                before = self.archive.states
                for limit, pinned_bytes in pairs:
                    self._climb(limit, pinned_bytes)
        except KeyboardInterrupt:
            self.archive.interrupted = True
        return self.archive

    def _pairs(self, limits: Sequence[int]) -> list[tuple[int, int]]:
        """Limits of device and host at which the fastest schedule pins more: first few of them, far apart, then those between."""
        fastest = {limit: point.pinned_bytes for limit in limits if (point := self.known.within(limit)) is not None}
        steps = list(_steps_below(pinned_step(max(fastest.values(), default=0))))
        pairs = [
            ((row % _COARSE > 0) + (column % _COARSE > 0), limit, step)
            for row, step in enumerate(steps)
            for column, limit in enumerate(reversed(fastest))
            if fastest[limit] > step
        ]
        return [(limit, step) for _, limit, step in sorted(pairs, key=lambda pair: pair[0])]

    def _from_above(self, limit: int) -> None:
        """Store what is left over the limit where schedules that pin nothing take more than that: they compute less again."""
        above = [point for point in self.known.pinning(0) if point.peak_bytes > limit]
        for point in above[:: max(1, len(above) // _ABOVE)]:
            if self.archive.states < self.max_states // 2:
                problem = self.problems[point.problem]
                base = problem.codes.runs_in(point.sequence)
                self._attempt(limit, None, point.problem, Recipe(base, self.neighbours.rule(problem)))

    def _as_known(self, limit: int, pinned_bytes: int) -> None:
        """As the fastest schedules within the device's limit were made: the one that pins what it likes, and those within both limits."""
        fastest = self.known.within(limit)
        self._again([*self._within(limit, pinned_bytes), *([] if fastest is None else [fastest])], limit, pinned_bytes)

    def _from_orders(self, limit: int, pinned_bytes: int) -> None:
        """From all orders, and from the leanest schedule that keeps to the host's limit, under some rule."""
        leanest = self.known.pinning(pinned_bytes)[:1]
        runs = [(point.problem, self.problems[point.problem].codes.runs_in(point.sequence)) for point in leanest]
        for which, base in (*runs, *((which, order) for which, orders in enumerate(self.orders) for order in orders)):
            self._attempt(limit, pinned_bytes, which, Recipe(base, self.neighbours.rule(self.problems[which])))

    def _as_near(self, limit: int, pinned_bytes: int) -> None:
        self._again([*self.known.near(limit, _NEAR), *self.archive.near(limit, _NEAR)], limit, pinned_bytes)

    def _again(self, points: Sequence[Point], limit: int, pinned_bytes: int) -> None:
        for point in points:
            recipe = point.padded(self.problems[point.problem].problem.tensor_count).recipe
            if recipe is not None:
                self._attempt(limit, pinned_bytes, point.problem, recipe)

    def _climb(self, limit: int, pinned_bytes: int) -> None:
        point = min(self._within(limit, pinned_bytes), key=lambda each: each.time_us, default=None)
        if point is not None and not self._over():
            problem = self.problems[point.problem]
            recipe = self.neighbours.neighbour(problem, point.padded(problem.problem.tensor_count))
            self._attempt(limit, pinned_bytes, point.problem, recipe)

    def _within(self, limit: int, pinned_bytes: int) -> list[Point]:
        fastest = (archive.within(limit, pinned_bytes) for archive in (self.known, self.archive))
        return [point for point in fastest if point is not None]

    def _attempt(self, limit: int, pinned_bytes: int | None, which: int, recipe: Recipe) -> None:
        """One schedule more, if it was not built before and there is effort for it."""
        digest = recipe.digest(which, limit, pinned_bytes)
        if digest in self.tried or self._over():
            return
        self.tried.add(digest)
        tried = attempt(self.problems[which], recipe.base, limit, recipe.weights, recipe.bias, pinned_bytes=pinned_bytes)
        self.archive.states += 1
        self.runs += tried.runs
        if tried.result is not None:
            self.archive.add(Point.of(self.problems[which], which, tried.result.sequence, recipe, tried.result.roles))

    def _over(self) -> bool:
        self.archive.out_of_time |= time.monotonic() > self.deadline
        return self.archive.out_of_time or self.archive.states >= self.max_states or self.runs >= self.max_runs


def _steps_below(step: int) -> Iterator[int]:
    """The steps of `pinned_step` below one, the largest first."""
    for _ in range(_STEPS):
        step -= 1 << max(0, (step - 1).bit_length() - 3)
        if step <= 0:
            return
        yield step
