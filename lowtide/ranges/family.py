"""Few programs for a whole range, and for each shape the one to run: fastest within the limit, or of least peak where there is none.

What a member takes at a shape is exact (`cost.symbolic`), so choosing one takes microseconds and no search. A shape for which none fits
is refused before anything runs, with the largest numbers that do fit.

Families of one program differ in their limits alone, not in their members: at no shape is less memory faster.

The members are chosen at sampled points from all that was found for a range. Under a limit of memory the fastest that fits at a point is
best there, under one of time the leanest that keeps to it. Whatever the limit is, the best is on the frontier of that point: what no other
beats in both. A few are kept: one after another that which spares most time under all limits at all sampled points together, long delays
above all, until what is kept is nearly as fast as what was found wherever that only just fits, or `MOST` are. As the limit has no say in
which, a larger one is never slower at any shape.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial

import numpy as np
from numpy.typing import NDArray

from lowtide.cost.measures import Measures
from lowtide.cost.memory import pinned_bytes, simulate
from lowtide.cost.symbolic import Footprints, Several, same_for_all
from lowtide.errors import BudgetError
from lowtide.ir.check.graph_check import check_graph, check_order, check_reuses
from lowtide.ir.graph import Graph
from lowtide.ir.shapes.dimension import Dimensions, checked_point
from lowtide.ir.shapes.points import at
from lowtide.plan.contents import Decision
from lowtide.plan.plan import Plan
from lowtide.planning.archive import CandidateArchive
from lowtide.planning.planner import checked, in_its_order
from lowtide.planning.refusal import refusal
from lowtide.planning.request import Request
from lowtide.problems.order import Bytes, Ints
from lowtide.ranges.candidate import Pace, Ranged, largest, paces_at, sample_points
from lowtide.remat.archive import Archive, Point
from lowtide.remat.write_out import rematerialise
from lowtide.schedule.base import scheduled

MOST = 24  # members of a family
SAME = 1 + 1e-9  # times this near differ by the rounding of their sums alone
_ENOUGH = 0.01  # by so much more time a member may take than what it stands for
_MISSING = 0.5  # what counts for a part that nothing stands for
_TINY_US = 1e-3
_APART = 0.005  # parts of a frontier are so far apart in time


@dataclass(frozen=True, eq=False)
class JudgedSequences:
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


@dataclass(frozen=True, eq=False)
class Member:
    """A candidate in an order, or as a sequence says, and what that takes at every point. It is written as a graph when it is first run."""

    ranged: Ranged  # the candidate
    candidate: int  # which of its program's it is
    own_order: tuple[int, ...]  # of its nodes; empty where there is a sequence
    sequence: Ints | None
    granule_bytes: int
    footprints: Footprints
    pace: Pace | None = None  # where times matter

    @property
    def measures(self) -> Measures:
        return self.ranged.measures

    def peak_bytes(self, point: Mapping[str, int]) -> int:
        """What it takes at a point, with what is resident: the promise of its plan there. Raises ShapeError for a wrong point."""
        return self.footprints.at(point, self.measures.columns_at(point))

    def time_us(self, point: Mapping[str, int]) -> float:
        """What it takes at a point, 0 where times do not matter. Raises ShapeError for a wrong point."""
        return 0.0 if self.pace is None else float(paces_at(self.measures, point, self.pace.runs[None], self.pace.waits_us[None])[0])

    @cached_property
    def decision(self) -> Decision:
        """As `lower` takes it: the same at every point. Raises CheckError where it is wrong."""
        graph, order, there = self.ranged.graph, self.own_order, self.ranged.at_largest
        if self.sequence is not None:
            graph = rematerialise(graph, self.sequence.tolist()).graph
            order, there = tuple(range(len(graph.nodes))), at(graph, largest(graph.dimensions))
        written = Decision(graph, order, tuple(map(int, simulate(same_for_all(there, graph), order).reuses)))
        _check(written, there)
        return written


def in_order(candidates: Sequence[Ranged], which: int, order: Sequence[int], request: Request) -> Member:
    """A candidate's own nodes in an order. Raises CheckError where that is no order of them."""
    ranged = candidates[which]
    footprints = Footprints.of(ranged.order_problem(request.granule_bytes), order, ranged.measures.columns.tolist())
    return Member(ranged, which, tuple(map(int, order)), None, request.granule_bytes, footprints)


def in_sequence(candidates: Sequence[Ranged], which: int, sequence: Ints, request: Request) -> Member:
    """A candidate's nodes as a sequence says, some of them again."""
    ranged = candidates[which]
    problem = ranged.remat_problem(request)
    pace = Pace.of(problem, sequence) if ranged.measures.is_timed else None
    return Member(ranged, which, (), sequence, request.granule_bytes, problem.footprints(sequence), pace)


def _check(written: Decision, there: Graph) -> None:
    """Raises CheckError where at the largest point, at which the graph is `there`, graph, order or reuses break a rule."""
    check_graph(there)
    check_order(there, written.order)
    check_reuses(there, written.order, written.reuses)


_MOST_KNOWN = 4096  # shapes whose members are remembered


@dataclass(frozen=True, eq=False)
class PlanFamily:
    """The members that serve one program over the ranges of its dimensions."""

    candidates: tuple[Ranged, ...]  # the captured graph first
    members: tuple[Member, ...]
    orders: tuple[Member, ...]  # without recomputation, for what plans say of order alone; without a limit these are the members
    request: Request  # with the limit
    _chosen: dict[tuple[int, ...], Member] = field(default_factory=dict, repr=False)

    @property
    def dimensions(self) -> Dimensions:
        return self.candidates[0].dimensions

    def __str__(self) -> str:
        """What it promises at the ends of its range, and how many programs it has."""
        limit = self.request.budget.memory_bytes
        lines = [
            f"{len(self.members)} program{'s' if len(self.members) > 1 else ''} for {', '.join(each.ranged for each in self.dimensions)}"
        ]
        for point in sample_points(self.dimensions, 2 ** len(self.dimensions)):
            where = ", ".join(each.number_text(point[each.name]) for each in self.dimensions)
            if not self.fits(point):
                lines.append(f"  {where}: does not fit in {limit:,} bytes; at least {self.leanest(point).peak_bytes(point):,}")
                continue
            more = f", time {self.time_us(point) / self.order_us(point) - 1:+.1%}" if self.order_us(point) else ""
            lines.append(f"  {where}: peak {self.peak_bytes(point):,} bytes{more}")
        return "\n".join(lines)

    def choose(self, point: Mapping[str, int]) -> Member:
        """The member to run at a point. Raises ShapeError for a wrong point, BudgetError where none keeps to the limit there."""
        at = checked_point(self.dimensions, point)
        known = self._chosen.get(tuple(at.values()))
        if known is not None:
            return known
        member = self._best(at)
        if member is None:
            raise self._refusal(at)
        if len(self._chosen) >= _MOST_KNOWN:
            self._chosen.clear()
        self._chosen[tuple(at.values())] = member
        return member

    def peak_bytes(self, point: Mapping[str, int]) -> int:
        """What the chosen member takes at a point, with what is resident. Raises as `choose` does."""
        return self.choose(point).peak_bytes(point)

    def time_us(self, point: Mapping[str, int]) -> float:
        """What the chosen member takes at a point, 0 where times do not matter. Raises as `choose` does."""
        return self.choose(point).time_us(point)

    def order_us(self, point: Mapping[str, int]) -> float:
        """The time without recomputation at a point, of the fastest graph; 0 where times do not matter. Raises ShapeError."""
        return min(each.order_us(point) for each in self.candidates)

    def plan(self, point: Mapping[str, int]) -> Plan:
        """The chosen member at a point as a checked plan of numbers. Raises as `choose` does."""
        plan = self._plan(self.choose(point), checked_point(self.dimensions, point))
        return checked(replace(plan, pinned_bytes=pinned_bytes(plan.graph, plan.order)))

    def leanest(self, point: Mapping[str, int]) -> Member:
        """The member of least peak at a point. Raises ShapeError for a wrong point."""
        return min(self.members, key=lambda member: member.peak_bytes(point))

    def fits(self, point: Mapping[str, int]) -> bool:
        """Whether some member keeps to the limit at a point. Raises ShapeError for a wrong point."""
        return self._best(point) is not None

    def largest_that_fits(self, point: Mapping[str, int]) -> dict[str, int]:
        """By dimension the largest number that fits beside the others of a point; those of which none does are left out.

        Raises ShapeError for a wrong point.
        """
        at = checked_point(self.dimensions, point)
        largest = {each.name: _last(each.least, each.most, partial(self._fits, at, each.name)) for each in self.dimensions}
        return {each.name: largest[each.name] for each in self.dimensions if largest[each.name] >= each.least}

    def _fits(self, point: Mapping[str, int], name: str, number: int) -> bool:
        return self.fits({**point, name: number})

    def _best(self, point: Mapping[str, int]) -> Member | None:
        """The fastest within the memory, the leanest within the time, the leanest without a limit; None where nothing fits."""
        budget = self.request.budget
        if not budget.is_limit:
            return self._leanest_order(point)
        peaks: list[int] = self._peaks(point).tolist()
        times: list[float] = self._times(point).tolist()
        if budget.memory_bytes is not None:
            fitting = [(us, peak, place) for place, (us, peak) in enumerate(zip(times, peaks, strict=True)) if peak <= budget.memory_bytes]
            unlimited_bytes = self._leanest_order(point).peak_bytes(point)
            no_higher = [each for each in fitting if each[1] <= unlimited_bytes]  # than without a limit
            return self.members[min(no_higher or fitting)[2]] if fitting else None
        most_us = max((budget.latency or 1.0) * self.order_us(point) * SAME, min(times))
        return self.members[min((peak, us, place) for place, (us, peak) in enumerate(zip(times, peaks, strict=True)) if us <= most_us)[2]]

    def _leanest_order(self, point: Mapping[str, int]) -> Member:
        """Of those without recomputation that take no longer than the captured graph."""
        free = [each for each in self.orders if each.ranged.is_free_at(point)]
        return min(free, key=lambda each: each.peak_bytes(point))

    def _peaks(self, point: Mapping[str, int]) -> Bytes:
        """By member; workspaces are looked up once for each candidate."""
        several, which = self._several
        return several.at(point, [self.candidates[each].measures.columns_at(point) for each in which])

    @cached_property
    def _several(self) -> tuple[Several, list[int]]:
        """All members' footprints, and the candidates by whose workspaces they are grouped."""
        which = sorted({member.candidate for member in self.members})
        groups = [which.index(member.candidate) for member in self.members]
        return Several([member.footprints for member in self.members], groups), which

    def _times(self, point: Mapping[str, int]) -> NDArray[np.float64]:
        times = np.zeros(len(self.members))
        for which, (places, runs, waits_us) in self._paces.items():
            times[places] = paces_at(self.candidates[which].measures, point, runs, waits_us)
        return times

    @cached_property
    def _paces(self) -> dict[int, tuple[list[int], NDArray[np.float64], NDArray[np.float64]]]:
        """By candidate the places of its members, and how these run."""
        by_member = {}
        for which in sorted({member.candidate for member in self.members}):
            paces = {place: each.pace for place, each in enumerate(self.members) if each.candidate == which and each.pace is not None}
            if paces:
                runs, waits_us = (np.stack(each) for each in zip(*((pace.runs, pace.waits_us) for pace in paces.values()), strict=True))
                by_member[which] = list(paces), runs, waits_us
        return by_member

    def _plan(self, member: Member, point: Mapping[str, int]) -> Plan:
        if member.sequence is None:
            return self._in_order(member, point)
        by_order = self._in_order(self._leanest_order(point), point)
        candidate = self.candidates[member.candidate].at(point)
        problem = candidate.remat_problem(self.request.granule_bytes, self.request.links, self.request.swap_state)
        archive = Archive()
        for peak_bytes, time_us in zip(self._peaks(point).tolist(), self._times(point).tolist(), strict=True):
            archive.add(Point(peak_bytes, time_us, 0, member.sequence))  # of the others only these are asked
        own = Point(member.peak_bytes(point), member.time_us(point), 0, member.sequence)
        plan = CandidateArchive((candidate,), (problem,), ([],), archive, self.request.granule_bytes).plan(own, by_order)
        assert plan.cost_report is not None, "a sequence has a report"
        return replace(plan, cost_report=replace(plan.cost_report, order_us=self.order_us(point)))

    def _in_order(self, member: Member, point: Mapping[str, int]) -> Plan:
        """A member without recomputation at a point, not yet checked."""
        best, solver, granule_bytes = self.candidates[member.candidate].uncached_at(point), self.request.solver, self.request.granule_bytes
        best.know_order(solver, granule_bytes, scheduled(best.order_problem(granule_bytes), member.own_order, solver))
        return in_its_order(self.candidates[0].at(point), best, self.request)

    def _refusal(self, point: Mapping[str, int]) -> BudgetError:
        """What is said where nothing fits, and how much would."""
        assert self.request.budget.memory_bytes is not None, "the fastest member is within any limit of time"
        error = refusal(self._plan(self.leanest(point), point), self.request.budget.memory_bytes)
        largest = self.largest_that_fits(point)
        where = ", ".join(each.number_text(point[each.name]) for each in self.dimensions)
        numbers = [each.number_text(largest[each.name]) for each in self.dimensions if each.name in largest]
        fits = f"the largest that fits: {' or '.join(numbers)}" if numbers else "no number of one dimension alone would fit"
        return BudgetError(f"{error}\nfor {where}; {fits}", error.smallest_peak_bytes)


def _last(least: int, most: int, fits: Callable[[int], bool]) -> int:
    """The last number from `least` to `most` up to which all fit, as far as halving tells; one less than the least where that does not."""
    if not fits(least):
        return least - 1
    if fits(most):
        return most
    low, high = least, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low
