"""What is one dimension through a whole graph: the dimension graph of MAGIS (section 4.1) and its connected components.

A node of it is a dimension of a value; operators tie together what each of their axes runs through. So the batch of a training step is one
component, from the inputs to the gradients of the weights, which are summed over it; what a batch and its tokens were merged into belongs
to it, too, since a reshape is cut along the outermost of the merged. Time and memory are linear in the graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from lowtide.fission.inner import with_inner
from lowtide.ir.graph import Graph, Value
from lowtide.ir.operators.axes.axis import Axis, cut_by, is_innermost
from lowtide.ir.operators.axes.table import axes_of


@dataclass(frozen=True, eq=False)
class Dimensions:
    """The dimension graph of a graph. Parts have numbers from 0, in the order in which the graph meets them."""

    graph: Graph
    axes: tuple[tuple[Axis, ...], ...]  # by node
    axis_components: tuple[tuple[int, ...], ...]  # by node, by axis: the component that it belongs to
    first: Mapping[Value, int]  # where the dimensions of a value begin in `part_of`
    component_of: tuple[int, ...]
    count: int  # of components

    @classmethod
    def of(cls, graph: Graph) -> Dimensions:
        """The dimensions of a graph; bodies are not looked into."""
        first = _numbered(graph)
        axes = with_inner(graph, tuple(axes_of(node) for node in graph.nodes))
        cuts = tuple(tuple(tuple(cut_by(node, axis)) for axis in mine) for node, mine in zip(graph.nodes, axes, strict=True))
        number = _DimensionNumbers(first, sum(len(value.shape) for value in first))
        joined = [[number.of(value, dim) for value, dim in cut] for mine in cuts for cut in mine]
        for before, after in (pair for node in graph.nodes for pair in node.writes):
            joined += ([first[before] + dim, first[after] + dim] for dim in range(len(before.shape)))
        sets = _Sets(number.count)
        for numbers in joined:
            sets.join(numbers)
        component_of, count = sets.numbered()
        components = tuple(tuple(component_of[number.of(*next(iter(cut)))] for cut in mine) for mine in cuts)
        return cls(graph, axes, components, first, component_of, count)

    def component(self, value: Value, dim: int) -> int:
        """The component that a dimension of a value belongs to."""
        return self.component_of[self.first[value] + dim % len(value.shape)]

    def nodes_by_component(self) -> list[list[int]]:
        """By component, the places of the nodes that it runs through, in program order."""
        found: list[list[int]] = [[] for _ in range(self.count)]
        for index, components in enumerate(self.axis_components):
            for component in dict.fromkeys(components):
                found[component].append(index)
        return found


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


class _Sets:
    """Disjoint sets of numbers."""

    def __init__(self, count: int) -> None:
        self._leader = list(range(count))

    def join(self, numbers: list[int]) -> None:
        leaders = [self._find(number) for number in numbers]
        for other in leaders[1:]:
            if leaders[0] != other:
                self._leader[max(leaders[0], other)] = min(leaders[0], other)
                leaders[0] = min(leaders[0], other)

    def _find(self, number: int) -> int:
        leader = self._leader
        while leader[number] != number:
            leader[number] = leader[leader[number]]
            number = leader[number]
        return number

    def numbered(self) -> tuple[tuple[int, ...], int]:
        """The number of its set for each, and how many sets there are."""
        names: dict[int, int] = {}
        found = tuple(names.setdefault(self._find(number), len(names)) for number in range(len(self._leader)))
        return found, len(names)
