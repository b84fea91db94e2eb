"""What is one dimension through a whole graph: the dimension graph of MAGIS (section 4.1) and its connected components.

A node of it is a dimension of a value; operators tie together what each of their axes runs through. So the batch of a training step is one
component, from the inputs to the gradients of the weights, which are summed over it; what a batch and its tokens were merged into belongs
to it, too, since a reshape is cut along the outermost of the merged. Time and memory are linear in the graph.

Axes along what is innermost in a merged dimension: the batch, where tokens and batch were merged, in this order, into rows.

`nn.MultiheadAttention` computes with [tokens, batch, features], of which linear layers make [tokens x batch, features] and back. The batch
runs through all of that, but as no run of rows: a part of it is some rows in every `batch` of them. Within a loop nothing lies apart, as
what a part makes is its own tensor, of [tokens x part, features]. So an operator that takes row by row can be cut there as well as
elsewhere, if both ends are cut where rows are apart: a slice of what lies merged outside of a set is none that a view could be.

Reshapes begin it, where several dimensions become one, and operators pass it on along the axes that have a unit for each row.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lowtide.base.graphs import connected
from lowtide.ir.graph import Graph, Node, Value
from lowtide.ir.operators.axes import Axis, Reduced, cut_by, innermost, is_innermost
from lowtide.ir.operators.nodes import axes_of
from lowtide.ir.operators.views import groups
from lowtide.ir.sizes import Size

Axes = tuple[Axis, ...]
_Rows = tuple[Value, int]  # a value, and a dimension of it that others were merged into


def with_inner(graph: Graph, axes: Sequence[Axes]) -> tuple[Axes, ...]:
    """By node, its axes and those along what is innermost in a merged dimension."""
    begun = [tuple(_begun(node)) for node in graph.nodes]
    inner = _passed_on(graph, axes, {rows: axis.extent for each in begun for axis, rows in each})
    return tuple(
        (*mine, *(axis for axis, rows in ends if inner[rows] == axis.extent), *_inner_axes(node, mine, inner))
        for node, mine, ends in zip(graph.nodes, axes, begun, strict=True)
    )


def _begun(node: Node) -> Iterator[tuple[Axis, _Rows]]:
    """The axes of a reshape along the last of several dimensions that are one on the other side, and that one."""
    if node.op.rpartition(".")[0] not in ("aten.view", "aten._unsafe_view", "aten.reshape"):
        return
    value, result = node.args[0], node.outputs[0]
    if not isinstance(value, Value) or result is None or value.dtype != result.dtype:
        return
    for before, after in groups(value.shape, result.shape):
        if len(before) > 1 and len(after) == 1 and after[0] < len(result.shape) - 1:
            yield _end(node, value.shape[before[-1]], before[-1], innermost(after[0]), after[0]), (result, after[0])
        elif len(before) == 1 and len(after) > 1 and before[0] < len(value.shape) - 1:
            yield _end(node, result.shape[after[-1]], innermost(before[0]), after[-1], after[-1]), (value, before[0])


def _end(node: Node, extent: Size, before: int, after: int, size: int) -> Axis:
    return Axis(extent, (((0,), before),), (after,), ((1, size),) if isinstance(node.args[1], tuple) and node.args[1][size] != -1 else ())


def _passed_on(graph: Graph, axes: Sequence[Axes], begun: Mapping[_Rows, Size]) -> dict[_Rows, Size]:
    """By merged dimension how many units are innermost in it, as far as operators pass it on; one of them where two differ."""
    beside: dict[_Rows, list[Sequence[_Rows]]] = {}
    for node, mine in zip(graph.nodes, axes, strict=True):
        for axis in mine:
            if _by_rows(node, axis):
                rows = tuple(cut_by(node, axis))
                for each in rows:
                    beside.setdefault(each, []).append(rows)
    passed, due = dict(begun), list(begun)
    while due:
        each = due.pop()
        for other in (other for rows in beside.get(each, ()) for other in rows if other not in passed):
            passed[other] = passed[each]
            due.append(other)
    return passed


def _inner_axes(node: Node, axes: Axes, inner: Mapping[_Rows, Size]) -> Iterator[Axis]:
    """The axes of an operator that takes row by row, along what is innermost in the rows."""
    for axis in axes:
        extents = {inner.get(rows) for rows in cut_by(node, axis)} if _by_rows(node, axis) else {None}
        if len(extents) == 1 and (extent := extents.pop()) is not None:
            sliced = tuple((path, innermost(dim)) for path, dim in axis.sliced)
            results = tuple(role if isinstance(role, Reduced) else innermost(role) for role in axis.results)
            yield Axis(extent, sliced, results, axis.sizes)


def _by_rows(node: Node, axis: Axis) -> bool:
    """Whether an axis has a unit for each row of all that it cuts."""
    return not axis.instead and all(not is_innermost(dim) and value.shape[dim] == axis.extent for value, dim in cut_by(node, axis))


@dataclass(frozen=True, eq=False)
class DimensionGraph:
    """The dimension graph of a graph. Parts have numbers from 0, in the order in which the graph meets them."""

    graph: Graph
    axes: tuple[tuple[Axis, ...], ...]  # by node
    axis_components: tuple[tuple[int, ...], ...]  # by node, by axis: the component that it belongs to
    first: Mapping[Value, int]  # where the dimensions of a value begin among all
    component_of: tuple[int, ...]
    count: int  # of components

    @classmethod
    def of(cls, graph: Graph) -> DimensionGraph:
        """The dimensions of a graph; bodies are not looked into."""
        first = _numbered(graph)
        axes = with_inner(graph, tuple(axes_of(node) for node in graph.nodes))
        cuts = tuple(tuple(tuple(cut_by(node, axis)) for axis in mine) for node, mine in zip(graph.nodes, axes, strict=True))
        number = _DimensionNumbers(first, sum(len(value.shape) for value in first))
        joined = [[number.of(value, dim) for value, dim in cut] for mine in cuts for cut in mine]
        for before, after in (pair for node in graph.nodes for pair in node.writes):
            joined += ([first[before] + dim, first[after] + dim] for dim in range(len(before.shape)))
        component_of = connected(number.count, joined)
        components = tuple(tuple(component_of[number.of(*next(iter(cut)))] for cut in mine) for mine in cuts)
        return cls(graph, axes, components, first, tuple(component_of), len(set(component_of)))

    def component(self, value: Value, dim: int) -> int:
        """The component that a dimension of a value belongs to."""
        return self.component_of[self.first[value] + dim % len(value.shape)]

    def nodes_by_component(self) -> list[list[int]]:
        """By component, the places of the nodes that it runs through, in program order."""
        nodes: list[list[int]] = [[] for _ in range(self.count)]
        for index, components in enumerate(self.axis_components):
            for component in dict.fromkeys(components):
                nodes[component].append(index)
        return nodes


def _numbered(graph: Graph) -> dict[Value, int]:
    """Every value, and the number of its first dimension."""
    first: dict[Value, int] = {}
    count = 0
    for value in _values(graph):
        if value not in first:
            first[value] = count
            count += len(value.shape)
    return first


def _values(graph: Graph) -> Iterator[Value]:
    yield from graph.inputs
    for node in graph.nodes:
        yield from node.inputs
        yield from (before for before, _ in node.writes)
        yield from node.results


@dataclass
class _DimensionNumbers:
    """Numbers of dimensions, and of what is innermost in some of them, as they are met."""

    first: Mapping[Value, int]
    count: int
    inner: dict[tuple[Value, int], int] = field(default_factory=dict)

    def of(self, value: Value, dim: int) -> int:
        """The number of where an axis cuts a value."""
        if not is_innermost(dim):
            return self.first[value] + dim
        if (value, dim) not in self.inner:
            self.inner[value, dim] = self.count
            self.count += 1
        return self.inner[value, dim]
