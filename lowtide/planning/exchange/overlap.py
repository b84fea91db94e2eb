"""Collectives beside computation: begun early and waited for late, in an order of no higher peak."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet

from lowtide.cost.memory import order_problem, simulate
from lowtide.cost.peak import profile_of
from lowtide.ir.graph import Node
from lowtide.ir.operators.collectives.nodes import begins_collective, is_collective
from lowtide.ir.operators.nodes import is_transfer
from lowtide.plan.cost_report import CostReport, Eviction
from lowtide.plan.plan import Plan
from lowtide.planning.exchange.loads import apart, fewer
from lowtide.problems.order import OrderProblem
from lowtide.schedule.overlap import beside, holding


def overlapped(plan: Plan, most_bytes: int) -> Plan:
    """The plan with its collectives beside computation, not yet checked: at no higher peak. Itself where it has none.

    What is loaded from the other ranks in several passes is loaded once where that fits into `most_bytes`.

    What gloo holds beside a collective, from its begin to its wait, is no memory of the graph's: it is counted while the order is sought,
    and where the plan's own count would miss it at the peak, such a wait stays right behind its begin. Copies to the host have their times
    by the order, so that a plan with copies is left alone.
    """
    if any(map(is_transfer, plan.graph.nodes)):
        return plan
    plan = apart(fewer(plan, most_bytes))
    nodes = plan.graph.nodes
    begins = {index for index, node in enumerate(nodes) if begins_collective(node)}
    if not begins:
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
        start, end = steps[eviction.tensor.start], steps[eviction.tensor.end - 1] + 1
        away = tuple(_apart([(steps[gone - 1] + 1, steps[back]) for gone, back in eviction.away], start, end))
        return dataclasses.replace(eviction, tensor=dataclasses.replace(eviction.tensor, start=start, end=end), away=away)

    return dataclasses.replace(report, evictions=tuple(map(moved, report.evictions)))


def _apart(spans: Sequence[tuple[int, int]], start: int, end: int) -> Iterator[tuple[int, int]]:
    """Spans of [start, end) one behind the other: where a load begins before the last use of what it loads again, nothing was away."""
    for gone, back in sorted(spans):
        if max(gone, start) < min(back, end):
            yield max(gone, start), min(back, end)
            start = min(back, end)
