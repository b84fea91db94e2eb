"""Along what an operator can be run in parts: its axes, by rules that read a node's arguments. No torch.

    axes_of(node) -> Axis*                                                                     nodes.py; () where nothing is known

An **axis** is one index that an operator loops over, as in einsum: mm(a, b) = sum over k of a[m, k] b[k, n] has three. To run a node in
parts along an axis is to run it once for each piece of [0, extent), in any number of pieces of any whole sizes:

    for start, stop in pieces:                        # of [0, axis.extent)
        for path, dim in axis.sliced:                 # arguments that are sliced: those that the axis does not name are whole
            of `argument(node, path)` take along `dim` the same share: [start, stop) * shape[dim] // extent
        for path in axis.sizes:                       # arguments that hold an extent
            take the same share of the number: number * (stop - start) // extent
        for path, arg in axis.instead:                # arguments that are another in every part
            take `arg`
        run the operator; for each of `node.results`, the outputs that exist, then what was written:
            a dimension  the part's result is the same share of the whole result along it
            Reduced(SUM)     add it to the parts before it; MAX, MIN, PRODUCT, ANY and ALL likewise
            Reduced(MEAN)    add it times (stop - start) / extent
            Reduced(SAME)    every part gives the same: keep one
    for Reduced(SUM, over=i):                         # after the last part
            divide by the combined result i

So all extents along an axis are multiples of `axis.extent`, and parts of neighbouring operators fit where they take the same share. A
path is the position of an argument: (1,) is args[1], (0, 2) is args[0][2], ("weight",) a keyword; `with_arguments` puts others there.

A node that writes (`node.writes`) writes into the same slice of what it is given: `sliced` names that argument.

What no axis names is **closed**: the dimension that a softmax or norm normalises, what a convolution looks around in, all of an operator
that has no rule or draws random numbers. A reshape has an axis for the outermost of each group of merged dimensions, of as many units as
both sides divide into; an extent of 1 has none.

Parts give the numbers of the whole operator, not its bits: kernels choose their way by size, and sums are taken in another order.
Results that are whole numbers or truth values are exact, but for those that were sums of floating point before.

(MAGIS, section 4.1: sliced dimensions are its spatial axes, reduced ones its reduce axes.)

Making axes: what rules are written with. A rule says of an axis where it is: in which arguments, by position and dimension, in which
results, by the operator's own numbering of its outputs. `axis` leaves out what does not exist, counts the units, and says nothing of
extents of 1.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from math import gcd
from typing import Any, TypeAlias

import sympy

from lowtide.errors import CheckError, of_kind
from lowtide.ir.graph import Arg, Node, Storage, Value
from lowtide.ir.sizes import Size

ArgumentPath: TypeAlias = "tuple[int | str, ...]"  # (1,) is args[1], (0, 2) is args[0][2], ("weight",) is a keyword argument


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
    sliced: tuple[tuple[ArgumentPath, int], ...]  # tensors among the arguments, and the dimension; others are whole
    results: tuple[Role, ...]  # by `node.results`
    sizes: tuple[ArgumentPath, ...] = ()  # numbers among the arguments that are extents along the axis
    instead: tuple[tuple[ArgumentPath, Arg], ...] = ()  # arguments of a part that are not the node's


def argument(node: Node, path: ArgumentPath) -> Arg:
    """The argument at a position. Raises LookupError where there is none."""
    first, rest = path[0], path[1:]
    arg: Arg = dict(node.kwargs)[first] if isinstance(first, str) else node.args[first]
    for step in rest:
        arg = of_kind(tuple, arg)
        step = of_kind(int, step)
        arg = arg[step]
    return arg


def tensor_paths(node: Node) -> Iterator[tuple[ArgumentPath, Value]]:
    """Every position of a value among the arguments, and the value: as often as it stands there."""
    for position, arg in enumerate(node.args):
        yield from _within(arg, (position,))
    for name, arg in node.kwargs:
        yield from _within(arg, (name,))


def cut_by(node: Node, axis: Axis) -> Iterator[tuple[Value, int]]:
    """The values that an axis cuts, arguments and results, and where."""
    for path, dim in axis.sliced:
        value = of_kind(Value, argument(node, path))
        yield value, dim
    yield from ((value, role) for value, role in zip(node.results, axis.results, strict=True) if isinstance(role, int))


def merges_apart(node: Node, cut: Mapping[Value, int], given: Collection[Storage]) -> bool:
    """Whether a view merges dimensions of what is given, cut along the inner one: rows of a slice, which lie apart."""
    pairs = ((before, result) for before in node.inputs for result in node.results)
    return any(
        before.storage in given
        and result.storage is before.storage
        and is_innermost(cut.get(result, 0))
        and not is_innermost(cut.get(before, 0))
        for before, result in pairs
    )


def with_arguments(node: Node, instead: Mapping[ArgumentPath, Arg]) -> Node:
    args = tuple(_replaced(arg, (position,), instead) for position, arg in enumerate(node.args))
    kwargs = tuple((name, _replaced(arg, (name,), instead)) for name, arg in node.kwargs)
    return replace(node, args=args, kwargs=kwargs)


def _within(arg: Arg, path: ArgumentPath) -> Iterator[tuple[ArgumentPath, Value]]:
    if isinstance(arg, Value):
        yield path, arg
    elif isinstance(arg, tuple):
        for position, item in enumerate(arg):
            yield from _within(item, (*path, position))


def _replaced(arg: Arg, path: ArgumentPath, instead: Mapping[ArgumentPath, Arg]) -> Arg:
    if path in instead:
        return instead[path]
    return tuple(_replaced(item, (*path, position), instead) for position, item in enumerate(arg)) if isinstance(arg, tuple) else arg


DimsByArgument: TypeAlias = Mapping[Any, int]  # dimensions of arguments, by the argument's position: a path, or a number for args[number]

SUM, MEAN, SAME = Reduced(Combine.SUM), Reduced(Combine.MEAN), Reduced(Combine.SAME)


def axis(
    node: Node,
    sliced: DimsByArgument,
    result_roles: Mapping[int, Role],
    sizes: Sequence[ArgumentPath] = (),
    instead: Mapping[ArgumentPath, Arg] | None = None,
) -> Iterator[Axis]:
    """The axis along these dimensions of arguments and outputs, as all there are; none where extents have no unit in common, or just 1.

    Arguments that are no tensors are left out; a number stands for an argument's position. Dimensions count from the front or the back.
    What the node writes is made where it is sliced. `sizes` that hold -1 fit by themselves.
    """
    positions: list[tuple[ArgumentPath, int]] = []
    extents: list[Size] = []
    for position, dim in sliced.items():
        path: ArgumentPath = (position,) if isinstance(position, int) else position
        value = given(node, path)
        if value is not None:
            at = dim % len(value.shape)
            positions.append((path, at))
            extents.append(value.shape[at])
    roles = tuple(_roles(node, result_roles, dict(positions)))
    for value, role in zip(node.results, roles, strict=True):
        if isinstance(role, int):
            extents.append(value.shape[role])
    unit = common_unit(extents)
    if unit is not None and unit not in (0, 1):
        kept = tuple(path for path in sizes if argument(node, path) != -1)
        yield Axis(unit, tuple(positions), roles, kept, tuple((instead or {}).items()))


def _roles(node: Node, roles: Mapping[int, Role], positions: Mapping[ArgumentPath, int]) -> Iterator[Role]:
    for index, value in enumerate(node.outputs):
        if value is not None:
            role = roles[index]
            yield role % len(value.shape) if isinstance(role, int) else role
    written = {argument(node, path): dim for path, dim in positions.items()}
    for before, _ in node.writes:
        yield written.get(before, SAME)


def given(node: Node, path: ArgumentPath) -> Value | None:
    try:
        arg = argument(node, path)
    except (LookupError, CheckError):
        return None
    return arg if isinstance(arg, Value) and arg.dtype != "scalar" else None


def number(node: Node, position: int, name: str, default: Arg = None) -> Arg:
    if position < len(node.args):
        return node.args[position]
    return dict(node.kwargs).get(name, default)


def dims_of(node: Node, position: int, rank: int) -> tuple[int, ...]:
    """Dimensions that an argument names, from the front; all where it names none."""
    named = number(node, position, "dim")
    listed = named if isinstance(named, tuple) else () if named is None else (named,)
    dims = tuple(dim % max(1, rank) for dim in listed if isinstance(dim, int))
    return dims or tuple(range(rank))


def common_unit(extents: Sequence[Size]) -> Size | None:
    """The largest number of equal units that all extents divide into; None where that cannot be told."""
    numbers = [extent for extent in extents if isinstance(extent, int)]
    if len(numbers) == len(extents):
        return gcd(*numbers) if numbers else None
    smallest = next((one for one in extents if all(divides(one, other) for other in extents)), None)
    return smallest


def divides(one: Size, other: Size) -> bool:
    """Whether `other` is known to be a multiple of `one`, whatever the dimensions are."""
    if isinstance(one, int) and isinstance(other, int):
        return one != 0 and other % one == 0
    if one == other:
        return True
    ratio = sympy.cancel(sympy.sympify(other) / sympy.sympify(one))
    numerator, denominator = sympy.fraction(ratio)
    return bool(denominator == 1) and not numerator.has(sympy.floor, sympy.Mod) and _whole(numerator)


def _whole(expression: sympy.Expr) -> bool:
    """Whether an expression is a polynomial in whole numbers with whole coefficients."""
    return all(isinstance(number, sympy.Integer) for number in expression.atoms(sympy.Number))
