"""Splits that lower what no recomputation can: the arguments, results and workspace of single nodes (after MAGIS, sections 4.3 and 5.1).

Whatever is computed again or swapped, each node needs what it reads and makes at once. So the node that needs the most is the floor of
every plan, and its largest tensors are the heat: around each of them sets are grown, along each of its dimensions, and split into as few
parts as bring the set below the next floor. The best of them is taken, if it lowers the floor by more than a little; then the next node is
the highest. What stands in the same place of repeated blocks comes next, one after the other.

The same graph always gives the same splits: nothing is measured here, and nothing reads a clock. Planning compares what comes of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from lowtide.cost.bodies import inner_peak_bytes, workspaces_within
from lowtide.cost.memory import order_problem, resident_storages, simulate
from lowtide.errors import CheckError
from lowtide.ir.graph import Graph, Node, Value
from lowtide.ir.loops import Loop, is_loop
from lowtide.planning.fission.around import Surroundings, bytes_of
from lowtide.planning.impossible import needs_bytes
from lowtide.problems.order import OrderProblem
from lowtide.rewrite.base import replace_nodes
from lowtide.rewrite.fission.roles import Split
from lowtide.rewrite.fission.split import split
from lowtide.rewrite.into_sums import add_into_sums
from lowtide.rewrite.losses import sum_losses
from lowtide.schedule import Best, schedule

_PARTS = (2, 4, 8, 16, 32, 64)
_SHARES = (0.5, 0.1)  # of a large tensor's bytes: what a set grows over
_TENSORS = 3  # of a node, the largest first, around which sets are grown
_ROUNDS = 24
_FEWER = (4, 16)  # times larger parts, of which there are fewer: what is taken and what it costs, compared by planning
_LAST = 1 + len(_FEWER)
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
    """Graphs that compute what this one does up to rounding, each with more split than the one before; none where nothing is to be had."""
    current = add_into_sums(sum_losses(graph).graph).graph
    found = [] if current is graph else [current]
    for _ in range(_ROUNDS):
        best = _lowered(current)
        if best is None:
            break
        current = with_ordered_body(best.graph, best.loop)
        found.append(current)
    return tuple(_thinned([*found, *(_with_fewer(current, by) for by in _FEWER if any(map(is_loop, current.nodes)))]))


def _thinned(graphs: Sequence[Graph]) -> list[Graph]:
    """The first ones and the last: each is searched, and those between differ in one of many blocks."""
    return [*graphs[:3], *graphs[-_LAST:]] if len(graphs) > 3 + _LAST else list(graphs)


def _with_fewer(graph: Graph, by: int) -> Graph:
    """The graph with fewer and larger parts, which take more and cost less."""
    return replace_nodes(graph, {node: (_larger(node, by),) for node in graph.nodes if is_loop(node)}).graph


def _larger(node: Node, by: int) -> Node:
    """A loop whose parts are so many times as large, but two at least."""
    loop = Loop.of(node)
    assert isinstance(loop.extent, int)
    part = min(loop.part * by, -(-loop.extent // 2))
    dimension = replace(loop.body.dimensions[0], most=part)
    return replace(node, kwargs=tuple((dict(node.kwargs) | {"part": part}).items()), body=replace(loop.body, dimensions=(dimension,)))


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
    tried = None
    for parts in _PARTS:
        if parts > wanted.extent:
            break
        try:
            done = split(graph, wanted, parts)
            loop = next(node for node in done.forward[wanted.nodes[0]] if is_loop(node))
            inner = inner_peak_bytes(Loop.of(loop).at(Loop.of(loop).part))
        except CheckError:
            return None
        outer = _outer_bytes(done.graph, loop)
        tried = _Tried(done.graph, loop, outer + inner, wanted.extent, len(wanted.nodes))
        if tried.needs_bytes <= next_bytes or inner <= _SLACK * outer:
            break
    return tried


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
