"""From candidates to checked plans: choose graph and order, and under a limit what is computed again and what is swapped."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import replace

from lowtide.base.messages import warn
from lowtide.cost.memory import pinned_bytes, profile_of, simulate, storage_bytes
from lowtide.errors import BudgetError, CheckError
from lowtide.ir.check.graph_check import check_graph, check_order, check_reuses
from lowtide.ir.operators.nodes import offloaded_storages
from lowtide.plan.plan import Plan
from lowtide.plan.promises import untrue_promise
from lowtide.planning.archive import CandidateArchive
from lowtide.planning.candidate import Candidate, order_together
from lowtide.planning.exchange import overlapped
from lowtide.planning.refusal import host_refusal, refusal, refuse_impossible, split_loss_text
from lowtide.planning.request import Budget, ProgressWatch, Request
from lowtide.planning.search_cache import SearchCache
from lowtide.remat.sweep import SweepListener
from lowtide.rewrite.rewritings import rule_reports

_HARDLY_MORE = 1.05  # times the least peak


def checked(plan: Plan) -> Plan:
    """The plan, if its graph, order and reuses keep every rule and its promises follow from them. Raises CheckError."""
    check_graph(plan.graph)
    check_order(plan.graph, plan.order)
    check_reuses(plan.graph, plan.order, plan.reuses)
    if complaint := untrue_promise(plan):
        raise CheckError(f"plan: {complaint}")
    return plan


def ordered(candidates: Sequence[Candidate], request: Request) -> Plan:
    """The captured graph or one that computes the same, in the order of least peak that the solver finds for any.

    What runs generated kernels goes first. Of those that need no more the one that algebra has made quickest, and of equal ones the first.
    One with padded products, which is faster, may need a twentieth more. Not yet checked. `eager_peak_bytes` is the peak of the captured
    program, the first candidate, as it stands.
    """
    order_together(candidates, request.solver, request.granule_bytes)

    def peak_bytes(candidate: Candidate) -> int:
        return candidate.ordered(request.solver, request.granule_bytes).peak_bytes

    best = min(candidates, key=lambda each: (not each.generated, peak_bytes(each), each.algebra_us))
    padded = [each for each in candidates if each.is_padded and peak_bytes(each) <= _HARDLY_MORE * peak_bytes(best)]
    if padded and not best.generated:
        best = min(padded, key=peak_bytes)
    return in_its_order(candidates[0], best, request)


def in_its_order(captured: Candidate, best: Candidate, request: Request) -> Plan:
    """One candidate in the order that is known of it, or that the solver finds. Not yet checked."""
    granule_bytes = request.granule_bytes
    problem, schedule = best.order_problem(granule_bytes), best.ordered(request.solver, granule_bytes)
    footprint = simulate(problem, schedule.order)
    order = tuple(int(index) for index in schedule.order)
    plan = Plan(
        graph=best.graph,
        order=order,
        reuses=tuple(int(slot) for slot in footprint.reuses),
        workspace_bytes=tuple(int(size) for size in best.workspace_bytes),
        resident_bytes=int(problem.resident_bytes) + sum(storage_bytes(each, granule_bytes) for each in offloaded_storages(best.graph)),
        peak_bytes=int(schedule.peak_bytes),
        eager_peak_bytes=captured.eager(granule_bytes).peak_bytes,
        lower_bound_bytes=int(schedule.lower_bound_bytes),
        status=schedule.status.name.lower(),
        solver=schedule.solver,
        provenance=request.provenance,
        peak=profile_of(best.graph, problem, order, footprint, round_to=granule_bytes).snapshot(best.graph, order),
        granule_bytes=granule_bytes,
        program=captured.program(request.provenance.torch, granule_bytes),
        node_us=best.node_us,
        issue_us=best.issue_us,
        eager=captured.eager(granule_bytes).timed(captured.node_us),
    )
    return dataclasses.replace(plan, algebra=rule_reports(best.applied_rules, plan))


def _within_host(plan: Plan, budget: Budget) -> Plan:
    return checked(replace(plan, pinned_bytes=pinned_bytes(plan.graph, plan.order), host_bytes=budget.host_bytes))


def _need(error: BudgetError) -> tuple[bool, int, int]:
    """How much is needed: of the device before all, as no more of the host would do; of the host; of the device within that."""
    return error.smallest_host_bytes is None, error.smallest_host_bytes or 0, error.smallest_peak_bytes


class Planner:
    """Plans the programs of one step together, and keeps what was searched: what was found under one limit serves every other.

    Each program is the candidates that compute it, the captured graph first. The last program is what most steps run and the one that
    is searched; the others, of an optimizer's first steps, get what was found for it.
    """

    def __init__(self, programs: Sequence[Sequence[Candidate]]) -> None:
        self.programs = [tuple(program) for program in programs]
        self._searched: list[tuple[Request, list[CandidateArchive | None]]] = []  # by request without budget and effort, by program

    def plans(self, request: Request) -> list[Plan]:
        """A checked plan for each program.

        Without a limit in the order of least peak; within one without recomputation where order alone is enough, else with as little as was
        found to do. Raises BudgetError, with the smallest peak that was found and what stands there, where nothing fits, and before any
        search where nothing can; where several programs do not fit, that of the one that needs the most.
        """
        refuse_impossible(self._all(request), request)
        if request.budget.is_limit:
            self._recall(request)
        self._order(request)
        if request.budget.is_limit:
            self._search(request)
        plans: list[Plan] = []
        refused: list[BudgetError] = []
        for which in range(len(self.programs)):
            try:
                plans.append(self._plan(which, request))
            except BudgetError as error:
                refused.append(error)
        if refused:
            worst = max(refused, key=_need)
            worst.smallest_peak_bytes = max(each.smallest_peak_bytes for each in refused)  # which would do for all of them
            raise worst
        return [*plans[:-1], replace(plans[-1], first_steps=tuple(plans[:-1]))]

    def plans_near(self, request: Request) -> list[Plan]:
        """The same within a limit that others keep to and nobody asked for here: where nothing fits, as near to it as can be."""
        try:
            return self.plans(request)
        except BudgetError as error:
            if not error.smallest_peak_bytes:  # it is the host that is too small
                raise
            return self.plans_near(replace(request, budget=Budget(error.smallest_peak_bytes, host_bytes=request.budget.host_bytes)))

    def peak_by_order_bytes(self, request: Request) -> int:
        """What the last program takes in the best order found for any of its graphs that cost no time; no plan is made of it."""
        candidates = self._candidates(len(self.programs) - 1, replace(request, budget=Budget()))
        order_together(candidates, request.solver, request.granule_bytes)
        return min(each.ordered(request.solver, request.granule_bytes).peak_bytes for each in candidates)

    def searched(self, request: Request) -> CandidateArchive:
        """All that is known of the last program after the request's search, whatever its limit."""
        self._recall(request)
        self._search(request)
        return self._searched_for(len(self.programs) - 1, request)

    def _order(self, request: Request) -> None:
        """Have all programs ordered: an optimizer's first steps run once, so one that needs no more than later ones is good enough."""
        *first_steps, main = self._all(request)
        order_together(main, request.solver, request.granule_bytes)
        enough_bytes = min(each.ordered(request.solver, request.granule_bytes).peak_bytes for each in main)
        for candidates in first_steps:
            order_together(candidates, request.solver, request.granule_bytes, enough_bytes)

    def _plan(self, which: int, request: Request) -> Plan:
        by_order = ordered(self._candidates(which, replace(request, budget=Budget())), request)
        if not request.budget.is_limit:
            return _within_host(overlapped(by_order, by_order.peak_bytes), request.budget)
        searched = self._searched_for(which, request)
        point = searched.within(request.budget.at_most(searched.unlimited_bytes(by_order))) or searched.within(request.budget)
        if point is None:
            raise self._refusal(which, request, searched, by_order)
        plan = searched.plan(point, by_order, request.budget)
        return _within_host(overlapped(plan, request.budget.memory_bytes or plan.peak_bytes), request.budget)

    def _refusal(self, which: int, request: Request, searched: CandidateArchive, by_order: Plan) -> BudgetError:
        """What is said where nothing that was found keeps to both limits: which memory is short."""
        budget = request.budget
        assert budget.memory_bytes is not None, "the fastest point of all is within any limit of time"
        leanest = searched.plan(searched.frontier_pinning(budget.host_bytes)[0], by_order, budget)
        more = split_loss_text(self.programs[which][0].graph, budget.memory_bytes, request)
        if budget.host_bytes is not None and (without := searched.host_frontier(budget.memory_bytes)):
            return host_refusal(leanest, budget.memory_bytes, budget.host_bytes, without, more)
        return refusal(leanest, budget.memory_bytes, more)

    def _candidates(self, which: int, request: Request) -> list[Candidate]:
        """Those that may be used: what takes longer than the captured graph only where there is a limit."""
        candidates = [each for each in self.programs[which] if each.exact or not request.exact]
        return candidates if request.budget.is_limit else [each for each in candidates if not each.costs_time]

    def _search(self, request: Request) -> None:
        """Have what the request asks for searched, once for all programs: one that is stopped is not begun again for the next."""
        known = self._known(request)
        before = known[-1]
        assert before is not None, "recalled before anything is searched"
        main = known[-1] = before.by(request.sweeps, _listener(before, request))
        if main is before:
            return
        self._keep(main, request)
        if main.archive.interrupted:
            warn(f"search interrupted: the best of {main.archive.states} schedules seen so far is used")
        known[:-1] = [None if sibling is None else main.carried_to(sibling) for sibling in known[:-1]]

    def _searched_for(self, which: int, request: Request) -> CandidateArchive:
        """All that is known of a program after that search."""
        known = self._known(request)
        main, sibling = known[-1], known[which]
        assert main is not None, "searched before anything is planned"
        if which == len(known) - 1:
            return main
        if sibling is None:
            sibling = main.carried_to(CandidateArchive.bare(self._candidates(which, request), request))
        if sibling.within(request.budget) is None and main.within(request.budget) is not None:
            sibling = sibling.by(request.sweeps)
        known[which] = sibling
        return sibling

    def _recall(self, request: Request) -> None:
        """Begin with what other processes have left of the program that most steps run, and the orders of all; else with its orders."""
        known = self._known(request)
        if known[-1] is None:
            remembered = SearchCache.of(self._all(request), request)
            archive = None if remembered is None else remembered.recall()
            if archive is None:
                self._order(replace(request, budget=Budget()))  # as without a limit, as no plan within one takes more
                archive = CandidateArchive.bare(self._candidates(len(self.programs) - 1, request), request)
            known[-1] = archive

    def _keep(self, main: CandidateArchive, request: Request) -> None:
        remembered = SearchCache.of(self._all(request), request)
        if remembered is not None:
            remembered.keep(main)

    def _all(self, request: Request) -> list[list[Candidate]]:
        return [self._candidates(which, request) for which in range(len(self.programs))]

    def _known(self, request: Request) -> list[CandidateArchive | None]:
        """By program what is known that may answer the request, whatever its limit and effort."""
        unlimited = replace(request, budget=Budget(), sweeps=())
        for other, known in self._searched:
            if other == unlimited:
                return known
        self._searched.append((unlimited, [None] * len(self.programs)))
        return self._searched[-1][1]


def _listener(known: CandidateArchive, request: Request) -> SweepListener | None:
    if request.watcher is None:
        return None
    host_bytes = request.budget.host_bytes
    budget = replace(request.budget, host_bytes=None if host_bytes is None else host_bytes - known.home_bytes)
    return ProgressWatch(request.watcher, budget, known.archive.all_points)
