"""Sets around a large tensor that can run part by part: what makes it, what reads it, and what is as large along the same dimension.

From the tensor a set grows over all tensors that are cut with it and have a given share of its bytes: the nodes that make or read one of
them are in it, as far as the dimension runs through them. So what stays whole at the borders is small, but for what has no such dimension.
Then what cannot be in it leaves: nodes that read the whole of what is cut, or what parts put together; and nodes that come after one that
is not in the set and itself after the set. What lies between two of the set joins it, if the dimension runs through that.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from math import prod

from lowtide.errors import CheckError
from lowtide.ir.edges import predecessors
from lowtide.ir.graph import Graph, Node, Value
from lowtide.ir.operators.axes.axis import Axis, Reduced
from lowtide.ir.operators.axes.table import axes_of
from lowtide.ir.operators.nodes import is_random
from lowtide.ir.operators.table import row_of
from lowtide.ir.sizes import ITEM_BYTES
from lowtide.rewrite.fission.along import cut_by
from lowtide.rewrite.fission.roles import Split


@dataclass(eq=False)
class Dimensions:
    """A graph, and along what its nodes can be cut: looked up once."""

    graph: Graph
    _axes: dict[Node, tuple[Axis, ...]] = field(default_factory=dict)

    @cached_property
    def before(self) -> tuple[tuple[int, ...], ...]:
        """By node, the places of those that come before it."""
        return predecessors(self.graph)

    @cached_property
    def place(self) -> dict[Node, int]:
        """In program order."""
        return {node: index for index, node in enumerate(self.graph.nodes)}

    @cached_property
    def made(self) -> frozenset[Value]:
        """What nodes make or write: over the caller's own tensors no set grows, as forward and backward pass both read them."""
        return frozenset(value for node in self.graph.nodes for value in node.results)

    @cached_property
    def touching(self) -> dict[Value, list[Node]]:
        """The nodes that read, make or write each tensor."""
        found: dict[Value, list[Node]] = {}
        for node in self.graph.nodes:
            for value in dict.fromkeys((*node.inputs, *node.results, *(before for before, _ in node.writes))):
                found.setdefault(value, []).append(node)
        return found

    def axes(self, node: Node) -> tuple[Axis, ...]:
        """Along what a node can be cut."""
        if node not in self._axes:
            closed = is_random(node) or row_of(node.op).statistics is not None
            self._axes[node] = () if closed else axes_of(node)
        return self._axes[node]

    def axis(self, node: Node, value: Value, dim: int) -> Axis | None:
        """The axis of a node that runs through a tensor's dimension."""
        return next((axis for axis in self.axes(node) if (value, dim) in set(cut_by(node, axis))), None)


def region(dimensions: Dimensions, value: Value, dim: int, least_bytes: float) -> Split | None:
    """The set around a tensor along one of its dimensions, over tensors of so many bytes; None where nothing is left of it."""
    nodes = _grown(dimensions, value, dim, least_bytes)
    for _ in range(len(nodes) + 8):  # each turn leaves fewer, or closes the set
        nodes = _connected(_consistent(nodes), value)
        between = _between(dimensions, set(nodes))
        if not between:
            break
        dims = dict(pair for node, axis in nodes.items() for pair in cut_by(node, axis))
        joined = {node: axis for node in between if (axis := _joins(dimensions, node, dims)) is not None}
        if len(joined) < len(between):
            worst = min((node for node in between if node not in joined), key=dimensions.place.__getitem__)
            late = _after(dimensions, worst)
            nodes = {node: axis for node, axis in nodes.items() if dimensions.place[node] not in late}
        else:
            nodes |= joined
    if not any(value in node.results or value in node.inputs for node in nodes):
        return None
    return Split({node: nodes[node] for node in sorted(nodes, key=dimensions.place.__getitem__)})


def bytes_of(value: Value) -> int:
    """The bytes of a tensor's elements."""
    return prod(size for size in value.shape if isinstance(size, int)) * ITEM_BYTES[value.dtype]


def _grown(dimensions: Dimensions, value: Value, dim: int, least_bytes: float) -> dict[Node, Axis]:
    """All that the dimension reaches over tensors that are large enough."""
    dims, pending, nodes = {value: dim}, [value], dict[Node, Axis]()
    while pending:
        reached = pending.pop()
        for node in dimensions.touching[reached]:
            axis = None if node in nodes else dimensions.axis(node, reached, dims[reached])
            if axis is None or any(dims.get(other, at) != at for other, at in cut_by(node, axis)):
                continue
            nodes[node] = axis
            for other, at in cut_by(node, axis):
                if other not in dims and other in dimensions.made and bytes_of(other) >= least_bytes:
                    dims[other] = at
                    pending.append(other)
    return nodes


def _joins(dimensions: Dimensions, node: Node, dims: dict[Value, int]) -> Axis | None:
    """The axis along which a node between others can be cut as they are."""
    touched = (*node.inputs, *node.results)
    axes = (axis for each in touched if each in dims and (axis := dimensions.axis(node, each, dims[each])) is not None)
    return next((axis for axis in axes if all(dims.get(other, at) == at for other, at in cut_by(node, axis))), None)


def _consistent(nodes: dict[Node, Axis]) -> dict[Node, Axis]:
    """Without those that read as a whole what others cut, or what parts put together, or that cut along another dimension."""
    while True:
        dims: dict[Value, int] = {}
        merged: set[Value] = set()
        for node, axis in nodes.items():
            merged |= {made for made, role in zip(node.results, axis.results, strict=True) if isinstance(role, Reduced)}
            for each, at in cut_by(node, axis):
                dims.setdefault(each, at)
        kept = {node: axis for node, axis in nodes.items() if _agrees(node, axis, dims, merged)}
        if len(kept) == len(nodes):
            return kept
        nodes = kept


def _agrees(node: Node, axis: Axis, dims: dict[Value, int], merged: set[Value]) -> bool:
    own = dict(cut_by(node, axis))
    reads = (*node.inputs, *(before for before, _ in node.writes))
    return all(dims[each] == at for each, at in own.items()) and not any(
        each in merged or (each in dims and each not in own) for each in reads
    )


def _connected(nodes: dict[Node, Axis], value: Value) -> dict[Node, Axis]:
    """Those of the set that tensors hold together with one."""
    touching: dict[Value, list[Node]] = {}
    for node, axis in nodes.items():
        for each in (*(each for each, _ in cut_by(node, axis)), *node.results):
            touching.setdefault(each, []).append(node)
    found: set[Node] = set()
    pending = list(touching.get(value, ()))
    while pending:
        node = pending.pop()
        if node not in found:
            found.add(node)
            each_of = (*(each for each, _ in cut_by(node, nodes[node])), *node.results)
            pending += [other for each in each_of for other in touching[each]]
    return {node: axis for node, axis in nodes.items() if node in found}


def _between(dimensions: Dimensions, inside: set[Node]) -> list[Node]:
    """The nodes outside of a set that lie on a path from it to it."""
    graph, before = dimensions.graph, dimensions.before
    places = [dimensions.place[node] for node in inside]
    first, last = min(places, default=0), max(places, default=-1)
    after: set[int] = set()
    for index in range(first, last + 1):
        if any(each in after or graph.nodes[each] in inside for each in before[index]):
            after.add(index)
    needed: set[int] = set()
    for index in range(last, first - 1, -1):
        if index in needed or graph.nodes[index] in inside:
            needed.update(before[index])
    return [graph.nodes[index] for index in sorted(after & needed) if graph.nodes[index] not in inside]


def _after(dimensions: Dimensions, node: Node) -> set[int]:
    """The places of all that comes after a node."""
    found = {dimensions.place[node]}
    for index in range(dimensions.place[node] + 1, len(dimensions.graph.nodes)):
        if any(each in found for each in dimensions.before[index]):
            found.add(index)
    return found


def splits_around(dimensions: Dimensions, value: Value, shares: Sequence[float]) -> Iterator[Split]:
    """The sets around a tensor along each of its dimensions, over tensors of at least these shares of its bytes; each once."""
    seen: set[tuple[int, ...]] = set()
    for dim, extent in enumerate(value.shape):
        for share in shares if extent != 1 else ():
            found = region(dimensions, value, dim, share * bytes_of(value))
            if found is None or not found.axes:
                continue
            key = (dim, *(dimensions.place[node] for node in found.nodes))
            try:
                enough = found.extent > 1
            except CheckError:
                enough = False
            if enough and key not in seen:
                seen.add(key)
                yield found
