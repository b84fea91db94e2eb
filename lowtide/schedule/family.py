"""Few orders for a whole range: solved at points, each judged at all of them, and as few kept as stay near the least peak everywhere.

    takes   an ordering problem over dimensions, and points of its range
    leaves  orders, and for each point the one to take there, its peak at most (1 + tolerance) times the least that any solver found there

Nothing is said here of points in between.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from lowtide.cost.memory import simulate
from lowtide.cost.symbolic import SymbolicProblem
from lowtide.problems.order import OrderProblem
from lowtide.schedule.auto import AUTO
from lowtide.schedule.base import Solver
from lowtide.schedule.cuts import cut_bound_bytes
from lowtide.schedule.points import Point, sample_points

_MOST_TRIED = 20_000  # sets of orders, before the choice is made one order at a time


@dataclass(frozen=True, eq=False)
class OrderFamily:
    """Orders that serve a range together."""

    points: tuple[Point, ...]
    orders: tuple[tuple[int, ...], ...]  # as few as suffice
    peak_bytes: NDArray[np.int64]  # [orders, points]
    least_bytes: NDArray[np.int64]  # [points] the least peak that was found of any order
    bound_bytes: NDArray[np.int64]  # [points] no order has a lower peak there: proven

    @property
    def chosen(self) -> tuple[int, ...]:
        """[points] the order of least peak at each."""
        return tuple(int(each) for each in self.peak_bytes.argmin(axis=0))

    @property
    def worst_ratio(self) -> float:
        """The largest ratio, over all points, of the chosen order's peak to the least that was found."""
        ratios = self.peak_bytes.min(axis=0) / np.maximum(self.least_bytes, 1)
        return float(ratios.max())

    @property
    def is_proven(self) -> bool:
        """Whether the least peaks are proven to be the least, at each of the points."""
        return bool((self.least_bytes == self.bound_bytes).all())


def order_family(
    problem: SymbolicProblem, points: Sequence[Mapping[str, int]] = (), *, solver: Solver = AUTO, tolerance: float = 0.01
) -> OrderFamily:
    """As few orders as stay within `tolerance` of the least peak at each of `points`; at sampled ones where none are given.

    A point at which an order found before meets the bound of its cuts is not searched. Raises ShapeError for a wrong point.
    """
    at = tuple({name: int(number) for name, number in point.items()} for point in points or sample_points(problem.dimensions))
    problems = [problem.at(point) for point in at]
    orders, bounds = _solved(problems, solver)
    peaks = np.array([[simulate(each, order).peak_bytes for each in problems] for order in orders], np.int64)
    least = peaks.min(axis=0)
    kept = fewest(peaks <= np.floor(least * (1 + tolerance)), peaks)
    return OrderFamily(at, tuple(orders[position] for position in kept), peaks[kept], least, np.minimum(np.array(bounds, np.int64), least))


def _solved(problems: Sequence[OrderProblem], solver: Solver) -> tuple[list[tuple[int, ...]], list[int]]:
    """Orders, each the best that is known at some point, and the proven bound at each point."""
    orders: dict[tuple[int, ...], None] = {}
    bounds = []
    for each in problems:
        best = min(orders, key=lambda order: simulate(each, order).peak_bytes, default=None)
        bound = 0 if best is None else cut_bound_bytes(each, best).bound_bytes
        if best is None or simulate(each, best).peak_bytes > bound:
            found = solver.solve(each)
            orders[found.order] = None
            bound = max(bound, found.lower_bound_bytes)
        bounds.append(bound)
    return list(orders), bounds


def fewest(near: NDArray[np.bool_], peaks: NDArray[np.int64]) -> list[int]:
    """The orders to keep [orders, points]: as few as are near the least at every point, of as few those of least peaks in all.

    Some order must be near at each point.
    """
    rows, tried = range(len(near)), 0
    for size in range(1, len(near) + 1):
        sets = list(combinations(rows, size)) if _count(len(near), size) + tried <= _MOST_TRIED else []
        if not sets:
            return one_by_one(near)
        tried += len(sets)
        enough = [chosen for chosen in sets if near[list(chosen)].any(axis=0).all()]
        if enough:
            return list(min(enough, key=lambda chosen: (int(peaks[list(chosen)].min(axis=0).sum()), chosen)))
    raise AssertionError("each point's own order is near its least")


def _count(rows: int, size: int) -> int:
    result = 1
    for position in range(size):
        result = result * (rows - position) // (position + 1)
    return result


def one_by_one(near: NDArray[np.bool_]) -> list[int]:
    """The rows to keep of [rows, columns], so that each column has one: each time that which serves most of those not served yet."""
    kept: list[int] = []
    left = np.ones(near.shape[1], np.bool_)
    while left.any():
        kept.append(int((near & left).sum(axis=1).argmax()))
        left &= ~near[kept[-1]]
    return sorted(kept)
