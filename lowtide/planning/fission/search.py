"""Splits that lower what no recomputation can: the arguments, results and workspace of single nodes (after MAGIS, sections 4.3 and 5.1).

Whatever is computed again or swapped, each node needs what it reads and makes at once. So the node that needs the most is the floor of
every plan, and its largest tensors are the heat: around each of them sets are grown, along each of its dimensions, and split into as few
parts as bring the set below the next floor. The best of them is taken, if it lowers the floor by more than a little; then the next node is
the highest. What stands in the same place of repeated blocks comes next, one after the other.

The same graph always gives the same splits: nothing is measured here, and nothing reads a clock. Planning compares what comes of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lowtide.cost.bodies import inner_peak_bytes, workspaces_within
from lowtide.cost.memory import counted_storages, order_problem, resident_storages, simulate
from lowtide.errors import CheckError
from lowtide.ir.graph import Graph, Node, Value
from lowtide.ir.loops import Loop, is_loop
from lowtide.ir.operators.names import COPY
from lowtide.planning.fission.around import Surroundings, bytes_of
from lowtide.planning.impossible import needs_bytes
from lowtide.problems.order import OrderProblem
from lowtide.rewrite.base import replace_nodes
from lowtide.rewrite.fission.roles import Split
from lowtide.rewrite.fission.split import split
from lowtide.rewrite.into_sums import add_into_sums
from lowtide.rewrite.losses import sum_losses
from lowtide.rewrite.made_anew import make_anew
from lowtide.schedule import Best, schedule

_PARTS = (2, 4, 8, 16, 32, 64)
_SHARES = (0.5, 0.1)  # of a large tensor's bytes: what a set grows over
_TENSORS = 2  # of a node, the largest first, around which sets are grown
_FLOORS, _PEAKS = 24, 2  # splits at most, for the floor and for the peak of an order
_WIDE = (0.1, 0.0)  # shares that a set for that peak grows over
_WORTH = 0.95  # of a peak: what a split, or twice as many parts, has to lower it to
_FEWER = (4, 16)  # times larger parts, of which there are fewer: what is taken and what it costs, compared by planning
_ENOUGH = 0.9  # of the floor: what a split has to lower it to
_SLACK = 0.1  # of what a loop is given and makes: what its parts may take beside that, if the next floor is no higher


@dataclass(frozen=True)
class _Tried:
    """One split into some parts."""

    graph: Graph
    loop: Node
    needs_bytes: int  # of the loop
    extent: int
    nodes: int


def split_graphs(graph: Graph) -> tuple[Graph, ...]:
    """Graphs that compute what this one does up to rounding, split more and more; none where nothing is to be had.

    One row of them is split for the floor alone, another one for the peak of an order first, as long as that pays.
    """
    base = add_into_sums(sum_losses(make_anew(graph).graph).graph).graph
    leaner = _row(_row([base], _lowered, _FLOORS), _flattened, _PEAKS)
    flatter = _row([base], _flattened, _PEAKS)
    rows = [leaner, _row(flatter, _lowered, _FLOORS)] if len(flatter) > 1 else [leaner]
    found = [each for row in rows for each in _thinned(row[1:])]
    return tuple([base, *found] if base is not graph or found else ())


def _row(graphs: list[Graph], lower: Callable[[Graph], _Tried | None], rounds: int) -> list[Graph]:
    """These, and those that come of splitting the last one more and more."""
    row = list(graphs)
    for _ in range(rounds):
        best = lower(row[-1])
        if best is None:
            break
        row.append(with_ordered_body(best.graph, best.loop))
    return row


def _thinned(row: Sequence[Graph]) -> list[Graph]:
    """The first split, all splits, and these with fewer parts: those between differ in one of many blocks."""
    return [*row[:1], *row[1:][-1:], *(_with_fewer(row[-1], by) for by in _FEWER)] if row else []


def _with_fewer(graph: Graph, by: int) -> Graph:
    """The graph with fewer and larger parts, which take more and cost less."""
    return replace_nodes(graph, {node: (_larger(node, by),) for node in graph.nodes if is_loop(node)}).graph


def _larger(node: Node, by: int) -> Node:
    """A loop whose parts are so many times as large, but two at least."""
    loop = Loop.of(node)
    assert isinstance(loop.extent, int)
    return _divided(node, min(loop.part * by, -(-loop.extent // 2)))


def _divided(node: Node, part: int) -> Node:
    """A loop with parts of so many units."""
    body = Loop.of(node).body
    dimension = replace(body.dimensions[0], most=part)
    return replace(node, kwargs=tuple((dict(node.kwargs) | {"part": part}).items()), body=replace(body, dimensions=(dimension,)))


def _lowered(graph: Graph) -> _Tried | None:
    """The split that lowers the floor the most; None where there is none worth it."""
    problem = order_problem(graph, workspaces_within(graph.nodes))
    needs = needs_bytes(problem)
    if not len(needs):
        return None
    highest = int(needs.argmax())
    node, floor = graph.nodes[highest], int(needs[highest])
    around = Surroundings(graph)
    tried = [each for value in _hot(node, around) for each in _tries(around, value, needs)]
    tried = [each for each in tried if each.needs_bytes <= _ENOUGH * floor]
    return min(tried, key=lambda each: (each.needs_bytes, each.nodes), default=None)


def _flattened(graph: Graph) -> _Tried | None:
    """The split that lowers the peak of an order the most, around what stands there; None where there is none worth it."""
    problem = order_problem(graph, workspaces_within(graph.nodes))
    found = schedule(problem, Best())
    around, above = Surroundings(graph), problem.resident_bytes
    tried: list[_Tried] = []
    for value in _standing(graph, problem, found.order, around):
        for wanted in around.splits(value, _WIDE):
            tried += _while_lower(graph, wanted, found.peak_bytes - above)
    tried = [each for each in tried if each.needs_bytes <= _WORTH * (found.peak_bytes - above)]
    return min(tried, key=lambda each: (each.needs_bytes, each.nodes), default=None)


def _standing(graph: Graph, problem: OrderProblem, order: Sequence[int], around: Surroundings) -> list[Value]:
    """The largest tensors that stand at the peak of an order, one of each size."""
    played = simulate(problem, order)
    start, end = played.lifetimes
    alive = {storage for index, storage in enumerate(counted_storages(graph)) if start[index] <= played.peak_step < end[index]}
    first: dict[int, Value] = {}
    for node in graph.nodes:
        for value in () if is_loop(node) else node.outputs:
            if value is not None and value.storage in alive and value in around.made:
                first.setdefault(bytes_of(value), value)
    return [first[nbytes] for nbytes in sorted(first, reverse=True)[:_TENSORS]]


def _while_lower(graph: Graph, wanted: Split, peak_bytes: int) -> Iterator[_Tried]:
    """A split into more and more parts, while the order's peak gets lower; `peak_bytes` are above what is resident."""
    for parts in _PARTS:
        if parts > wanted.extent:
            return
        try:
            done = split(graph, wanted, parts)
        except CheckError:
            return
        loop = next(node for node in done.forward[wanted.nodes[0]] if is_loop(node))
        if _spared_bytes(Loop.of(loop)) < (1 - _WORTH) * peak_bytes:
            return
        ordered = with_ordered_body(done.graph, loop)
        problem = order_problem(ordered, workspaces_within(ordered.nodes))
        lower = schedule(problem, Best()).peak_bytes - problem.resident_bytes
        if lower > _WORTH * peak_bytes:
            return
        peak_bytes = lower
        yield _Tried(done.graph, loop, lower, wanted.extent, len(wanted.nodes))


def _spared_bytes(loop: Loop) -> int:
    """What is not there at once because of a loop: of what its nodes make and nobody else reads."""
    assert isinstance(loop.extent, int)
    whole, part = (sum(_made_bytes(body)) for body in (loop.at_any(loop.extent), loop.at(loop.part)))
    return whole - part


def _made_bytes(body: Graph) -> Iterator[int]:
    given = {value.storage for value in body.inputs}
    copied = {value.storage for node in body.nodes if node.op == COPY for value in node.inputs[1:]}
    made = {value.storage for node in body.nodes for value in node.results} - given - copied
    return (int(storage.nbytes) for storage in made)


def _hot(node: Node, around: Surroundings) -> list[Value]:
    """The largest tensors of a node that nodes make."""
    values = [value for value in dict.fromkeys((*node.results, *node.inputs)) if value in around.made and value.dtype != "scalar"]
    return sorted(values, key=lambda value: -bytes_of(value))[:_TENSORS]


def _tries(around: Surroundings, value: Value, needs: NDArray[np.int64]) -> Iterator[_Tried]:
    """The splits around a tensor, each into as few parts as serve."""
    for wanted in around.splits(value, _SHARES):
        outside = [place for place, node in enumerate(around.graph.nodes) if node not in wanted.axes]
        best = _fewest(around.graph, wanted, int(needs[outside].max(initial=0)))
        if best is not None:
            yield best


def _fewest(graph: Graph, wanted: Split, next_bytes: int) -> _Tried | None:
    """A split into as few parts as bring it below the next floor, or near to what it is given and makes."""
    try:
        done = split(graph, wanted, _PARTS[0])
        loop = next(node for node in done.forward[wanted.nodes[0]] if is_loop(node))
        outer = _outer_bytes(done.graph, loop)
        for parts in _PARTS:
            divided = _divided(loop, -(-wanted.extent // parts))
            inner = inner_peak_bytes(Loop.of(divided).at(Loop.of(divided).part))
            if outer + inner <= next_bytes or inner <= _SLACK * outer or parts >= wanted.extent:
                break
    except CheckError:
        return None
    return _Tried(replace_nodes(done.graph, {loop: (divided,)}).graph, divided, outer + inner, wanted.extent, len(wanted.nodes))


def _outer_bytes(graph: Graph, loop: Node) -> int:
    """What a loop is given and makes, without what is resident."""
    resident = set(resident_storages(graph))
    storages = {value.storage for value in (*loop.inputs, *loop.results)} - resident
    return sum(int(storage.nbytes) for storage in storages)


def with_ordered_body(graph: Graph, loop: Node) -> Graph:
    """The graph with the nodes of a loop's body in an order of low peak."""
    assert loop.body is not None
    body = Loop.of(loop).at(Loop.of(loop).part)
    problem = order_problem(body, workspaces_within(body.nodes))
    order = min((schedule(problem, Best()).order, tuple(range(len(body.nodes)))), key=lambda each: _peak(problem, each))
    ordered = replace(loop, body=replace(loop.body, nodes=tuple(loop.body.nodes[index] for index in order)))
    return replace_nodes(graph, {loop: (ordered,)}).graph


def _peak(problem: OrderProblem, order: Sequence[int]) -> int:
    return simulate(problem, order).peak_bytes
