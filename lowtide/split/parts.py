"""What a split does to each tensor, and the body of its loop: nodes and tensors as they are in a part, whose size is an expression.

A tensor is cut along a dimension, put together from what parts make, or whole in every part. `check_set` says whether a set may be split at
all: what the paper asks for (MAGIS, section 4.2), and what writes and random numbers ask for beyond that.

A storage that is cut is so along one dimension, of which one unit takes so many elements. What steps over all units of it, in strides,
offset and bytes, steps over as many as the part has; what steps within a unit stays. What the loop is given stays laid out as it is; where
that leaves gaps, and an operator is not known to read over them, it is given a copy.

How results of parts come to where the whole result lies: straight, by a copy, or added to what other parts have left there.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from math import gcd
from typing import NoReturn

import sympy

from lowtide.errors import CheckError
from lowtide.ir.edges import connected
from lowtide.ir.graph import Arg, Atom, Graph, Kind, Node, Storage, Value, arguments, values_of
from lowtide.ir.operators.axes import Axis, Combine, Reduced, argument, cut_by, is_innermost, of_tensor, with_arguments
from lowtide.ir.operators.nodes import forms_of, is_arithmetic, is_random, is_transfer, is_view, row_of
from lowtide.ir.operators.row import CLONE, COPY
from lowtide.ir.shapes.dimension import Dimension
from lowtide.ir.sizes import ITEM_BYTES, Size, contiguous_stride, product
from lowtide.rewrite.losses import ROWS, can_add_rows, rows_of

_MERGING = {
    Combine.SUM: "aten.add_.Tensor", Combine.MEAN: "aten.add_.Tensor", Combine.PRODUCT: "aten.mul_.Tensor",
    Combine.MAX: "aten.maximum.out", Combine.MIN: "aten.minimum.out", Combine.ANY: "aten.logical_or_.default",
    Combine.ALL: "aten.logical_and_.default", Combine.SAME: COPY,
}  # fmt: skip


def check_set(wanted: Split, roles: Roles) -> None:
    """Raises CheckError naming a node that is in the way. That the set is convex is seen where its place in the graph is sought."""
    for node in wanted.nodes:
        if is_random(node):
            refuse(node, "nothing that draws random numbers, which would be others")
        if is_transfer(node) or is_arithmetic(node):
            refuse(node, "operators on tensors, got arithmetic on numbers or a copy to the host")
        if row_of(node.op).statistics is not None:
            refuse(node, "no statistics over the batch, which parts do not know")
        if wanted.axes[node] is None and not is_view(node):
            refuse(node, "results that are cut or put together, got some that each part would compute as a whole")
        for before, _ in node.writes:
            if before not in roles.dims:
                refuse(node, f"what is written to be cut, got {before.name}, which parts would share")
    _check_written(wanted, roles)
    _check_connected(wanted, roles)


def _check_written(wanted: Split, roles: Roles) -> None:
    """What the set writes it reads, at whatever version, only as it is written: each part then meets its own elements alone."""
    written: dict[Storage, tuple[Hashable, ...]] = {}
    for node in wanted.nodes:
        for before, _ in node.writes:
            if written.setdefault(before.storage, _look(before, roles)) != _look(before, roles):
                refuse(node, f"every write of {before.storage.name} to be cut alike")
            if any(stride == 0 and extent != 1 for extent, stride in zip(before.shape, before.stride, strict=True)):
                refuse(node, f"{before.name} to hold each element once")
    for node in wanted.nodes:
        for value in (*node.inputs, *node.results):
            if value.storage in written and _look(value, roles) != written[value.storage]:
                refuse(node, f"{value.name} to be read as it is written, since other parts write what lies beside it")


def _look(value: Value, roles: Roles) -> tuple[Hashable, ...]:
    return value.shape, value.stride, value.offset, value.dtype, roles.dims.get(value)


def _check_connected(wanted: Split, roles: Roles) -> None:
    """Whether tensors hold the set together; what is whole and comes from outside holds nothing."""
    holding: dict[Value, list[int]] = {}
    for at, node in enumerate(wanted.nodes):
        for value in (*node.inputs, *node.results):
            if value in roles.dims or value not in roles.whole:
                holding.setdefault(value, []).append(at)
    apart = connected(len(wanted.nodes), holding.values())
    cut = {component: node for component, node in zip(apart, wanted.nodes, strict=True) if wanted.axes[node] is not None}
    if len(cut) > 1:
        refuse(next(iter(cut.values())), "a connected set, got several that have nothing to do with one another")


MERGES = {
    Combine.SUM: "sum", Combine.MEAN: "sum", Combine.MAX: "max", Combine.MIN: "min", Combine.PRODUCT: "product", Combine.ANY: "any",
    Combine.ALL: "all", Combine.SAME: "same",
}  # fmt: skip


@dataclass(frozen=True, eq=False)
class Split:
    """A set of nodes of one graph that is to run part by part, each along one of its axes."""

    axes: Mapping[Node, Axis | None]  # in program order; None for a view of what is whole
    part_name: str = "part"  # of a part's size, within the body

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(self.axes)

    @cached_property
    def read(self) -> frozenset[Value]:
        return frozenset(value for node in self.axes for value in node.inputs)

    @cached_property
    def extent(self) -> int:
        """The units that parts are made of: as many as all its axes have. Raises CheckError where those are no numbers."""
        extents = [axis.extent for axis in self.axes.values() if axis is not None]
        numbers = [extent for extent in extents if isinstance(extent, int)]
        if not numbers or len(numbers) < len(extents):
            raise CheckError("fission: expected axes of which each has so many units: give its dimensions values first")
        return gcd(*numbers)


@dataclass(eq=False)
class Roles:
    dims: dict[Value, int] = field(default_factory=dict)  # of what is cut
    inner: dict[Value, Size] = field(default_factory=dict)  # of these, how many units are innermost in what others were merged into
    merged: dict[Value, Reduced] = field(default_factory=dict)  # of what is put together
    whole: dict[Value, Node] = field(default_factory=dict)  # and a reader of each other one
    nodes: set[Node] = field(default_factory=set)

    @classmethod
    def of(cls, split: Split) -> Roles:
        """Of all that a set reads, makes and writes. Raises CheckError where two of its nodes do not agree."""
        roles = cls()
        for node, axis in split.axes.items():
            roles.nodes.add(node)
            roles._read(node, axis)
            roles._made(node, axis)
        for value, node in roles.whole.items():
            if value in roles.dims:
                refuse(node, f"all to read {value.name} in parts, since some do")
            if value in roles.merged:
                refuse(node, f"that nobody in the set reads {value.name}, which is there only when all parts have run")
        return roles

    def _read(self, node: Node, axis: Axis | None) -> None:
        cut = dict(_sliced(node, axis))
        if axis is not None:
            self.inner |= {value: axis.extent for value, dim in cut_by(node, axis) if is_innermost(dim)}
        for value in (*node.inputs, *(before for before, _ in node.writes)):
            if value in cut:
                self._cut(node, value, cut[value])
            elif value.dtype != "scalar":
                self.whole.setdefault(value, node)

    def _made(self, node: Node, axis: Axis | None) -> None:
        for value, role in zip(node.results, axis.results if axis is not None else (), strict=axis is not None):
            if isinstance(role, int):
                self._cut(node, value, role)
            else:
                self.merged[value] = role

    def _cut(self, node: Node, value: Value, dim: int) -> None:
        if self.dims.setdefault(value, dim) != dim or value in self.merged:
            refuse(node, f"{value.name} to be cut along one dimension, got {self.dims[value]} and {dim}")


def _sliced(node: Node, axis: Axis | None) -> Iterator[tuple[Value, int]]:
    for path, dim in axis.sliced if axis is not None else ():
        value = argument(node, path)
        assert isinstance(value, Value)
        yield value, dim


def refuse(node: Node, expected: str) -> NoReturn:
    """Raises CheckError naming the node."""
    where = f" at {node.source.file}:{node.source.line}" if node.source is not None else ""
    raise CheckError(f"fission, {node.op}{where}: expected {expected}")


def copied(value: Value, place: Value) -> Node:
    return _writing(COPY, (place, value), place)


def straight(node: Node, place: Value, over: Sequence[tuple[Value, str]] = ()) -> tuple[Node, ...]:
    """The node that makes its result in its place, by a kernel that gives the same numbers; none where there is none.

    `over` is what lies as the place does and may be read while it is written there, and by which kernels.
    """
    elementwise = next((overload for _, overload in (*node.inplace, *over) if overload.endswith(".out")), None)
    if row_of(node.op).in_memory_of:  # a kernel that looks at no strides: its place may have gaps
        elementwise = None
    op = forms_of(node.op).out or elementwise
    if op is None or len(node.outputs) != 1:
        return ()
    written = _writing(op, node.args, place, (*node.kwargs, ("out", place)), node)
    return (replace(written, inplace=tuple(each for each in over if each[1] == elementwise == op)),)


def merged(value: Value, place: Value, combine: Combine, part: Arg) -> Node:
    """What puts a part's result together with those before it; a mean is weighed by the part's size, and divided in the end."""
    op = _MERGING[combine]
    if op.endswith(".out"):
        return _writing(op, (place, value), place, (("out", place),))
    return _writing(op, (place, value), place, (("alpha", part),) if combine is Combine.MEAN else ())


def adding(node: Node, place: Value, combine: Combine) -> tuple[Node, ...]:
    """The nodes that add its result to what lies there, without making it; none where there are none."""
    if combine is not Combine.SUM:
        return ()
    if node.op == ROWS and can_add_rows(node):
        views = rows_of(node, node.results[0].name)
        args = (place, 0, *(view.outputs[0] for view in views))
        return *views, _writing("aten.index_add_.default", args, place, (), node)
    op = forms_of(node.op).adding
    return (_writing(op, (place, *node.args), place, node.kwargs, node),) if op else ()


def _writing(op: str, args: tuple[Arg, ...], place: Value, kwargs: tuple[tuple[str, Arg], ...] = (), instead: Node | None = None) -> Node:
    after = replace(place, name=f"{place.name}_v1", version=place.version + 1)
    if instead is not None:
        return replace(instead, op=op, args=args, outputs=(), kwargs=kwargs, writes=((place, after),), inplace=())
    return Node(op, args, (), kwargs, writes=((place, after),))


@dataclass(eq=False)
class Parts:
    """The nouns of one part, each written once. They keep their names; the places of results get names of their own."""

    split: Split
    roles: Roles
    dimension: Dimension
    values: dict[Value, Value] = field(default_factory=dict)
    storages: dict[Storage, Storage] = field(default_factory=dict)
    totals: dict[Storage, Size | None] = field(default_factory=dict)  # elements over all units of what is cut; None for what is not
    bases: dict[Storage, int] = field(default_factory=dict)  # the versions that the loop finds
    nodes: dict[Node, Node] = field(default_factory=dict)
    dense: dict[Value, Value] = field(default_factory=dict)  # copies of slices with gaps
    copies: list[Node] = field(default_factory=list)  # of these, what the next node waits for
    shares: dict[Size, Size] = field(default_factory=dict)  # of what all units have together, each expression once

    @classmethod
    def of(cls, split: Split, roles: Roles, most: int) -> Parts:
        """For parts of at most so many units."""
        return cls(split, roles, Dimension(split.part_name, 1, most))

    def body(self, arguments: Sequence[Value], results: Sequence[Value], writes: Sequence[tuple[Value, Value]]) -> Graph:
        """The graph of a part: its inputs are the arguments, then the places of the results; it returns what it has written."""
        inputs = [self._given(value) for value in arguments]
        places = {value: self._place(value) for value in results}
        nodes: list[Node] = []
        for node, axis in self.split.axes.items():
            new = tuple(self._written(node, self._node(node, axis), places))
            self.nodes[node] = new[0]
            nodes += [*self.copies, *new]
            self.copies.clear()
        last = {after.storage: after for node in nodes for _, after in node.writes}
        inputs_written = [*places.values(), *(self.values[before] for before, _ in writes)]
        return Graph((*inputs, *places.values()), tuple(nodes), tuple(last[value.storage] for value in inputs_written), (self.dimension,))

    def _written(self, node: Node, new: Node, places: Mapping[Value, Value]) -> Iterator[Node]:
        """A node of a part, and what brings its results to their places."""
        wanted = [value for value in node.outputs if value is not None and value in places]
        if len(wanted) == 1 and wanted[0] not in self.split.read:
            merges = self.roles.merged.get(wanted[0])
            place = places[wanted[0]]
            direct = straight(new, place, self._over(node, new, place)) if merges is None else adding(new, place, merges.combine)
            if direct:
                yield from direct
                return
        yield new
        for value in wanted:
            merges = self.roles.merged.get(value)
            result, place = self.values[value], places[value]
            yield copied(result, place) if merges is None else merged(result, place, merges.combine, self.dimension.symbol)

    def _over(self, node: Node, new: Node, place: Value) -> list[tuple[Value, str]]:
        """Of what a node may work in the memory of, what lies in a part as the place of its result does."""
        there = [(self.values[value], overload) for value, overload in node.inplace if value in self.values]
        return [(value, op) for value, op in there if value in new.inputs and (value.shape, value.stride) == (place.shape, place.stride)]

    def _node(self, node: Node, axis: Axis | None) -> Node:
        outputs = self._outputs(node)
        gaps = () if is_view(node) or row_of(node.op).any_strides else [value for value in node.inputs if self._has_gaps(value)]
        instead = {value: self._dense(value) for value in gaps}
        if axis is not None:
            sizes = {path: self._share(argument(node, path)) for path in axis.sizes}
            node = with_arguments(node, sizes | dict(axis.instead))
        return replace(
            node,
            **arguments(node, lambda value: instead.get(value, self.values[value])),
            outputs=outputs,
            writes=tuple((self.values[before], self._next(before, after)) for before, after in node.writes),
            after=tuple(self.nodes[other] for other in node.after if other in self.nodes),
            inplace=tuple((self.values[value], overload) for value, overload in node.inplace if self._fits(value, outputs, instead)),
        )

    def _has_gaps(self, value: Value) -> bool:
        """Whether a part of what lies dense as a whole does not, so that a kernel that looks at no strides would read beside it."""
        dim = self.roles.dims.get(value)
        if dim is None or self.totals[value.storage] is not None or value.stride != contiguous_stride(value.shape):
            return False
        return any(extent != 1 for extent in value.shape[:dim])

    def _dense(self, value: Value) -> Value:
        if value not in self.dense:
            part = self.values[value]
            name, nbytes = f"{value.name}_dense", product(part.shape) * ITEM_BYTES[part.dtype]
            storage = Storage(name, nbytes, part.storage.device, Kind.ACTIVATION)
            self.dense[value] = Value(name, storage, part.dtype, part.shape, contiguous_stride(part.shape))
            layout = (("memory_format", Atom("memory_format", "contiguous_format")),)
            self.copies.append(Node(CLONE, (part,), (self.dense[value],), layout))
        return self.dense[value]

    def _fits(self, value: Value, outputs: Sequence[Value | None], instead: Mapping[Value, Value]) -> bool:
        """Whether a result is as large as what it may take over in parts of every size."""
        return (
            value not in instead
            and bool(outputs)
            and outputs[0] is not None
            and outputs[0].storage.nbytes == self.storages[value.storage].nbytes
        )

    def _outputs(self, node: Node) -> tuple[Value | None, ...]:
        given = {value.storage for value in values_of((*node.args, *(arg for _, arg in node.kwargs)))}
        for value in node.outputs:
            if value is not None and value.storage not in given and value.storage not in self.storages:
                self._make(value)
        return tuple(None if value is None else self._laid_out(value) for value in node.outputs)

    def _make(self, value: Value) -> None:
        storage, dim = value.storage, self.roles.dims.get(value)
        self.totals[storage] = (
            None if dim is None else value.stride[of_tensor(dim)] * self.roles.inner.get(value, value.shape[of_tensor(dim)])
        )
        self.storages[storage] = storage if dim is None else replace(storage, nbytes=self._share(storage.nbytes))

    def _laid_out(self, value: Value) -> Value:
        """A tensor of a part, on a storage that the part knows."""
        total, shape = self.totals[value.storage], self._shape(value)
        stride = tuple(self._step(value, stride, total) for stride in value.stride)
        version = value.version - self.bases.get(value.storage, 0)
        new = Value(value.name, self.storages[value.storage], value.dtype, shape, stride, self._offset(value, total), version)
        self.values[value] = new
        return new

    def _shape(self, value: Value) -> tuple[Size, ...]:
        dim = self.roles.dims.get(value)
        cut = None if dim is None else of_tensor(dim)
        return tuple(self._share(extent) if at == cut else extent for at, extent in enumerate(value.shape))

    def _step(self, value: Value, stride: Size, total: Size | None) -> Size:
        if total is None:
            return stride
        times = _quotient(stride, total)
        if times is not None:
            return times * self._share(total)
        if isinstance(stride, int) and isinstance(total, int) and stride > total:
            raise CheckError(f"fission, {value.name}: expected strides over all of what is cut, {total} elements, got {stride}")
        return stride

    def _offset(self, value: Value, total: Size | None) -> Size:
        if total is None or value.offset == 0:
            return value.offset
        outer, inner = divmod(value.offset, total)
        if not inner * self.split.extent < total:
            raise CheckError(f"fission, {value.name}: expected to begin at the first of the units that are cut, got element {value.offset}")
        return outer * self._share(total) + inner

    def _share(self, number: Arg) -> Size:
        """A part's share of an extent, of strides, of bytes."""
        if not isinstance(number, (int, sympy.Expr)) or (each := _quotient(number, self.split.extent)) is None:
            raise CheckError(f"fission: expected what {self.split.extent} units share evenly, got {number}")
        if number not in self.shares:
            self.shares[number] = each * self.dimension.symbol
        return self.shares[number]

    def _given(self, value: Value) -> Value:
        """An argument: a part of it, laid out as it lies, or all of it."""
        storage = value.storage
        if storage not in self.storages:
            self.bases[storage], self.totals[storage] = value.version, None
            self.storages[storage] = storage if value.dtype == "scalar" else replace(storage, kind=Kind.ARGUMENT)
        elif self.bases[storage] != value.version:
            raise CheckError(f"fission: expected one version of {storage.name}, got {value.version} and {self.bases[storage]}")
        return self._laid_out(value)

    def _place(self, value: Value) -> Value:
        """Where a result goes: the part's share of it, or all."""
        storage = replace(value.storage, name=f"{value.storage.name}_whole", kind=Kind.ARGUMENT)
        return replace(value, name=f"{value.name}_whole", storage=storage, shape=self._shape(value))

    def _next(self, before: Value, after: Value) -> Value:
        self.values[after] = replace(self.values[before], name=after.name, version=self.values[before].version + 1)
        return self.values[after]


def _quotient(number: Size, divisor: Size) -> Size | None:
    """How many times a size goes into another; None where that is no whole number."""
    if isinstance(number, int) and isinstance(divisor, int):
        return number // divisor if divisor and number % divisor == 0 else None
    times = sympy.cancel(sympy.sympify(number) / sympy.sympify(divisor))
    whole = sympy.denom(times) == 1 and all(each.is_Integer for each in times.atoms(sympy.Number))
    return (int(times) if times.is_Integer else times) if whole else None
