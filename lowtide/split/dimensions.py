"""What is one dimension through a whole graph (the dimension graph of MAGIS, section 4.1), its components and what they are called.

A node of it is a dimension of a value; operators tie together what each of their axes runs through. So the batch of a training step is one
component, from the inputs to the gradients of the weights, which are summed over it; what a batch and its tokens were merged into belongs
to it, too, since a reshape is cut along the outermost of the merged. Time and memory are linear in the graph.

Axes along what is innermost in a merged dimension: the batch, where tokens and batch were merged, in this order, into rows.

`nn.MultiheadAttention` computes with [tokens, batch, features], of which linear layers make [tokens x batch, features] and back. The batch
runs through all of that, but as no run of rows: a part of it is some rows in every `batch` of them. Within a loop nothing lies apart, as
what a part makes is its own tensor, of [tokens x part, features]. So an operator that takes row by row can be cut there as well as
elsewhere, if both ends are cut where rows are apart: a slice of what lies merged outside of a set is none that a view could be.

Reshapes begin it, where several dimensions become one, and operators pass it on along the axes that have a unit for each row.

A table has the components. One is named by the strongest of its signs: a named dimension of the example's
shapes; its place in the batch ("batch", "tokens", "channels", "height", "width"); heads of an attention, classes of a loss; channels of a
convolution. One without signs is called after what it was before an operator that closed it, or after the place in the batch of the same
extent, unless a parameter has it; else "features". To the name comes the module within which all of it lies, by which components that
repeated blocks have alike make one line.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from lowtide.base.messages import bytes_text
from lowtide.ir.edges import connected
from lowtide.ir.graph import Graph, Kind, Node, Storage, Value
from lowtide.ir.operators.axes import Axis, Reduced, cut_by, innermost, is_innermost
from lowtide.ir.operators.nodes import axes_of, row_of
from lowtide.ir.operators.views import groups
from lowtide.ir.sizes import Size
from lowtide.plan.summary import pattern

Axes = tuple[Axis, ...]
_Rows = tuple[Value, int]  # a value, and a dimension of it that others were merged into
_BY_RANK = {  # places in the batch, by the rank of what is given; whole numbers are tokens
    "whole": ("batch", "tokens"),
    1: ("batch",),
    2: ("batch", "features"),
    3: ("batch", "tokens", "features"),
    4: ("batch", "channels", "height", "width"),
    5: ("batch", "channels", "depth", "height", "width"),
}
_STRENGTH = ("batch", "tokens", "height", "width", "depth", "heads", "classes", "channels", "features")


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
        return self.component_of[self.first[value] + dim % len(value.shape)]

    def nodes_by_component(self) -> list[list[int]]:
        """By component, the places of the nodes that it runs through, in program order."""
        nodes: list[list[int]] = [[] for _ in range(self.count)]
        for index, components in enumerate(self.axis_components):
            for component in dict.fromkeys(components):
                nodes[component].append(index)
        return nodes


def _numbered(graph: Graph) -> dict[Value, int]:
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


@dataclass(frozen=True)
class AlikeParts:
    name: str  # "heads of h.*.attn"
    components: tuple[int, ...]
    least: Size  # extent along it
    most: Size
    made_bytes: int  # of the storages that are made in parts along it


@dataclass(frozen=True)
class ComponentTable:
    """The components of a dimension graph, those that make the most bytes first."""

    lines: tuple[AlikeParts, ...]

    @classmethod
    def of(cls, dimensions: DimensionGraph) -> ComponentTable:
        facts = _facts(dimensions)
        names = _named(dimensions, facts)
        groups: defaultdict[str, list[int]] = defaultdict(list)
        for component, name in names.items():
            groups[name].append(component)
        lines = [_line(name, components, [facts[component] for component in components]) for name, components in groups.items()]
        return cls(tuple(sorted(lines, key=lambda line: -line.made_bytes)))

    def short(self, most: int = 4) -> str:
        """The largest in a line: "batch (2 to 512; 1.20 GiB), ..."."""
        texts = [f"{line.name} ({_extent(line)}; {bytes_text(line.made_bytes)})" for line in self.lines[:most]]
        return ", ".join(texts)


def _extent(line: AlikeParts) -> str:
    return f"{line.least}" if line.least == line.most else f"{line.least} to {line.most}"


@dataclass(eq=False)
class _Facts:
    least: Size = 0
    most: Size = 0
    module: list[str] | None = None  # the path that all operators share so far
    signs: set[str] = field(default_factory=set)
    storages: dict[Storage, None] = field(default_factory=dict)

    def meet(self, node: Node, axis: Axis) -> None:
        path = node.source.module.split(".") if node.source is not None and node.source.module else []
        self.module = path if self.module is None else _shared(self.module, path)
        taken = {value.storage for value in node.inputs}
        storages = (value.storage for value, role in zip(node.results, axis.results, strict=True) if isinstance(role, int))
        self.storages |= dict.fromkeys(storage for storage in storages if storage not in taken)

    def extend(self, extent: Size) -> None:
        """One more extent; expressions are kept where there is no number yet."""
        if isinstance(extent, int) and isinstance(self.least, int) and isinstance(self.most, int) and self.most:
            self.least, self.most = min(self.least, extent), max(self.most, extent)
        elif not self.most:
            self.least = self.most = extent


def _facts(dimensions: DimensionGraph) -> dict[int, _Facts]:
    """By component, those along which some operator can run."""
    facts: defaultdict[int, _Facts] = defaultdict(_Facts)
    for node, axes, components in zip(dimensions.graph.nodes, dimensions.axes, dimensions.axis_components, strict=True):
        for axis, component in zip(axes, components, strict=True):
            facts[component].meet(node, axis)
    for value, first in dimensions.first.items():
        for dim, extent in enumerate(value.shape):
            component = dimensions.component_of[first + dim]
            if component in facts:
                facts[component].extend(extent)
    for component, sign in _signs(dimensions):
        if component in facts:
            facts[component].signs.add(sign)
    for one, two in _kept(dimensions):
        if one in facts and two in facts and not facts[two].signs:
            facts[two].signs |= facts[one].signs
    _called_by_extent(dimensions, facts)
    return facts


def _called_by_extent(dimensions: DimensionGraph, facts_of: dict[int, _Facts]) -> None:
    """Names components that nothing else tells, and that no parameter has, by the batch's extents."""
    parameters = (value for value in dimensions.graph.inputs if value.storage.kind is Kind.PARAMETER)
    taken = {dimensions.component(value, dim) for value in parameters for dim in range(len(value.shape))}
    places: dict[Size, str] = {}
    for value, dim, place in _batch_places(dimensions.graph):
        places.setdefault(value.shape[dim], place)
    for component, facts in facts_of.items():
        if not facts.signs and component not in taken and facts.least == facts.most and facts.least in places:
            facts.signs.add(places[facts.least])


def _signs(dimensions: DimensionGraph) -> Iterator[tuple[int, str]]:
    """What tells the name of a component."""
    symbols = {dimension.symbol: dimension.name for dimension in dimensions.graph.dimensions}
    for value, dim, place in _batch_places(dimensions.graph):
        yield dimensions.component(value, dim), symbols.get(value.shape[dim], place)
    for node in dimensions.graph.nodes:
        tensor = next((arg for arg in node.args if isinstance(arg, Value)), None)
        if tensor is None:
            continue
        if "attention" in node.op or ("softmax." in node.op and len(tensor.shape) == 4):
            yield dimensions.component(tensor, 1), "heads"
        elif node.op.startswith("aten.nll_loss_forward.") and len(tensor.shape) == 2:
            yield dimensions.component(tensor, 1), "classes"
        elif node.op.startswith("aten.convolution.") and len(tensor.shape) > 2:
            yield dimensions.component(tensor, 1), "channels"


def _kept(dimensions: DimensionGraph) -> Iterator[tuple[int, int]]:
    """Parts that are one dimension for people, before and after an operator that is closed along it, in program order."""
    for node, axes in zip(dimensions.graph.nodes, dimensions.axes, strict=True):
        before = node.args[0] if node.args else None
        if not isinstance(before, Value) or row_of(node.op).view or row_of(node.op).untouched:
            continue
        cut = {dim for axis in axes for value, dim in cut_by(node, axis) if value is before}
        for after in node.outputs:
            if after is not None and len(after.shape) == len(before.shape):
                closed = (dim for dim in range(len(after.shape)) if dim not in cut)
                yield from ((dimensions.component(before, dim), dimensions.component(after, dim)) for dim in closed)


def _batch_places(graph: Graph) -> Iterator[tuple[Value, int, str]]:
    for value in graph.inputs:
        if value.storage.kind is Kind.INPUT:
            yield from ((value, dim, place) for dim, place in zip(range(len(value.shape)), _places(value), strict=False))


def _places(value: Value) -> Sequence[str]:
    rank = len(value.shape)
    return _BY_RANK["whole"] if value.dtype in ("int64", "int32") and rank <= 2 else _BY_RANK.get(rank, ())


def _named(dimensions: DimensionGraph, facts: dict[int, _Facts]) -> dict[int, str]:
    known = {dimension.name for dimension in dimensions.graph.dimensions}
    names: dict[int, str] = {}
    for component, mine in facts.items():
        own = sorted(mine.signs & known)
        sign = own[0] if own else next((each for each in _STRENGTH if each in mine.signs), "features")
        module = pattern(".".join(mine.module or ()))
        names[component] = f"{sign} of {module}" if module else sign
    return names


def _shared(one: list[str], two: list[str]) -> list[str]:
    count = next((at for at, (mine, theirs) in enumerate(zip(one, two, strict=False)) if mine != theirs), min(len(one), len(two)))
    return one[:count]


def _line(name: str, components: list[int], facts: list[_Facts]) -> AlikeParts:
    storages = {storage for each in facts for storage in each.storages}
    least, most = facts[0].least, facts[0].most
    for each in facts[1:]:
        if all(isinstance(size, int) for size in (least, most, each.least, each.most)):
            least, most = min(least, each.least), max(most, each.most)
    return AlikeParts(
        name,
        tuple(components),
        least,
        most,
        sum(storage.nbytes for storage in storages if isinstance(storage.nbytes, int)),
    )
