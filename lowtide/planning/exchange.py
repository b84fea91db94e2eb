"""Collectives beside computation: begun early and waited for late, in an order of no higher peak; and which loads are left out.

A begin goes up to right behind the last node that it depends on. A wait, and all that follows from it, goes down the order, the last wait
first, and the others before it, as work ends in the order in which it was begun: as far as the peak stays, by halves of what is left.

Loads of what ranks hold parts of are begun apart once the order is known. Those are left out of which what they would make is still there.
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from itertools import islice, pairwise
from typing import NamedTuple

import numpy as np

from lowtide.cost.memory import order_problem, simulate
from lowtide.ir.graph import Graph, Node
from lowtide.ir.operators.nodes import begins_collective, is_collective, is_transfer, loads_parts
from lowtide.plan.cost_report import CostReport, Eviction
from lowtide.plan.plan import Plan
from lowtide.planning.candidate import in_order
from lowtide.problems.order import OrderProblem, Rows
from lowtide.remat.ahead import ahead_of_all
from lowtide.remat.problem import RematProblem
from lowtide.rewrite.loads import alike, begun_apart, taken_once


def beside(problem: OrderProblem, order: Sequence[int], begins: AbstractSet[int], waits: AbstractSet[int]) -> list[int]:
    most_bytes, moved = simulate(problem, order).peak_bytes, list(order)
    before = problem.preds.lists()
    begun = [each for each in order if each in begins]
    for earlier, later in pairwise(begun):  # links work in the order in which their work is wanted
        before[later].append(earlier)
    for node in begun:
        moved = _lean(problem, [_raised(moved, node, before)], most_bytes) or moved
    end = len(moved)
    for node in [each for each in reversed(moved) if each in waits]:
        moved = _lean(problem, _sunk(moved[:end], node, before, moved[end:]), most_bytes) or moved
        end = moved.index(node)
    return moved


def holding(problem: OrderProblem, waits: Mapping[int, int]) -> OrderProblem:
    """The problem in which the workspace of these waits is held from its begin on, `waits[wait]`: a tensor between the two."""
    if not waits:
        return problem
    workspace_bytes, first = problem.workspace_bytes.copy(), problem.tensor_count
    sizes = np.array([workspace_bytes[wait] for wait in waits], np.int64)
    workspace_bytes[[*waits, *waits.values()]] = 0
    row_of = {wait: first + row for row, wait in enumerate(waits)}
    reads = Rows.of([[*row, row_of[node]] if node in row_of else row for node, row in enumerate(problem.reads.lists())])
    return dataclasses.replace(
        problem,
        tensor_bytes=np.concatenate([problem.tensor_bytes, sizes]),
        producer=np.concatenate([problem.producer, np.array(list(waits.values()), np.int32)]),
        kept=np.concatenate([problem.kept, np.zeros(len(sizes), bool)]),
        read_ptr=reads.ptr,
        read_ids=reads.ids,
        workspace_bytes=workspace_bytes,
    )


def _raised(order: Sequence[int], node: int, before: Sequence[Sequence[int]]) -> list[int]:
    """The order with a node right behind the last that it depends on."""
    needed, at = set(before[node]), order.index(node)
    up = next((position + 1 for position in range(at - 1, -1, -1) if order[position] in needed), 0)
    return [*order[:up], node, *order[up:at], *order[at + 1 :]]


def _sunk(order: Sequence[int], node: int, before: Sequence[Sequence[int]], behind: Sequence[int]) -> Iterable[list[int]]:
    """Orders with a node and all that follows from it further down, the furthest first; `behind` stays behind all."""
    at = order.index(node)
    follows = {node}
    for each in order[at + 1 :]:
        if not follows.isdisjoint(before[each]):
            follows.add(each)
    span = len(order) - at
    while span > 1:
        piece = order[at : at + span]
        moved = [*(each for each in piece if each not in follows), *(each for each in piece if each in follows)]
        if moved != list(piece):
            yield [*order[:at], *moved, *order[at + span :], *behind]
        span //= 2


def _lean(problem: OrderProblem, orders: Iterable[list[int]], most_bytes: int) -> list[int] | None:
    """The first that peaks no higher; None where all do."""
    return next((order for order in orders if simulate(problem, order).peak_bytes <= most_bytes), None)


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
    fewer_loads = _rewritten(plan, done.graph, counts)
    return fewer_loads if fewer_loads.peak_bytes <= max(most_bytes, plan.peak_bytes) else plan


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
    rewritten = dataclasses.replace(
        plan,
        graph=graph,
        workspace_bytes=sizes,
        node_us=tuple(spread(plan.node_us, 0.0)) if plan.node_us else (),
        issue_us=tuple(spread(plan.issue_us, 0.0)) if plan.issue_us else (),
        cost_report=None if plan.cost_report is None else _reported(plan, counts),
    )
    return in_order(rewritten, order_problem(graph, sizes, round_to=plan.granule_bytes), order)


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


def overlapped(plan: Plan, most_bytes: int) -> Plan:
    """The plan with its collectives beside computation, not yet checked: at no higher peak. Itself where it has none.

    What is loaded from the other ranks in several passes is loaded once where that fits into `most_bytes`.

    What gloo holds beside a collective, from its begin to its wait, is no memory of the graph's: it is counted while the order is sought,
    and where the plan's own count would miss it at the peak, such a wait stays right behind its begin. Copies to the host have their times
    by the order, so that a plan with copies is left alone, but for those of state between steps where no search has placed them.
    """
    if any(map(is_transfer, plan.graph.nodes)):
        return plan if plan.cost_report is not None else _with_copies_ahead(plan)
    plan = apart(fewer(plan, most_bytes))
    nodes = plan.graph.nodes
    begins = {index for index, node in enumerate(nodes) if begins_collective(node)}
    if not begins:
        return plan
    waits = _waits(nodes, begins)
    problem = order_problem(plan.graph, plan.workspace_bytes, round_to=plan.granule_bytes)
    at_once = _at_once(plan.order, {wait: begin for wait, begin in waits.items() if plan.workspace_bytes[wait]})
    problem_held = holding(problem, {wait: begin for wait, begin in waits.items() if plan.workspace_bytes[wait]})
    order = beside(problem_held, at_once, begins, waits.keys())
    if simulate(problem_held, order).peak_bytes > simulate(problem, order).peak_bytes:
        order = at_once
    return plan if tuple(order) == plan.order else _in_order(plan, problem, order)


def _with_copies_ahead(plan: Plan) -> Plan:
    """The plan, of an order alone, with what it copies of state between steps ahead and late."""
    problem = RematProblem.of(plan.graph, [0.0] * len(plan.graph.nodes), plan.workspace_bytes, round_to=plan.granule_bytes)
    for order in islice(ahead_of_all(problem, np.array(plan.order, np.int32)), 1, None):
        if simulate(problem.problem, order).peak_bytes <= plan.peak_bytes:
            return _in_order(plan, problem.problem, order.tolist())
    return plan


def _waits(nodes: Sequence[Node], begins: AbstractSet[int]) -> dict[int, int]:
    begun = {value: index for index in begins for value in nodes[index].results}
    ends = (index for index, node in enumerate(nodes) if is_collective(node) and index not in begins)
    return {index: begun[value] for index in ends for value in nodes[index].inputs if value in begun}


def _at_once(order: Sequence[int], waits: Mapping[int, int]) -> list[int]:
    """The order with these waits right behind their begins."""
    wait_of = {begin: wait for wait, begin in waits.items()}
    return [each for node in order if node not in waits for each in ((node, wait_of[node]) if node in wait_of else (node,))]


def _in_order(plan: Plan, problem: OrderProblem, order: list[int]) -> Plan:
    report = None if plan.cost_report is None else _moved(plan.cost_report, plan.order, order)
    return in_order(dataclasses.replace(plan, cost_report=report), problem, order)


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
