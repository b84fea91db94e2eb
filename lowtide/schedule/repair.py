"""Repair of an order around its peak: a window of steps is ordered anew, all others stay, until no window improves.

What a window costs depends only on which nodes run before it, so it is an ordering problem of its own, small enough for an
exact solver where the whole is not. Minimum cuts say when to stop: where one meets the peak, no order is better.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from lowtide.cost.memory import simulate
from lowtide.problems.order import Ints, OrderProblem
from lowtide.problems.status import Status
from lowtide.schedule.base import Schedule, Solver, scheduled
from lowtide.schedule.beam import Beam
from lowtide.schedule.best import Best
from lowtide.schedule.cuts import cut_bound_bytes
from lowtide.schedule.exact.solver import Exact
from lowtide.schedule.interval import OrderLine


@dataclass(frozen=True)
class Repair:
    """Improves the order of `first` by windows of up to `largest` steps around its peak, each ordered by `inner`.

    A window starts at `window` steps and doubles while it does not help. `max_windows`, the moves that `inner` makes in all of them, and
    `max_cuts` cap the effort, each window and each cut being linear in the problem at least.
    """

    inner: Solver = field(default_factory=lambda: Exact(max_states=20_000, first=Beam()))
    first: Solver = field(default_factory=Best)
    window: int = 32
    largest: int = 1024
    max_windows: int = 200
    max_moves: int = 1_000_000_000
    max_cuts: int = 64

    def __post_init__(self) -> None:
        if not 2 <= self.window <= self.largest:
            raise ValueError(f"expected 2 <= window <= largest, got window {self.window} and largest {self.largest}")

    def solve(self, problem: OrderProblem) -> Schedule:
        """The order whose peak no window lowers, and the best bound of cuts."""
        *_, last = self.answers(problem)
        return last

    def answers(self, problem: OrderProblem) -> Iterator[Schedule]:
        """The first solver's order with the bound of cuts, and each lower peak that windows lead to."""
        given = self.first.solve(problem)
        if given.status is Status.INFEASIBLE:
            yield given
            return
        order = np.array(given.order, np.int32)
        bound_bytes = max(given.lower_bound_bytes, self._bound_bytes(problem, order))
        best = scheduled(problem, order, self, bound_bytes=bound_bytes, stats={"windows": 0})
        yield best
        windows, moves, size = 0, 0, self.window
        while windows < self.max_windows and moves < self.max_moves and best.status is Status.FEASIBLE:
            window = _around_peak(problem, order, size)
            found = self.inner.solve(window.problem)
            windows, moves = windows + 1, moves + found.stats.get("moves", 0)
            if size >= problem.node_count:  # the window is the problem
                bound_bytes = max(bound_bytes, found.lower_bound_bytes)
            if found.status is not Status.INFEASIBLE and found.peak_bytes < window.peak_bytes:
                order, size = window.line.replaced(window.first, found.order), self.window
            elif size >= min(self.largest, problem.node_count):
                break
            else:
                size *= 2
            later = scheduled(problem, order, self, bound_bytes=bound_bytes, stats={"windows": windows})
            if later.peak_bytes < best.peak_bytes:
                best = later
                yield best
        if windows and best.status is Status.FEASIBLE:  # a better order has its highest steps elsewhere
            bound_bytes = max(bound_bytes, self._bound_bytes(problem, order))
        if bound_bytes > best.lower_bound_bytes:
            yield scheduled(problem, order, self, bound_bytes=bound_bytes, stats={"windows": windows})

    def _bound_bytes(self, problem: OrderProblem, order: Ints) -> int:
        return cut_bound_bytes(problem, order, max_cuts=self.max_cuts).bound_bytes


class _Window(NamedTuple):
    """Steps from `first` on of an order, as a problem of its own."""

    line: OrderLine
    first: int
    problem: OrderProblem
    peak_bytes: int  # as they are ordered now


def _around_peak(problem: OrderProblem, order: Ints, size: int) -> _Window:
    """The window of `size` steps around the first step at the peak."""
    footprint, line = simulate(problem, order), OrderLine.of(problem, order)
    first = max(0, min(footprint.peak_step - size // 2, len(order) - size))
    return _Window(line, first, line.interval(first, min(first + size, len(order))), footprint.peak_bytes)
