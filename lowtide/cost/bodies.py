"""What a loop comes to, seen from outside: the peak of its body is its workspace, the runs of its parts are its time.

Its arguments and results are there throughout, so that what counts is what a part makes for itself: what its nodes make, in the body's
program order, and their workspaces. Parts of different sizes are different graphs; small ones cost more than their share, as their
operators are measured, or reckoned by the roofline, at their own size.

What collectives need beside what they are given and make, by the library that carries them out. On a CPU that is gloo: a reduced part is
cut out of the sum of all, a block that is held from the begin to the wait, and counted at either. On a GPU nccl works in what it is given.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from lowtide.cost.memory import Footprint, order_problem, simulate
from lowtide.ir.bodies import Loop, Region, is_loop, is_region
from lowtide.ir.graph import Graph, Node, Value
from lowtide.ir.operators.nodes import begins_collective, is_collective
from lowtide.ir.operators.own import SCATTER
from lowtide.ir.operators.row import bytes_of


def collective_bytes(nodes: Sequence[Node]) -> Mapping[Node, int]:
    """The workspaces of those of these nodes that begin or end a collective."""
    begun: dict[Value, int] = {}
    workspaces: dict[Node, int] = {}
    for node in nodes:
        if begins_collective(node):
            workspaces[node] = _of_gloo(node)
            begun |= dict.fromkeys(node.results, workspaces[node])
        elif is_collective(node):
            workspaces[node] = max((begun.get(value, 0) for value in node.inputs), default=0)
    return workspaces


def _of_gloo(node: Node) -> int:
    on_cpu = all(value.storage.device == "cpu" for value in node.results)
    return bytes_of(node.inputs) if on_cpu and node.op == SCATTER else 0


class NodeRuns(NamedTuple):
    """A node that runs so many times."""

    node: Node
    beside: Sequence[Node]  # the nodes of its graph
    times: int


def bodies(node: Node) -> tuple[Graph, ...]:
    """The body of a loop for each of the sizes that its parts have, the largest first."""
    loop = Loop.of(node)
    return tuple(loop.at(size) for size, _ in loop.sizes)


def runs_of(node: Node, beside: Sequence[Node] = (), count: int = 1) -> Iterator[NodeRuns]:
    """What running a node comes to: itself, or all runs of what is in its body."""
    if is_region(node):
        assert node.body is not None
        yield from (NodeRuns(inner, node.body.nodes, count) for inner in node.body.nodes)
        return
    if not is_loop(node):
        yield NodeRuns(node, beside, count)
        return
    loop = Loop.of(node)
    for size, turns in loop.sizes:
        body = loop.at(size)
        for inner in body.nodes:
            yield from runs_of(inner, body.nodes, count * turns)


def body_footprint(body: Graph, workspace_bytes: Sequence[int] | None = None, *, round_to: int = 1) -> Footprint:
    """What a part takes, step by step, with what it is given: of a body at some size."""
    return simulate(order_problem(body, workspace_bytes, round_to=round_to), range(len(body.nodes)))


def inner_peak_bytes(body: Graph, workspace_bytes: Sequence[int] | None = None, *, round_to: int = 1) -> int:
    """The most that a part takes beside what it is given and where its results go."""
    problem = order_problem(body, workspace_bytes, round_to=round_to)
    return simulate(problem, range(len(body.nodes))).peak_bytes - problem.resident_bytes


def workspaces_within(nodes: Sequence[Node], *, round_to: int = 1) -> tuple[int, ...]:
    """By node: what its body takes; 0 for one that has none, and is no collective. The operators' own workspaces are not known."""

    of_collectives = collective_bytes(nodes)

    def within(node: Node) -> int:
        if is_region(node):
            return Region.of(node).workspace_bytes
        if not is_loop(node):
            return of_collectives.get(node, 0)
        parts = (inner_peak_bytes(body, workspaces_within(body.nodes, round_to=round_to), round_to=round_to) for body in bodies(node))
        return max(parts, default=0)

    return tuple(map(within, nodes))
