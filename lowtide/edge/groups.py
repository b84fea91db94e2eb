"""Quantised operators as a device computes them: with what makes integers of their results, and never a float in memory.

A file in QDQ form has floats between integers: DequantizeLinear, an operator, perhaps an activation, QuantizeLinear. A device has one
kernel for all of it. So has it for an operator and the RequantShift behind it. Each such group becomes one node that holds its members as a
network of its own (`attributes["body"]`); its inputs are what they read from outside.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np

from lowtide.edge.graph import EdgeGraph, EdgeNode
from lowtide.edge.operators import IN_PLACE, VIEWS

DOMAIN = "lowtide.group"
_OPENS = "DequantizeLinear"
_CLOSES = frozenset({"QuantizeLinear", "RequantShift"})


def grouped(graph: EdgeGraph) -> EdgeGraph:
    """The network with its groups as nodes. What comes between two operators of a group must be read by nobody else."""
    search = _Search(graph)
    groups = {last: members for last in range(len(graph.nodes)) if (members := search.group(last))}
    inner = {at for last, members in groups.items() for at in members if at != last and graph.nodes[at].kind != _OPENS}
    nodes: list[EdgeNode] = []
    wanted = set(graph.outputs)
    for at in reversed(range(len(graph.nodes))):
        node = _group_node(graph, groups[at]) if at in groups else graph.nodes[at]
        if at not in inner and not wanted.isdisjoint(node.outputs):  # a DequantizeLinear goes once all its readers have one of their own
            nodes.append(node)
            wanted.update(node.inputs)
    return renumbered(graph, nodes[::-1])


class _Search:
    """Who makes and who reads each tensor."""

    def __init__(self, graph: EdgeGraph) -> None:
        self.graph = graph
        self.maker = {tensor: at for at, node in enumerate(graph.nodes) for tensor in node.outputs}
        self.readers = dict.fromkeys(range(len(graph.tensors)), 0)
        for tensor in (*graph.outputs, *(tensor for node in graph.nodes for tensor in {*node.inputs} if tensor >= 0)):
            self.readers[tensor] += 1

    def group(self, last: int) -> tuple[int, ...]:
        """The members of the group that a node closes, in order; none where it closes none."""
        nodes = self.graph.nodes
        if nodes[last].kind not in _CLOSES:
            return ()
        core = self._before(last)
        members = [last]
        while core is not None and _is_activation(nodes[core]):
            members.append(core)
            core = self._before(core)
        if core is None or nodes[core].kind in _CLOSES or sum(bool(self.graph.tensors[at].dtype) for at in nodes[core].outputs) != 1:
            return ()
        members.append(core)
        read = {at for member in members for at in nodes[member].inputs if at >= 0}
        results = {at for member in members for at in nodes[member].outputs}
        opening = {self.maker[at] for at in read - results if at in self.maker and nodes[self.maker[at]].kind == _OPENS}
        floats = {at for at in read - results if not self.graph.tensors[at].constant and self.maker.get(at) not in opening}
        if nodes[last].kind == "QuantizeLinear" and nodes[core].kind != _OPENS and (floats or not opening):
            return ()
        return tuple(sorted({*members, *opening}))

    def _before(self, at: int) -> int | None:
        """The node whose result is a node's first input, where nobody else reads it."""
        tensor = self.graph.nodes[at].inputs[0]
        return self.maker.get(tensor) if self.readers[tensor] == 1 else None


def _is_activation(node: EdgeNode) -> bool:
    return node.domain == "" and IN_PLACE.get(node.kind) == (0,) and node.kind not in {*_CLOSES, _OPENS, "Cast", "RequantShift"}


def _group_node(graph: EdgeGraph, members: Sequence[int]) -> EdgeNode:
    nodes = [graph.nodes[at] for at in members]
    results = {tensor for node in nodes for tensor in node.outputs}
    inputs = tuple(dict.fromkeys(at for node in nodes for at in node.inputs if at >= 0 and at not in results))
    last = nodes[-1]
    body = renumbered(
        replace(graph, name=last.name, inputs=tuple(at for at in inputs if not graph.tensors[at].constant), outputs=last.outputs), nodes
    )
    kinds = [node.kind for node in nodes if node.kind != _OPENS] or [_OPENS]
    core = next((node for node in nodes if node.kind != _OPENS), nodes[0])
    output = graph.tensors[last.outputs[0]]
    alike = tuple(
        (0, position)
        for position, at in enumerate(inputs)
        if (tensor := graph.tensors[at]).size_bytes == output.size_bytes and not tensor.constant
    )
    is_view = core.kind in VIEWS and len(kinds) == 2 and len(alike) == 1 and _scales_alike(graph, nodes)
    by_number = all(node.kind in IN_PLACE for node in nodes)
    same_shape = tuple(pair for pair in alike if graph.tensors[inputs[pair[1]]].shape == output.shape)
    return EdgeNode(
        name=last.name,
        kind="+".join(kinds),
        domain=DOMAIN,
        inputs=inputs,
        outputs=last.outputs,
        attributes={"body": body},
        macs=sum(node.macs for node in nodes),
        views=alike if is_view else (),
        in_place=same_shape if by_number else (),
    )


def _scales_alike(graph: EdgeGraph, nodes: Sequence[EdgeNode]) -> bool:
    """Whether what closes a group undoes what opens it: the same integers by the same constants, none along an axis.

    Of another dtype the numbers are cut off where that ends: uint8 200 becomes int8 127.
    """
    first, last = nodes[0], nodes[-1]
    if graph.tensors[first.inputs[0]].dtype != graph.tensors[last.outputs[0]].dtype:
        return False
    if len(nodes) != 3 or first.kind != _OPENS or last.kind != "QuantizeLinear" or len(first.inputs) != len(last.inputs):
        return False
    return all(
        one in graph.constants
        and other in graph.constants
        and np.size(graph.constants[one]) == 1
        and np.array_equal(graph.constants[one], graph.constants[other])
        and graph.tensors[one].dtype == graph.tensors[other].dtype
        for one, other in zip(first.inputs[1:], last.inputs[1:], strict=True)
    )


def renumbered(graph: EdgeGraph, nodes: Iterable[EdgeNode]) -> EdgeGraph:
    """The graph with these nodes, and the tensors that they leave in it."""
    nodes = tuple(nodes)
    used = {*graph.inputs, *graph.outputs, *(at for node in nodes for at in (*node.inputs, *node.outputs) if at >= 0)}
    number = {at: new for new, at in enumerate(sorted(used))} | {-1: -1}
    return replace(
        graph,
        tensors=tuple(graph.tensors[at] for at in sorted(used)),
        nodes=tuple(
            replace(node, inputs=tuple(number[at] for at in node.inputs), outputs=tuple(number[at] for at in node.outputs))
            for node in nodes
        ),
        inputs=tuple(number[at] for at in graph.inputs),
        outputs=tuple(number[at] for at in graph.outputs),
        constants={number[at]: array for at, array in graph.constants.items() if at in number},
    )
