"""Making axes: what rules are written with.

A rule says of an axis where it is: in which arguments, by position and dimension, in which results, by the operator's own numbering of its
outputs. `axis` leaves out what does not exist, counts the units, and says nothing of extents of 1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from math import gcd
from typing import Any, TypeAlias

import sympy

from lowtide.errors import CheckError
from lowtide.ir.graph import Arg, Node, Value
from lowtide.ir.operators.axes.axis import Axis, Combine, Path, Reduced, Role, argument
from lowtide.ir.sizes import Size

NodeLocation: TypeAlias = Mapping[Any, int]  # dimensions of arguments, by the argument's position: a path, or a number for args[number]

SUM, MEAN, SAME = Reduced(Combine.SUM), Reduced(Combine.MEAN), Reduced(Combine.SAME)


def axis(
    node: Node, sliced: NodeLocation, made: Mapping[int, Role], sizes: Sequence[Path] = (), instead: Mapping[Path, Arg] | None = None
) -> Iterator[Axis]:
    """The axis along these dimensions of arguments and outputs, as all there are; none where extents have no unit in common, or just 1.

    Arguments that are no tensors are left out; a number stands for an argument's position. Dimensions count from the front or the back.
    What the node writes is made where it is sliced. `sizes` that hold -1 fit by themselves.
    """
    positions: list[tuple[Path, int]] = []
    extents: list[Size] = []
    for position, dim in sliced.items():
        path: Path = (position,) if isinstance(position, int) else position
        value = given(node, path)
        if value is not None:
            at = dim % len(value.shape)
            positions.append((path, at))
            extents.append(value.shape[at])
    roles = tuple(_roles(node, made, dict(positions)))
    for value, role in zip(node.results, roles, strict=True):
        if isinstance(role, int):
            extents.append(value.shape[role])
    unit = common_unit(extents)
    if unit is not None and unit not in (0, 1):
        kept = tuple(path for path in sizes if argument(node, path) != -1)
        yield Axis(unit, tuple(positions), roles, kept, tuple((instead or {}).items()))


def _roles(node: Node, made: Mapping[int, Role], positions: Mapping[Path, int]) -> Iterator[Role]:
    for index, value in enumerate(node.outputs):
        if value is not None:
            role = made[index]
            yield role % len(value.shape) if isinstance(role, int) else role
    written = {argument(node, path): dim for path, dim in positions.items()}
    for before, _ in node.writes:
        yield written.get(before, SAME)


def given(node: Node, path: Path) -> Value | None:
    """The tensor at a position; None where there is none."""
    try:
        found = argument(node, path)
    except (LookupError, CheckError):
        return None
    return found if isinstance(found, Value) and found.dtype != "scalar" else None


def number(node: Node, position: int, name: str, default: Arg = None) -> Arg:
    if position < len(node.args):
        return node.args[position]
    return dict(node.kwargs).get(name, default)


def dims_of(node: Node, position: int, rank: int, name: str = "dim") -> tuple[int, ...]:
    """Dimensions that an argument names, from the front; all where it names none."""
    named = number(node, position, name)
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
