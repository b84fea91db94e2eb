"""Orders for a range: solved at points, each judged over all of it, and as few kept as stay near the least peak everywhere.

Few orders for a whole range: of those found at points, as few are kept as stay near the least peak at each of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from lowtide.cost.memory import simulate
from lowtide.planning.candidate import order_together
from lowtide.planning.request import Request
from lowtide.problems.order import Bytes, OrderProblem
from lowtide.ranges.candidate import Ranged
from lowtide.ranges.family import Member, in_order
from lowtide.ranges.points import ShapePoint, largest, sample_points
from lowtide.schedule import Schedule, schedule_all
from lowtide.schedule.cuts import cut_bound_bytes

_MOST_TRIED = 20_000  # sets of orders, before the choice is made one order at a time


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


_TOLERANCE, _NEAR = 0.01, 0.005  # of the least peak: of what is kept, and of what is not searched
_SOLVED, _JUDGED = 9, 64  # points
_NEVER = 2**62  # bytes: what a member counts where it takes longer than the captured graph


def order_members(candidates: Sequence[Ranged], request: Request) -> tuple[Member, ...]:
    """Candidates in orders of which at each sampled point one has at most 1 % more than the least peak that was found there.

    A point at which what was found before comes near the bound of its cuts is not solved. Where a candidate takes longer than the captured
    graph it is none.
    """
    dimensions = candidates[0].dimensions
    by_order: dict[tuple[int, tuple[int, ...]], Member] = {}
    for point in _points(candidates):
        problems = {
            which: each.order_problem_at(point, request.granule_bytes) for which, each in enumerate(candidates) if each.is_free_at(point)
        }
        there = [member for member in by_order.values() if member.candidate in problems]
        least = min((member.peak_bytes(point) for member in there), default=None)
        if least is None or least > _bound_bytes(problems, there) * (1 + _NEAR):
            which, order = _solved(problems, request) if by_order else _largest_solved(candidates, point, request)
            if (which, order) not in by_order:
                by_order[which, order] = in_order(candidates, which, order, request)
    members = list(by_order.values())
    samples = (largest(dimensions), *sample_points(dimensions, _JUDGED))
    peaks = np.array([_peaks(member, samples) for member in members])
    kept = fewest(peaks <= peaks.min(axis=0) * (1 + _TOLERANCE), peaks)
    return (*_as_written(candidates, [members[place] for place in kept], samples, request), *(members[place] for place in kept))


def _as_written(candidates: Sequence[Ranged], kept: Sequence[Member], samples: Sequence[ShapePoint], request: Request) -> list[Member]:
    """The same candidates in the order in which they are written, as far as that is as lean at some point.

    There it is run: a plan for one shape alone keeps that order, too, and it holds what it needs in a processor's caches best.
    """
    least = np.array([_peaks(member, samples) for member in kept]).min(axis=0)
    known = {(member.candidate, member.own_order) for member in kept}
    which = sorted({member.candidate for member in kept})
    written = [in_order(candidates, each, range(len(candidates[each].graph.nodes)), request) for each in which]
    return [each for each in written if (each.candidate, each.own_order) not in known and (_peaks(each, samples) <= least).any()]


def _peaks(member: Member, samples: Sequence[ShapePoint]) -> Bytes:
    """[points] bytes; `_NEVER` where its candidate takes longer than the captured graph."""
    return np.array([member.peak_bytes(point) if member.ranged.is_free_at(point) else _NEVER for point in samples], np.int64)


def _points(candidates: Sequence[Ranged]) -> list[ShapePoint]:
    """The largest first."""
    dimensions = candidates[0].dimensions
    points = [largest(dimensions), *sample_points(dimensions, _SOLVED)]
    return list({tuple(point.values()): point for point in points}.values())


def _largest_solved(candidates: Sequence[Ranged], point: ShapePoint, request: Request) -> tuple[int, tuple[int, ...]]:
    """The same at the first point, where the search under a limit begins with these orders."""
    numeric = [each.at(point) for each in candidates]
    order_together(numeric, request.solver, request.granule_bytes)
    return _least({which: each.ordered(request.solver, request.granule_bytes) for which, each in enumerate(numeric)})


def _solved(problems: Mapping[int, OrderProblem], request: Request) -> tuple[int, tuple[int, ...]]:
    """The candidate and order of least peak; of equal ones the first."""
    return _least(dict(zip(problems, schedule_all(list(problems.values()), request.solver), strict=True)))


def _least(orders: Mapping[int, Schedule]) -> tuple[int, tuple[int, ...]]:
    which = min(orders, key=lambda each: orders[each].peak_bytes)
    return which, tuple(map(int, orders[which].order))


def _bound_bytes(problems: Mapping[int, OrderProblem], members: Sequence[Member]) -> int:
    """What no order of any candidate is below at a point. One whose orders were never the best is bound by how its nodes are written."""
    bounds = []
    for which, problem in problems.items():
        orders = [member.own_order for member in members if member.candidate == which] or [tuple(range(problem.node_count))]
        best = min(orders, key=lambda order: simulate(problem, order).peak_bytes)
        bounds.append(cut_bound_bytes(problem, best).bound_bytes)
    return min(bounds)
