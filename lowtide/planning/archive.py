"""Candidates searched for sequences under any limit: the archive, and plans from its points."""

from __future__ import annotations

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from lowtide.cost.memory import home_bytes, order_problem
from lowtide.ir.graph import Graph
from lowtide.plan.cost_report import FrontierPoint, HostPoint
from lowtide.plan.plan import CostReport, Plan
from lowtide.planning.candidate import Candidate, in_order, order_together
from lowtide.planning.carrier import carried
from lowtide.planning.request import NO_LIMIT, Budget, Request, in_turn
from lowtide.problems.order import Ints
from lowtide.remat.ahead import ahead_of_all
from lowtide.remat.archive import Archive, Point
from lowtide.remat.bound import TimeBound
from lowtide.remat.explain import evictions_of
from lowtide.remat.problem import RematProblem
from lowtide.remat.seeds import Seeds
from lowtide.remat.sweep import Sweep, SweepListener
from lowtide.remat.write_out import rematerialise
from lowtide.rewrite.rewritings import rule_reports
from lowtide.schedule.cuts import lower_bound_bytes

_HIGHER = 3  # known peaks, its own first, up to which a schedule's copies are begun ahead
_SAME = 1 + 1e-9  # times this near differ by the rounding of their sums alone: the same runs in another order


@dataclass(frozen=True, eq=False)
class CandidateArchive:
    """The candidates as problems of sequences, and the archive of what was found. It depends on no limit, and so serves each."""

    candidates: tuple[Candidate, ...]
    problems: tuple[RematProblem, ...]
    orders: tuple[list[Ints], ...]  # by problem: those from which sequences are searched
    archive: Archive
    granule_bytes: int
    done: tuple[Sweep, ...] = ()  # the searches that the archive holds all of

    @classmethod
    def bare(cls, candidates: Sequence[Candidate], request: Request) -> CandidateArchive:
        """With nothing but the candidates' own orders."""
        order_together(candidates, request.solver, request.granule_bytes)
        problems = tuple(each.remat_problem(request.granule_bytes, request.links, request.swap_state) for each in candidates)
        pairs = list(zip(candidates, problems, strict=True))
        orders = tuple(each.orders(problem, request.solver, request.granule_bytes) for each, problem in pairs)
        archive = Archive()
        for which, sequence in ((which, sequence) for which, of in enumerate(orders) for sequence in of):
            archive.add(Point.of(problems[which], which, sequence))
        return cls(tuple(candidates), problems, orders, archive, request.granule_bytes)._with_copies_ahead()

    def by(self, sweeps: Sequence[Sweep], listener: SweepListener | None = None) -> CandidateArchive:
        """With all that these searches find, too; one that was done is not done again, one that is stopped ends them."""
        known, seeds = self, Seeds()
        wanted: list[Sweep] = []
        for sweep in reversed(sweeps):  # what a later one or what was done holds need not be done for itself
            if not any(other.holds(sweep) for other in (*known.done, *wanted)):
                wanted.insert(0, sweep)
        for sweep, listening in zip(wanted, in_turn(listener, wanted), strict=True):
            known = known._and(sweep, sweep.explore(self.problems, self.orders, seeds, listening))
            if known.stopped:
                return known
        # All that was asked for is there; what was stopped was another question's.
        return dataclasses.replace(known, archive=known.archive.copy()) if known.stopped else known

    def _and(self, sweep: Sweep, more: Archive) -> CandidateArchive:
        merged = self.archive.copy()
        merged.merge(more)
        whole = not more.interrupted and not more.out_of_time
        without_cap = dataclasses.replace(sweep, max_seconds=math.inf)  # which has not stopped it
        known = dataclasses.replace(self, archive=merged, done=(*self.done, without_cap) if whole else self.done)
        return known._with_copies_ahead()

    def _with_copies_ahead(self) -> CandidateArchive:
        """With what is copied between steps begun ahead and waited for late, at each peak that is known and the next ones."""
        if all(problem.copies is None for problem in self.problems):
            return self
        merged = self.archive.copy()
        points = list(self.archive.all_points)
        peaks = sorted({point.peak_bytes for point in points})
        for point in points:
            at = bisect_left(peaks, point.peak_bytes)
            for most_bytes in peaks[at : at + _HIGHER]:
                for sequence in ahead_of_all(self.problems[point.problem], point.sequence, most_bytes):
                    merged.add(Point.of(self.problems[point.problem], point.problem, sequence, point.recipe, point.roles))
        return dataclasses.replace(self, archive=merged)

    @cached_property
    def home_bytes(self) -> int:
        """What lies on the host between steps, whatever else is pinned there."""
        return home_bytes(self.candidates[0].graph)

    def and_known(self, other: CandidateArchive) -> CandidateArchive:
        """With all that is known elsewhere of the same program, too."""
        merged = self.archive.copy(max(self.archive.states, other.archive.states))
        for point in other.archive.all_points:
            merged.add(point)
        return dataclasses.replace(self, archive=merged, done=(*self.done, *(sweep for sweep in other.done if sweep not in self.done)))

    def carried_to(self, sibling: CandidateArchive) -> CandidateArchive:
        """What was found for a program, for another of the same forward and backward pass; nothing is searched."""
        archive = carried(self._pairs, self.archive, sibling._pairs)
        archive.merge(sibling.archive)
        return dataclasses.replace(sibling, archive=archive)._with_copies_ahead()

    @property
    def _pairs(self) -> list[tuple[Graph, RematProblem]]:
        return list(zip((each.graph for each in self.candidates), self.problems, strict=True))

    @property
    def stopped(self) -> str:
        """What ended the last search before its effort was spent, "" where nothing did."""
        return "interrupted" if self.archive.interrupted else "max_seconds" if self.archive.out_of_time else ""

    def within(self, budget: Budget) -> Point | None:
        """The fastest within the memory, or the leanest within the time; None where nothing fits. Of equals the one that pins least."""
        frontier, most_bytes = self.frontier_pinning(budget.host_bytes), budget.memory_bytes
        if most_bytes is not None:
            point = next((each for each in reversed(frontier) if each.peak_bytes <= most_bytes), None)
        else:
            assert budget.latency is not None, "one of them is the limit"
            most_us = budget.latency * self.order_us * _SAME
            point = next((each for each in frontier if each.time_us <= most_us), None)
        return point and self._pinning_least(point, point.peak_bytes if most_bytes is None else most_bytes)

    def _pinning_least(self, point: Point, memory_bytes: int) -> Point:
        """What is no slower than a point, within so many bytes, and pins less than all else that is; the point itself if nothing does."""
        as_good = (each for each in self.archive.all_points if each.peak_bytes <= memory_bytes and each.time_us <= point.time_us * _SAME)
        return min(as_good, key=lambda each: (each.pinned_bytes, each is not point), default=point)

    @property
    def frontier(self) -> list[Point]:
        """The points that are faster than all leaner ones, and by more than sums are rounded; the leanest first."""
        return self.frontier_pinning(None)

    def frontier_pinning(self, host_bytes: int | None) -> list[Point]:
        """The same of the points that pin no more than so many bytes on the host, beside what lies there between steps."""
        points: list[Point] = []
        for point in self.archive.points if host_bytes is None else self.archive.pinning(host_bytes - self.home_bytes):
            if not points or point.time_us * _SAME < points[-1].time_us:
                points.append(point)
        return points

    def unlimited_bytes(self, by_order: Plan) -> float:
        """What a plan without a limit takes, and so no plan within one exceeds.

        Nobody knows of several graphs with compiled kernels: the fastest is taken without a limit, whatever it holds.
        """
        return math.inf if any(each.generated for each in self.candidates) else by_order.peak_bytes

    def _asked_for(self, by_order: Plan, budget: Budget) -> list[Point]:
        """The points that limits of memory give."""
        points, most_bytes = self.frontier_pinning(budget.host_bytes), self.unlimited_bytes(by_order)
        return [each for each in points if each.peak_bytes <= most_bytes] or points

    def host_frontier(self, memory_bytes: int) -> tuple[HostPoint, ...]:
        """What the host's memory buys within so many bytes of the device: what is faster than all that pins less, that first.

        Empty where nothing is within them, or nothing is pinned.
        """
        points: list[HostPoint] = []
        fitting = (each for each in self.archive.all_points if each.peak_bytes <= memory_bytes)
        for each in sorted(fitting, key=lambda each: (each.pinned_bytes, each.time_us)):
            if not points or each.time_us * _SAME < points[-1].time_us:
                points.append(HostPoint(self.home_bytes + each.pinned_bytes, each.time_us))
        return tuple(points) if any(each.pinned_bytes for each in points) else ()

    @property
    def leanest(self) -> Point:
        return self.archive.points[0]

    @property
    def order_us(self) -> float:
        """The time without recomputation, of the fastest graph."""
        return self.frontier[-1].time_us

    def _bound_us(self, peak_bytes: int) -> float:
        """What every sequence of any of the graphs takes at least within a peak that one of them keeps."""
        bound_us = min(TimeBound(problem).us(peak_bytes) for problem in self.problems)
        return bound_us if math.isfinite(bound_us) else 0.0

    def plan(self, point: Point, by_order: Plan, budget: Budget = NO_LIMIT) -> Plan:
        """A point as a plan within a budget, not yet checked; `by_order` is the one without recomputation."""
        candidate = self.candidates[point.problem]
        done = rematerialise(candidate.graph, point.sequence.tolist())
        sizes = tuple(map(int, done.of_origins(candidate.workspace_bytes, 0)))
        problem = order_problem(done.graph, sizes, round_to=self.granule_bytes)
        bound_bytes = by_order.lower_bound_bytes if not done.recomputed and not done.transfers else lower_bound_bytes(problem)
        written = dataclasses.replace(
            by_order,
            graph=done.graph,
            workspace_bytes=sizes,
            node_us=done.of_origins(candidate.node_us, 0.0),
            issue_us=done.of_origins(candidate.issue_us, 0.0) if candidate.issue_us else (),
            lower_bound_bytes=bound_bytes,
        )
        plan, own = in_order(written, problem, range(len(done.graph.nodes))), self.problems[point.problem]
        report = CostReport(
            runs=tuple(point.sequence.tolist()),
            time_us=point.time_us,
            order_us=self.order_us,
            order_peak_bytes=by_order.peak_bytes,
            recomputed=len(done.recomputed),
            frontier=tuple(FrontierPoint(each.peak_bytes, each.time_us) for each in self._asked_for(by_order, budget)),
            host_frontier=self.host_frontier(max(point.peak_bytes, budget.memory_bytes or 0)),
            time_bound_us=self._bound_us(point.peak_bytes),
            evictions=evictions_of(own, point.sequence, candidate.graph, done.graph, np.array(plan.reuses, np.int32)),
            stopped=self.stopped,
        )
        plan = dataclasses.replace(plan, lower_bound_bytes=min(bound_bytes, plan.peak_bytes), cost_report=report)
        return dataclasses.replace(plan, algebra=rule_reports(candidate.applied_rules, plan))
