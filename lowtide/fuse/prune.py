"""Results that nobody reads, such as a norm's saved statistics, are none: then kernels need not make them."""

from __future__ import annotations

from dataclasses import replace

from lowtide.ir.graph import Graph, Node


def pruned(graph: Graph) -> Graph:
    """The graph without results that nobody reads; a node that nobody reads anything of stays as it is."""
    read = {value for node in graph.nodes for value in node.inputs} | set(graph.outputs)
    new: dict[Node, Node] = {}
    for node in graph.nodes:
        outputs = tuple(value if value in read else None for value in node.outputs)
        wanted = node if outputs == node.outputs or not any(outputs) else replace(node, outputs=outputs)
        if any(before in new for before in wanted.after):
            wanted = replace(wanted, after=tuple(new.get(before, before) for before in wanted.after))
        if wanted is not node:
            new[node] = wanted
    return replace(graph, nodes=tuple(new.get(node, node) for node in graph.nodes))
