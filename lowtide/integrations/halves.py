"""A plan for forward and backward pass together, as two programs: what the second needs of the first is saved between them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace

from lowtide.cost.memory import order_problem, simulate
from lowtide.errors import CheckError
from lowtide.ir.graph import Graph, Node, Value
from lowtide.ir.operators.nodes import is_view
from lowtide.plan.contents import Decision
from lowtide.rewrite.base import replace_nodes


@dataclass(frozen=True, eq=False)
class Half:
    """One of the two: what runs, in its order."""

    graph: Graph
    order: tuple[int, ...]
    reuses: tuple[int, ...]


def forward_first(graph: Graph, results: Collection[Value], tangents: Collection[Value]) -> Graph:
    """The same graph in which no node reads a tangent before all results of the forward pass are there; views cost nothing, and may.

    What the forward pass makes may be saved, and read by a second backward pass: nothing works in its memory.
    """
    wanted, given = {value.storage for value in results}, {value.storage for value in tangents}
    makers = tuple(node for node in graph.nodes if not is_view(node) and any(value.storage in wanted for value in node.results))
    behind = _behind(graph.nodes, set(tangents))
    own = {value.storage for node in behind for value in node.results} - given
    instead: dict[Node, tuple[Node, ...]] = {}
    for node in graph.nodes:
        inplace = tuple(each for each in node.inplace if node in behind and each[0].storage in own)
        starts = not is_view(node) and any(value.storage in given for value in node.inputs)
        if starts or inplace != node.inplace:
            instead[node] = (replace(node, inplace=inplace, after=(*node.after, *makers) if starts else node.after),)
    return replace_nodes(graph, instead).graph


def halves(plan: Decision, results: Sequence[Value], tangents: Collection[Value], gradients: Sequence[Value]) -> tuple[Half, Half]:
    """The program of the forward pass and that of the backward pass, in a plan whose graph has the forward pass first.

    The first gives `results` and then what is saved, the second takes what is saved and then those tangents that it reads, and gives
    `gradients`. What was saved is let go of after its last use.
    """
    nodes = [plan.graph.nodes[index] for index in plan.order]
    behind = _behind(nodes, set(tangents))
    needed = _needed(nodes, set(results))
    last = max((position for position, node in enumerate(nodes) if node in needed and not is_view(node)), default=-1)
    if any(node in behind and not is_view(node) for node in nodes[:last]):
        raise CheckError("expected all of the forward pass before the first node that reads a tangent")
    early = needed | {node for node in nodes[: last + 1] if node not in behind}  # views lie where the order has put them
    first, second = [node for node in nodes if node in early], [node for node in nodes if node not in early]
    made = {value for node in first for value in node.results} | set(plan.graph.inputs) - set(tangents)
    read = dict.fromkeys(value for node in second for value in node.inputs)
    saved = tuple(value for value in dict.fromkeys((*read, *gradients)) if value in made)
    forward = Graph(tuple(each for each in plan.graph.inputs if each not in tangents), tuple(first), (*results, *saved))
    backward = Graph((*saved, *(each for each in plan.graph.inputs if each in tangents)), _within(second), tuple(gradients))
    return _half(forward), _half(backward)


def _behind(nodes: Sequence[Node], tangents: set[Value]) -> set[Node]:
    known, found = set(tangents), set()
    for node in nodes:
        if any(value in known for value in node.inputs):
            known.update(node.results)
            found.add(node)
    return found


def _needed(nodes: Sequence[Node], wanted: set[Value]) -> set[Node]:
    known, found = set(wanted), set()
    for node in reversed(nodes):
        if any(value in known for value in node.results):
            known.update(node.inputs)
            found.add(node)
    return found


def _within(nodes: Sequence[Node]) -> tuple[Node, ...]:
    """The nodes without control edges to those that have run by then."""
    here = set(nodes)
    outside = [node for node in nodes if any(before not in here for before in node.after)]
    bare = {node: (replace(node, after=tuple(before for before in node.after if before in here)),) for node in outside}
    return replace_nodes(Graph((), tuple(nodes), ()), bare).graph.nodes


def _half(graph: Graph) -> Half:
    order = tuple(range(len(graph.nodes)))
    return Half(graph, order, tuple(simulate(order_problem(graph), order).reuses.tolist()))
