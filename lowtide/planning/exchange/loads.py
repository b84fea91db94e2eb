"""Loads of what ranks hold parts of, once the order is known: which are left out, as what they would make is still there; begins apart."""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import NamedTuple

from lowtide.cost.memory import order_problem, simulate
from lowtide.cost.peak import profile_of
from lowtide.ir.graph import Graph
from lowtide.ir.operators.collectives.nodes import loads_parts
from lowtide.plan.cost_report import CostReport, Eviction
from lowtide.plan.plan import Plan
from lowtide.rewrite.loads import alike, begun_apart, taken_once


class _Gap(NamedTuple):
    """The steps [start, end) from the last use of what one load made to the next load of the same."""

    start: int
    end: int
    nbytes: int
    load: int  # the index of the later one


def fewer(plan: Plan, most_bytes: int) -> Plan:
    """The plan with what it loads held until it would load it again, where that fits into `most_bytes`: the shortest gaps first.

    What a search has evicted is left as it is: its report says when that is there.
    """
    if not any(map(loads_parts, plan.graph.nodes)):
        return plan
    problem = order_problem(plan.graph, plan.workspace_bytes, round_to=plan.granule_bytes)
    level_bytes, left_out = simulate(problem, plan.order).footprint_bytes.copy(), set[int]()
    for gap in sorted(_gaps(plan), key=lambda gap: (gap.end - gap.start, gap.start)):
        if (level_bytes[gap.start : gap.end] + gap.nbytes <= max(most_bytes, plan.peak_bytes)).all():
            level_bytes[gap.start : gap.end] += gap.nbytes
            left_out.add(gap.load)
    nodes = plan.graph.nodes
    done = taken_once(plan.graph, {nodes[index].results[0].name for index in left_out})
    counts = [0 if done.forward.get(node) == () else 1 for node in nodes]
    found = _rewritten(plan, done.graph, counts)
    return found if found.peak_bytes <= max(most_bytes, plan.peak_bytes) else plan


def apart(plan: Plan) -> Plan:
    """The plan with each load in two nodes, one behind the other."""
    counts = [2 if loads_parts(node) else 1 for node in plan.graph.nodes]
    return plan if max(counts, default=1) == 1 else _rewritten(plan, begun_apart(plan.graph).graph, counts)


def _gaps(plan: Plan) -> Iterator[_Gap]:
    """Between loads of the same that come one after the other both as written and in the plan's order."""
    evictions = () if plan.cost_report is None else plan.cost_report.evictions
    evicted, again = {each.tensor.name for each in evictions}, {back for each in evictions for _, back in each.away}
    nodes, step_of = plan.graph.nodes, {index: step for step, index in enumerate(plan.order)}
    used = {value.storage: step_of[index] for index in plan.order for value in (*nodes[index].inputs, *nodes[index].results)}
    loads, same = defaultdict(list), alike(plan.graph)
    for index in plan.order:
        if nodes[index] in same:
            loads[same[nodes[index]]].append(index)
    for group in loads.values():
        if group != sorted(group):
            continue
        for first, second in pairwise(group):
            storage = nodes[first].results[0].storage
            assert isinstance(storage.nbytes, int), "a plan is of one size"
            touched = {value.storage.name for value in (*nodes[second].inputs, *nodes[second].results)}
            if step_of[second] not in again and evicted.isdisjoint(touched):
                yield _Gap(used[storage] + 1, step_of[second], storage.nbytes, second)


def _rewritten(plan: Plan, graph: Graph, counts: Sequence[int]) -> Plan:
    """The plan of a graph that has `counts` nodes for each of its own, the first of which takes as long; the order follows."""
    first, total = [], 0
    for count in counts:
        first.append(total)
        total += count
    order = [first[index] + more for index in plan.order for more in range(counts[index])]

    def spread(items: Sequence[float], filled: float) -> Iterator[float]:
        for item, count in zip(items, counts, strict=True):
            yield from [item, filled][:count]

    sizes = tuple(int(each) for each in spread(plan.workspace_bytes, 0))
    problem = order_problem(graph, sizes, round_to=plan.granule_bytes)
    footprint = simulate(problem, order)
    peak_bytes = int(footprint.peak_bytes)
    return dataclasses.replace(
        plan,
        graph=graph,
        order=tuple(order),
        reuses=tuple(int(slot) for slot in footprint.reuses),
        workspace_bytes=sizes,
        node_us=tuple(spread(plan.node_us, 0.0)) if plan.node_us else (),
        issue_us=tuple(spread(plan.issue_us, 0.0)) if plan.issue_us else (),
        peak_bytes=peak_bytes,
        status="optimal" if plan.lower_bound_bytes >= peak_bytes else "feasible",
        peak=profile_of(graph, problem, order, footprint, round_to=plan.granule_bytes).snapshot(graph, order),
        cost_report=None if plan.cost_report is None else _reported(plan, counts),
    )


def _reported(plan: Plan, counts: Sequence[int]) -> CostReport:
    """The report, its steps those of the new nodes: a load's tensor is there from its begin on."""
    assert plan.cost_report is not None, "asked for where there is one"
    begin, total = [], 0
    for index in plan.order:
        begin.append(total)
        total += counts[index]

    def moved(eviction: Eviction) -> Eviction:
        last = eviction.tensor.end - 1
        end = begin[last] + counts[plan.order[last]]
        tensor = dataclasses.replace(
            eviction.tensor, start=begin[eviction.tensor.start] + counts[plan.order[eviction.tensor.start]] - 1, end=end
        )
        return dataclasses.replace(eviction, tensor=tensor, away=tuple((begin[start], begin[stop]) for start, stop in eviction.away))

    saved_us = sum(us for us, count in zip(plan.node_us, counts, strict=True) if not count)
    evictions = tuple(map(moved, plan.cost_report.evictions))
    return dataclasses.replace(plan.cost_report, time_us=plan.cost_report.time_us - saved_us, evictions=evictions)
