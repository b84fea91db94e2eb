"""The noun: one axis of one node, and the positions of its arguments."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, replace
from enum import Enum
from typing import TypeAlias

from lowtide.base.narrow import of_kind
from lowtide.ir.graph import Arg, Node, Storage, Value
from lowtide.ir.sizes import Size

Path: TypeAlias = "tuple[int | str, ...]"  # (1,) is args[1], (0, 2) is args[0][2], ("weight",) is a keyword argument


_INNERMOST = 64  # more dimensions than a tensor can have


def innermost(dim: int) -> int:
    """A cut along what is innermost in a merged dimension: of the rows [tokens x batch] those of some of the batch."""
    return dim + _INNERMOST


def is_innermost(dim: int) -> bool:
    """Whether a cut is along what is innermost in a dimension, so that parts are no runs of it."""
    return dim >= _INNERMOST


def of_tensor(dim: int) -> int:
    """The dimension of the tensor that a cut is along, or along what is innermost in it."""
    return dim % _INNERMOST


class Combine(Enum):
    """How results of parts become one."""

    SUM = "sum"
    MEAN = "mean, weighted by the parts' shares"
    MAX = "maximum"
    MIN = "minimum"
    PRODUCT = "product"
    ANY = "any"
    ALL = "all"
    SAME = "every part gives the same"


@dataclass(frozen=True, slots=True)
class Reduced:
    """A result that every part has a share in."""

    combine: Combine
    over: int | None = None  # of `node.results`: the one by which the sum is divided, once both are whole


Role: TypeAlias = "int | Reduced"  # of a result: the dimension along which it is made in parts, or how it is combined


@dataclass(frozen=True, slots=True)
class Axis:
    """One index that an operator loops over, see the room's docstring."""

    extent: Size  # the pieces are of [0, extent); every extent along the axis is a multiple of it
    sliced: tuple[tuple[Path, int], ...]  # tensors among the arguments, and the dimension; others are whole
    results: tuple[Role, ...]  # by `node.results`
    sizes: tuple[Path, ...] = ()  # numbers among the arguments that are extents along the axis
    instead: tuple[tuple[Path, Arg], ...] = ()  # arguments of a part that are not the node's


def argument(node: Node, path: Path) -> Arg:
    """The argument at a position. Raises LookupError where there is none."""
    first, rest = path[0], path[1:]
    found: Arg = dict(node.kwargs)[first] if isinstance(first, str) else node.args[first]
    for step in rest:
        found = of_kind(tuple, found)
        step = of_kind(int, step)
        found = found[step]
    return found


def tensor_paths(node: Node) -> Iterator[tuple[Path, Value]]:
    """Every position of a value among the arguments, and the value: as often as it stands there."""
    for position, arg in enumerate(node.args):
        yield from _within(arg, (position,))
    for name, arg in node.kwargs:
        yield from _within(arg, (name,))


def cut_by(node: Node, axis: Axis) -> Iterator[tuple[Value, int]]:
    """The values that an axis cuts, arguments and results, and where."""
    for path, dim in axis.sliced:
        value = argument(node, path)
        value = of_kind(Value, value)
        yield value, dim
    yield from ((value, role) for value, role in zip(node.results, axis.results, strict=True) if isinstance(role, int))


def merges_apart(node: Node, cut: Mapping[Value, int], given: Collection[Storage]) -> bool:
    """Whether a view merges dimensions of what is given, cut along the inner one: rows of a slice, which lie apart."""
    pairs = ((before, made) for before in node.inputs for made in node.results)
    return any(
        before.storage in given
        and made.storage is before.storage
        and is_innermost(cut.get(made, 0))
        and not is_innermost(cut.get(before, 0))
        for before, made in pairs
    )


def with_arguments(node: Node, instead: Mapping[Path, Arg]) -> Node:
    args = tuple(_replaced(arg, (position,), instead) for position, arg in enumerate(node.args))
    kwargs = tuple((name, _replaced(arg, (name,), instead)) for name, arg in node.kwargs)
    return replace(node, args=args, kwargs=kwargs)


def _within(arg: Arg, path: Path) -> Iterator[tuple[Path, Value]]:
    if isinstance(arg, Value):
        yield path, arg
    elif isinstance(arg, tuple):
        for position, item in enumerate(arg):
            yield from _within(item, (*path, position))


def _replaced(arg: Arg, path: Path, instead: Mapping[Path, Arg]) -> Arg:
    if path in instead:
        return instead[path]
    return tuple(_replaced(item, (*path, position), instead) for position, item in enumerate(arg)) if isinstance(arg, tuple) else arg
