"""What a split does to each tensor: cut along a dimension, put together from what parts make, or whole in every part.

`check_set` says whether a set may be split at all: what the paper asks for (MAGIS, section 4.2), and what writes and random numbers ask
for beyond that.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from math import gcd
from typing import NoReturn

from lowtide.base.graphs import connected
from lowtide.errors import CheckError
from lowtide.ir.graph import Node, Storage, Value
from lowtide.ir.operators.axes import Axis, Combine, Reduced, argument, cut_by, is_innermost
from lowtide.ir.operators.nodes import is_arithmetic, is_random, is_transfer, is_view
from lowtide.ir.operators.table import row_of
from lowtide.ir.sizes import Size


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
    """By tensor, what becomes of it."""

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
