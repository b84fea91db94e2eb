"""Conditions on dimensions: what a program that was captured for a range rests on, and for which part of the range all of it holds."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from math import lcm
from typing import Any, TypeAlias

import sympy

from lowtide.errors import FormatError, ShapeError
from lowtide.ir.shapes.dimension import Dimension, Dimensions
from lowtide.ir.shapes.points import function_of, python_text
from lowtide.ir.text.sizes import canonical

Holds: TypeAlias = "Callable[[Mapping[str, int]], bool]"  # of a number for each dimension

_LARGEST_STEP = 4096
_SIGNS = {sympy.Eq: "==", sympy.Ne: "!=", sympy.Lt: "<", sympy.Le: "<=", sympy.Gt: ">", sympy.Ge: ">="}


@dataclass(frozen=True, slots=True)
class Condition:
    relation: Any  # sympy's: a comparison, or And, Or and Not of some
    where: str = ""  # in the program


def all_hold(conditions: Sequence[Condition], dimensions: Dimensions) -> Holds:
    """Whether all conditions hold at a point, as compiled Python. Where a size in one is no whole number it does not hold.

    Raises FormatError for what is no relation of sizes, ShapeError for an unknown dimension.
    """
    names = {each.name: f"d{position}" for position, each in enumerate(dimensions)}
    texts = dict.fromkeys(_text(each.relation, names) for each in conditions)
    check = function_of(tuple(names.values()), " and ".join(texts) or "1 == 1")

    def holds(point: Mapping[str, int]) -> bool:
        try:
            return bool(check(*(point[name] for name in names)))
        except ShapeError:
            return False

    return holds


def _text(relation: Any, names: Mapping[str, str]) -> str:
    if relation in (sympy.true, sympy.false):
        return "1 == 1" if relation == sympy.true else "1 == 0"
    if isinstance(relation, sympy.Not):
        return f"(not {_text(relation.args[0], names)})"
    if isinstance(relation, (sympy.And, sympy.Or)):
        word = " and " if isinstance(relation, sympy.And) else " or "
        return f"({word.join(sorted(_text(each, names) for each in relation.args))})"
    sign = next((sign for kind, sign in _SIGNS.items() if isinstance(relation, kind)), None)
    if sign is None:
        raise FormatError(f"expected a relation of sizes, got {relation}")
    left, right = (python_text(canonical(side), names) for side in relation.args)
    return f"({left} {sign} {right})"


def steps_of_range(conditions: Sequence[Condition], dimensions: Dimensions, holds: Holds, point: Mapping[str, int]) -> dict[str, int]:
    """By dimension the step between sizes for which all conditions hold, where they do not hold for the next size: 8 for multiples of 8.

    What stands in a condition as a divisor says which steps may be meant; the least that leads on is taken.
    """
    divisors = {int(each) for condition in conditions for each in _divisors(condition.relation)}
    steps = sorted({lcm(*some) for count in range(1, 4) for some in combinations(sorted(divisors), count)})
    by_dimension: dict[str, int] = {}
    for each in dimensions:
        if not _has_next(each, 1, holds, point):
            step = next((step for step in steps if _has_next(each, step, holds, point)), None)
            by_dimension |= {} if step is None else {each.name: step}
    return by_dimension


def _divisors(relation: Any) -> set[Any]:
    """Whole numbers from 2 on by which something is divided within a relation."""
    sides = [sympy.sympify(canonical(side)) for expr in relation.atoms(*_SIGNS) for side in expr.args]  # without torch's own functions
    mods = {expr.args[1] for side in sides for expr in side.atoms(sympy.Mod)}
    rounded = (expr for side in sides for expr in side.atoms(sympy.floor, sympy.ceiling))
    quotients = {number.q for expr in rounded for number in expr.atoms(sympy.Rational)}
    return {each for each in (*mods, *quotients) if sympy.sympify(each).is_Integer and 2 <= each <= _LARGEST_STEP}


def _has_next(dimension: Dimension, step: int, holds: Holds, point: Mapping[str, int]) -> bool:
    """Whether all holds at the next number of the range, too, above or below."""
    numbers = (point[dimension.name] + step, point[dimension.name] - step)
    return any(dimension.least <= number <= dimension.most and holds({**point, dimension.name: number}) for number in numbers)


def part_of_range(dimensions: Dimensions, holds: Holds, point: Mapping[str, int]) -> Dimensions:
    """The ranges around a point in which all holds along each dimension, the others being as they are there."""
    ends = ((each, _last(each.name, each.least, holds, point), _last(each.name, each.most, holds, point)) for each in dimensions)
    return tuple(replace(each, least=least, most=most) for each, least, most in ends)


def _last(name: str, end: int, holds: Holds, point: Mapping[str, int]) -> int:
    """The last number of a dimension on the way from a point to `end` up to which all holds, as far as halving tells."""

    def there(number: int) -> bool:
        return holds({**point, name: number})

    if there(end):
        return end
    good, bad = point[name], end
    while abs(bad - good) > 1:
        middle = (good + bad) // 2
        good, bad = (middle, bad) if there(middle) else (good, middle)
    return good
