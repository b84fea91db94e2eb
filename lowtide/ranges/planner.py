"""From candidates over dimensions to families: what is searched at few points, and judged at many.

The search for what is computed again and what is swapped runs at the largest point, and once more half the way to it; all that it finds is
right at every point, and serves every limit. The programs of one step are searched together, as `planning.planner` does at one point: the
last is what most steps run, the others get what was found for it. Under a limit of memory all keep to the same bytes.

Orders are solved at points, and each is judged over all of the range: as few are kept as stay near the least peak everywhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from lowtide.cost.memory import simulate
from lowtide.errors import BudgetError, CheckError
from lowtide.planning.archive import CandidateArchive
from lowtide.planning.candidate import order_together
from lowtide.planning.carrier import Problems, carried_points
from lowtide.planning.planner import Planner
from lowtide.planning.refusal import refuse_impossible
from lowtide.planning.request import Budget, Request
from lowtide.problems.order import Bytes, Ints, OrderProblem
from lowtide.ranges.candidate import Ranged, ShapePoint, judged_at, largest, on_the_way, sample_points, smallest
from lowtide.ranges.family import JudgedSequences, Member, PlanFamily, in_order, in_sequence
from lowtide.remat.archive import Point
from lowtide.schedule import Schedule, schedule_all
from lowtide.schedule.cuts import cut_bound_bytes

Pool = list[tuple[int, Ints]]  # which candidate, and a sequence of its
_Pair = tuple[tuple[Ranged, ...], tuple[Member, ...]]  # a program's candidates, and their orders of least peak
_ON_THE_WAY = 0.5  # from the smallest to the largest point: it is searched there, too


class RangePlanner:
    """Plans the programs of one step for all shapes of a range, and keeps what was searched: it serves every limit.

    Each program is the candidates that compute it, the captured graph first; all are over the same dimensions, and measured at the same
    points. Raises CheckError where they are not.
    """

    def __init__(self, programs: Sequence[Sequence[Ranged]]) -> None:
        self.programs = [tuple(program) for program in programs]
        grids = {each.measures.grid for program in programs for each in program}
        if len(grids) != 1:
            raise CheckError(f"expected programs over the same dimensions, measured at the same points; got {len(grids)} different grids")
        self.dimensions = self.programs[-1][0].dimensions
        self._planners: dict[tuple[tuple[Ranged, ...], tuple[int, ...]], Planner] = {}  # by candidates and point
        self._orders: list[tuple[Request, list[tuple[Member, ...]]]] = []  # by request without budget and effort, by program
        self._members: list[tuple[Request, list[tuple[Member, ...]]]] = []  # by request without budget, by program
        self._given: Budget | None = None  # for which all was found earlier

    def know(self, request: Request, orders: list[tuple[Member, ...]], members: list[tuple[Member, ...]] | None) -> None:
        """Take what was found earlier for a request, by program, in place of finding it again; no members where it had no limit."""
        self._orders.append((_without_search(request), orders))
        if members is not None:
            self._members.append((replace(request, budget=Budget()), members))
        self._given = request.budget

    def eager_peak_bytes(self, granule_bytes: int) -> int:
        """The peak at the largest point of the program that most steps run, as it stands: what a share is of."""
        return self.programs[-1][0].at(largest(self.dimensions)).eager(granule_bytes).peak_bytes

    def families(self, request: Request) -> list[PlanFamily]:
        """A family for each program.

        Raises BudgetError where nothing fits at the smallest point; where several programs do not, that of the one that needs the most.
        """
        programs = self._programs(request)
        if request.budget.is_limit:
            refuse_impossible([[each.at(smallest(self.dimensions)) for each in program] for program in programs], request)
        orders = self._ordered(programs, request)
        pairs = list(zip(programs, orders, strict=True))
        if not request.budget.is_limit:
            return [PlanFamily(_free(program), members, members, request) for program, members in pairs]
        members = self._limited(pairs, request)
        families = [PlanFamily(program, few, order, request) for (program, order), few in zip(pairs, members, strict=True)]
        for which, family in enumerate(families[:-1]):
            more = [point for point in judged_at(self.dimensions) if families[-1].fits(point) and not family.fits(point)]
            if more and request.budget != self._given:
                members[which] = self._searched_alone(pairs[which], request)
                families[which] = replace(family, members=members[which], _chosen={})
        refused = [error for family in families if (error := _refusal(family, smallest(self.dimensions))) is not None]
        if refused:
            raise max(refused, key=lambda error: error.smallest_peak_bytes)
        return families

    def _limited(self, pairs: list[_Pair], request: Request) -> list[tuple[Member, ...]]:
        """By program, with its candidates and the orders of least peak, the members that serve it under every limit."""
        unlimited = replace(request, budget=Budget())
        for other, known in self._members:
            if other == unlimited:
                return known
        main, pool = pairs[-1][0], _orders(*pairs[-1], request)
        pool += self._searched(main, request)
        members = self._few(main, pool, request)
        carried = [
            self._few(program, _orders(program, orders, request) + self._carried(program, members, request), request)
            for program, orders in pairs[:-1]
        ]
        self._members.append((unlimited, [*carried, members]))
        return self._members[-1][1]

    def _searched_alone(self, pair: _Pair, request: Request) -> tuple[Member, ...]:
        """The members of a program that with what was found for the last one does not fit everywhere where that does."""
        pool = _orders(*pair, request)
        pool += self._searched(pair[0], request)
        return self._few(pair[0], pool, request)

    def _searched(self, program: tuple[Ranged, ...], request: Request) -> Pool:
        """What is found for a program at the largest point, and on the way there, where one level of effort less finds as much."""
        less = replace(request, sweeps=request.sweeps[:-1] or request.sweeps)
        at_largest = self._planner(program, 1.0, request).searched(request)
        return _pool(at_largest) + _pool(self._planner(program, _ON_THE_WAY, less).searched(less))

    def _few(self, program: tuple[Ranged, ...], pool: Pool, request: Request) -> tuple[Member, ...]:
        judged = JudgedSequences.of(pool, program, judged_at(self.dimensions), request)
        return tuple(in_sequence(program, judged.which[each], judged.sequences[each], request) for each in judged.few())

    def _carried(self, program: tuple[Ranged, ...], members: Sequence[Member], request: Request) -> Pool:
        """The members of the last program for another one; what stands higher there at the largest point is repaired."""
        point = largest(self.dimensions)

        def problems(candidates: Sequence[Ranged]) -> Problems:
            candidates_there = [each.at(point) for each in candidates]
            return [(each.graph, each.remat_problem(request.granule_bytes, request.links, request.swap_state)) for each in candidates_there]

        given = ((each, each.sequence) for each in members if each.sequence is not None)
        points = [Point(each.peak_bytes(point), each.time_us(point), each.candidate, sequence) for each, sequence in given]
        sequences = carried_points(problems(self._programs(request)[-1]), points, problems(program))
        return [(each.problem, each.sequence) for each in sequences]

    def _planner(self, program: tuple[Ranged, ...], share: float, request: Request) -> Planner:
        """What searches a program at one point, so far on the way to the largest."""
        point = on_the_way(self.dimensions, share)
        key = program, tuple(point.values())
        if key not in self._planners:
            self._planners[key] = Planner([[each.at(point) for each in program]])
        return self._planners[key]

    def _ordered(self, programs: Sequence[tuple[Ranged, ...]], request: Request) -> list[tuple[Member, ...]]:
        unsearched = _without_search(request)
        for other, known in self._orders:
            if other == unsearched:
                return known
        self._orders.append((unsearched, [order_members(_free(program), request) for program in programs]))
        return self._orders[-1][1]

    def _programs(self, request: Request) -> list[tuple[Ranged, ...]]:
        """By program its candidates, those that take longer than the captured one last: without a limit they are none."""
        permitted = [[each for each in program if each.exact or not request.exact] for program in self.programs]
        return [tuple(sorted(program, key=lambda each: each.costs_time)) for program in permitted]


def _without_search(request: Request) -> Request:
    return replace(request, budget=Budget(), sweeps=(), links=None)


def _free(program: tuple[Ranged, ...]) -> tuple[Ranged, ...]:
    return tuple(each for each in program if not each.costs_time)


def _orders(candidates: Sequence[Ranged], orders: Sequence[Member], request: Request) -> Pool:
    problems = [each.remat_problem(request).structure for each in candidates]
    return [(member.candidate, problems[member.candidate].sequence_of(member.own_order)) for member in orders]


def _pool(searched: CandidateArchive) -> Pool:
    sequences = [(each.problem, each.sequence) for each in searched.archive.points]
    return sequences + [(which, each) for which, some in enumerate(searched.orders) for each in some]


def _refusal(family: PlanFamily, point: ShapePoint) -> BudgetError | None:
    try:
        family.choose(point)
    except BudgetError as error:
        return error
    return None


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
