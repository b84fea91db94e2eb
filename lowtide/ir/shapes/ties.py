"""From the dimensions that a batch gives to the common ones: the numbers that follow, and the ties that a batch may break."""

from __future__ import annotations

from collections.abc import Mapping
from fractions import Fraction

from lowtide.errors import ShapeError
from lowtide.ir.shapes.dimension import checked_point
from lowtide.ir.shapes.polynomial import Polynomial, number
from lowtide.ir.shapes.solve import ShapeGraph, substituted


def common_point(shapes: ShapeGraph, given: Mapping[str, int]) -> dict[str, int]:
    """The number of each common dimension, in their order, from those of any dimensions that suffice.

    Raises ShapeError: a number that breaks a tie or an equation, that is out of its range, or that is missing.
    """
    names = {each.name for each in shapes.dimensions}
    known = {name: each for name, each in given.items() if name in names or name not in shapes.meanings}
    while found := _next(shapes, given, known):
        known[found[0]] = found[1]
    point = checked_point(shapes.dimensions, known)
    _check(shapes, given, point)
    return point


def _next(shapes: ShapeGraph, given: Mapping[str, int], known: Mapping[str, int]) -> tuple[str, int] | None:
    """One more common dimension that follows, as the only unknown of what another one is."""
    numbers = {name: number(each) for name, each in known.items()}
    for name in (each for each in shapes.meanings if each in given):
        left = dict(substituted(shapes.meanings[name], numbers).terms)
        offset = left.pop((), 0)
        if len(left) != 1:
            continue
        (((other, power), *more), factor) = next(iter(left.items()))
        if power != 1 or more or other not in {each.name for each in shapes.dimensions}:
            continue
        value = Fraction(given[name] - offset) / factor
        if value.denominator != 1:
            raise ShapeError(f"dimension {name}: expected {shapes.meanings[name]} with a whole {other}, got {given[name]}")
        return other, int(value)
    return None


def _check(shapes: ShapeGraph, given: Mapping[str, int], point: Mapping[str, int]) -> None:
    numbers = {name: number(each) for name, each in point.items()}
    where = ", ".join(f"{name} = {each}" for name, each in point.items())
    for gone in shapes.gone:
        meaning = shapes.meanings[gone.name]
        value = substituted(meaning, numbers).constant
        if given.get(gone.name, value) != value:
            expected = f"expected {meaning} = {value} where {where}"
            raise ShapeError(f"dimension {gone.name}: {expected}, got {given[gone.name]}: the program ties them")
        if value is not None and not gone.least <= value <= gone.most:
            raise ShapeError(f"expected {gone}, got {meaning} = {value} where {where}")
    for equation in shapes.unsolved:
        one, two = (substituted(substituted(Polynomial.of(size), shapes.meanings), numbers) for size in equation[:2])
        if one != two:
            raise ShapeError(f"{equation}: expected equal numbers, got {one} and {two}: the program ties them")
