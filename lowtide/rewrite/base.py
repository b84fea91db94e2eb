"""What every rewrite returns, and putting new nodes in the places of old ones."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from lowtide.ir.graph import Graph, Node

Forward = Mapping[Node, tuple[Node, ...]]  # what became of each node of the old graph that is not in the new one as it was


@dataclass(frozen=True)
class Rewritten:
    """The new graph, which shares all that the rewrite did not touch, and what became of the rest."""

    graph: Graph
    forward: Forward


def replace_nodes(graph: Graph, instead: Forward) -> Rewritten:
    """Put new nodes in the places of old ones, which make the same values, so that readers stay as they are; control edges follow."""
    forward: dict[Node, tuple[Node, ...]] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        new = tuple(following(candidate, forward) for candidate in instead.get(node, (node,)))
        if new != (node,):
            forward[node] = new
        nodes.extend(new)
    return Rewritten(replace(graph, nodes=tuple(nodes)), forward)


def following(node: Node, forward: Forward) -> Node:
    """The node with its control edges at what their ends became."""
    if not any(before in forward for before in node.after):
        return node
    after = tuple(new for before in node.after for new in forward.get(before, (before,)))
    return replace(node, after=after)
