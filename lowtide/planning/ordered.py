"""Plans by order alone: the graph and order of least peak, and what follows from them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet

from lowtide.cost.memory import offloaded_storages, order_problem, simulate, storage_bytes
from lowtide.cost.peak import profile_of
from lowtide.ir.graph import Node
from lowtide.ir.operators.collectives.nodes import begins_collective, is_collective
from lowtide.ir.operators.nodes import is_transfer
from lowtide.plan.cost_report import CostReport, Eviction
from lowtide.plan.plan import Plan
from lowtide.planning.algebra import told
from lowtide.planning.candidate import Candidate, order_together
from lowtide.planning.request import Request
from lowtide.problems.order import OrderProblem
from lowtide.schedule.beside import beside, holding


def ordered(candidates: Sequence[Candidate], request: Request) -> Plan:
    """The captured graph or one that computes the same, in the order of least peak that the solver finds for any.

    What runs generated kernels goes first. Of those that need no more the one that algebra has made quickest, and of equal ones the first.
    Not yet checked. `eager_peak_bytes` is the peak of the captured program, the first candidate, as it stands.
    """
    order_together(candidates, request.solver, request.granule_bytes)
    best = min(
        candidates, key=lambda each: (not each.generated, each.ordered(request.solver, request.granule_bytes).peak_bytes, each.deeds_us)
    )
    return in_its_order(candidates[0], best, request)


def in_its_order(captured: Candidate, best: Candidate, request: Request) -> Plan:
    """One candidate in the order that is known of it, or that the solver finds. Not yet checked."""
    granule_bytes = request.granule_bytes
    problem, found = best.order_problem(granule_bytes), best.ordered(request.solver, granule_bytes)
    footprint = simulate(problem, found.order)
    order = tuple(int(index) for index in found.order)
    plan = Plan(
        graph=best.graph,
        order=order,
        reuses=tuple(int(slot) for slot in footprint.reuses),
        workspace_bytes=tuple(int(size) for size in best.workspace_bytes),
        resident_bytes=int(problem.resident_bytes) + sum(storage_bytes(each, granule_bytes) for each in offloaded_storages(best.graph)),
        peak_bytes=int(found.peak_bytes),
        eager_peak_bytes=captured.eager(granule_bytes).peak_bytes,
        lower_bound_bytes=int(found.lower_bound_bytes),
        status=found.status.name.lower(),
        solver=found.solver,
        provenance=request.provenance,
        peak=profile_of(best.graph, problem, order, footprint, round_to=granule_bytes).snapshot(best.graph, order),
        granule_bytes=granule_bytes,
        program=captured.program(request.provenance.torch, granule_bytes),
        node_us=best.node_us,
        eager=dataclasses.replace(captured.eager(granule_bytes).timeline, us=captured.node_us),
    )
    return dataclasses.replace(plan, algebra=told(best.deeds, plan))


def overlapped(plan: Plan) -> Plan:
    """The plan with its collectives beside computation, not yet checked: at no higher peak. Itself where it has none.

    What gloo holds beside a collective, from its begin to its wait, is no memory of the graph's: it is counted while the order is sought,
    and where the plan's own count would miss it at the peak, such a wait stays right behind its begin. Copies to the host have their times
    by the order, so that a plan with copies is left alone.
    """
    nodes = plan.graph.nodes
    begins = {index for index, node in enumerate(nodes) if begins_collective(node)}
    if not begins or any(map(is_transfer, nodes)):
        return plan
    waits = _waits(nodes, begins)
    problem = order_problem(plan.graph, plan.workspace_bytes, round_to=plan.granule_bytes)
    at_once = _at_once(plan.order, {wait: begin for wait, begin in waits.items() if plan.workspace_bytes[wait]})
    held = holding(problem, {wait: begin for wait, begin in waits.items() if plan.workspace_bytes[wait]})
    order = beside(held, at_once, begins, waits.keys())
    if simulate(held, order).peak_bytes > simulate(problem, order).peak_bytes:
        order = at_once
    return plan if tuple(order) == plan.order else _in_order(plan, problem, order)


def _waits(nodes: Sequence[Node], begins: AbstractSet[int]) -> dict[int, int]:
    """The begin of each wait."""
    begun = {value: index for index in begins for value in nodes[index].results}
    ends = (index for index, node in enumerate(nodes) if is_collective(node) and index not in begins)
    return {index: begun[value] for index in ends for value in nodes[index].inputs if value in begun}


def _at_once(order: Sequence[int], waits: Mapping[int, int]) -> list[int]:
    """The order with these waits right behind their begins."""
    wait_of = {begin: wait for wait, begin in waits.items()}
    return [each for node in order if node not in waits for each in ((node, wait_of[node]) if node in wait_of else (node,))]


def _in_order(plan: Plan, problem: OrderProblem, order: list[int]) -> Plan:
    """The plan in another order of no higher peak."""
    footprint = simulate(problem, order)
    peak_bytes = int(footprint.peak_bytes)
    profile = profile_of(plan.graph, problem, order, footprint, round_to=plan.granule_bytes)
    return dataclasses.replace(
        plan,
        order=tuple(order),
        reuses=tuple(int(slot) for slot in footprint.reuses),
        peak_bytes=peak_bytes,
        status="optimal" if plan.lower_bound_bytes >= peak_bytes else "feasible",
        peak=profile.snapshot(plan.graph, order),
        cost_report=None if plan.cost_report is None else _moved(plan.cost_report, plan.order, order),
    )


def _moved(report: CostReport, old: Sequence[int], new: Sequence[int]) -> CostReport:
    """The report, its steps those of the new order."""
    position = {index: step for step, index in enumerate(new)}
    steps = [position[index] for index in old]

    def moved(eviction: Eviction) -> Eviction:
        tensor = dataclasses.replace(eviction.tensor, start=steps[eviction.tensor.start], end=steps[eviction.tensor.end - 1] + 1)
        away = tuple((steps[start - 1] + 1, steps[end]) for start, end in eviction.away)
        return dataclasses.replace(eviction, tensor=tensor, away=away)

    return dataclasses.replace(report, evictions=tuple(map(moved, report.evictions)))
