"""Candidates searched for sequences under any limit: the archive, and plans from its points."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.cost.memory import order_problem, simulate
from lowtide.cost.peak import profile_of
from lowtide.plan.plan import Plan, Trade
from lowtide.planning.candidate import Candidate
from lowtide.planning.carried import carried
from lowtide.planning.request import Budget, Request
from lowtide.problems.order import Ints
from lowtide.remat.cost import cost_of
from lowtide.remat.explain import deals_of
from lowtide.remat.problem import RematProblem
from lowtide.remat.sweep.archive import Archive, Point
from lowtide.remat.write_out import rematerialise
from lowtide.schedule.bound import lower_bound_bytes


@dataclass(frozen=True, eq=False)
class Searched:
    """The candidates as problems of sequences, and the archive of what was found. It depends on no limit, and so serves each."""

    candidates: tuple[Candidate, ...]
    problems: tuple[RematProblem, ...]
    archive: Archive
    granule_bytes: int
    is_own: bool = True  # searched for this program, not only for its sibling

    @classmethod
    def of(cls, candidates: Sequence[Candidate], request: Request) -> Searched:
        """What the request's search finds."""
        problems = _problems(candidates, request)
        return cls(
            tuple(candidates), problems, request.sweep.explore(problems, _orders(candidates, problems, request)), request.granule_bytes
        )

    def for_sibling(self, candidates: Sequence[Candidate], request: Request) -> Searched:
        """What this search found for a program of the same forward and backward pass, and its own orders; nothing is searched."""
        problems = _problems(candidates, request)
        pairs = [
            list(zip((each.graph for each in of), these, strict=True))
            for of, these in ((self.candidates, self.problems), (candidates, problems))
        ]
        archive = carried(pairs[0], self.archive, pairs[1])
        for which, orders in enumerate(_orders(candidates, problems, request)):
            for runs in orders:
                cost = cost_of(problems[which], runs)
                archive.add(Point(cost.peak_bytes, cost.time_us, which, runs))
        return Searched(tuple(candidates), problems, archive, request.granule_bytes, is_own=False)

    def and_searched(self, request: Request) -> Searched:
        """All of it, and what the request's search finds."""
        found = Searched.of(self.candidates, request)
        found.archive.merge(self.archive)
        return found

    def within(self, budget: Budget) -> Point | None:
        """The fastest within the memory, or the leanest within the time; None where nothing fits."""
        if budget.memory_bytes is not None:
            return self.archive.within(budget.memory_bytes)
        assert budget.latency is not None, "one of them is the limit"
        return self.archive.under(budget.latency * self.kept_us)

    @property
    def leanest(self) -> Point:
        """The point of least peak."""
        return self.archive.points[0]

    @property
    def kept_us(self) -> float:
        """The time without recomputation, of the fastest graph."""
        return min(point.time_us for point in self.archive.points)

    def plan(self, point: Point, kept: Plan) -> Plan:
        """A point as a plan, not yet checked; `kept` is the one without recomputation."""
        candidate = self.candidates[point.problem]
        done = rematerialise(candidate.graph, point.sequence.tolist())
        sizes = tuple(map(int, done.of_origins(candidate.workspace_bytes, 0)))
        problem = order_problem(done.graph, sizes, round_to=self.granule_bytes)
        order = tuple(range(len(done.graph.nodes)))
        footprint = simulate(problem, order)
        bound_bytes = kept.lower_bound_bytes if not done.recomputed and not done.transfers else lower_bound_bytes(problem)
        return dataclasses.replace(
            kept,
            graph=done.graph,
            order=order,
            takeovers=tuple(int(slot) for slot in footprint.takeovers),
            workspace_bytes=sizes,
            peak_bytes=int(footprint.peak_bytes),
            lower_bound_bytes=min(bound_bytes, int(footprint.peak_bytes)),
            status="optimal" if bound_bytes >= footprint.peak_bytes else "feasible",
            peak=profile_of(done.graph, problem, order, footprint, round_to=self.granule_bytes).moment(done.graph, order),
            trade=Trade(
                runs=tuple(point.sequence.tolist()),
                time_us=point.time_us,
                kept_us=self.kept_us,
                kept_peak_bytes=kept.peak_bytes,
                recomputed=len(done.recomputed),
                frontier=tuple((each.peak_bytes, each.time_us) for each in self.archive.points),
                deals=deals_of(self.problems[point.problem], point.sequence, candidate.graph, done.graph, footprint.takeovers),
            ),
        )


def _problems(candidates: Sequence[Candidate], request: Request) -> tuple[RematProblem, ...]:
    return tuple(each.remat_problem(request.granule_bytes, request.links, request.swap_state) for each in candidates)


def _orders(candidates: Sequence[Candidate], problems: Sequence[RematProblem], request: Request) -> list[list[Ints]]:
    return [each.orders(problem, request.solver, request.granule_bytes) for each, problem in zip(candidates, problems, strict=True)]
