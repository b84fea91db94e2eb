"""Which of two sizes is less over a range: answers are proven for every point, or "unknown".

Both become one polynomial, their difference, whose sign decides. What is no polynomial becomes one first: floor(p/q) is (p - r)/q with a
remainder r from 0 to q - 1, and Max is each of its arguments in turn, or nowhere less than one of them. A remainder is the same wherever
the same is divided, and otherwise takes every number of its range: what is proven then holds, and what is not may still be so. Answers are
kept by difference and range, so that comparing many sizes costs as much as the distinct differences among them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from fractions import Fraction
from functools import lru_cache
from typing import Any, NamedTuple

import sympy

from lowtide.errors import ShapeError
from lowtide.ir.shapes.dimension import Dimensions
from lowtide.ir.shapes.polynomial import Polynomial, Rational, generator
from lowtide.ir.sizes import Size
from lowtide.ir.text.sizes import parse_size
from research.shapes.bernstein import Range
from research.shapes.sign import FRACTION, Sign, common_sign, sign_over
from research.shapes.terms import constant, generators, replaced, whole

_MOST_CASES = 64  # of a difference, one for each way in which its Max and Min may turn out


class Comparison(enum.Enum):
    """What is proven of two sizes over a range."""

    EQUAL = "the first equals the second everywhere"
    AT_MOST = "the first is at most the second everywhere"
    AT_LEAST = "the first is at least the second everywhere"
    UNKNOWN = "neither is proven"


_ANSWERS = {
    Sign.ZERO: Comparison.EQUAL,
    Sign.NOT_POSITIVE: Comparison.AT_MOST,
    Sign.NOT_NEGATIVE: Comparison.AT_LEAST,
    Sign.UNKNOWN: Comparison.UNKNOWN,
}


def compare(first: Size, second: Size, dimensions: Dimensions) -> Comparison:
    """How two sizes compare over the ranges of their dimensions. Raises ShapeError for a dimension that is not among them."""
    return _ANSWERS[sign_of(Polynomial.of(first) - Polynomial.of(second), dimensions)]


def sign_of(difference: Polynomial, dimensions: Dimensions) -> Sign:
    """The sign of a sum of sizes over the ranges of its dimensions. Raises ShapeError for a dimension that is not among them."""
    if not difference.terms:
        return Sign.ZERO
    return _sign(difference, dimensions)


@lru_cache(maxsize=65536)
def _sign(difference: Polynomial, dimensions: Dimensions) -> Sign:
    ranges = {each.name: (each.least, each.most) for each in dimensions}
    return _sign_of_case(_Case(difference, ranges), dimensions, [_MOST_CASES])


class _Case(NamedTuple):
    """A polynomial and the ranges of its generators, remainders among them."""

    polynomial: Polynomial
    ranges: Mapping[str, Range]


def _sign_of_case(case: _Case, dimensions: Dimensions, left: list[int]) -> Sign:
    """The sign of a polynomial some of whose generators may still be functions; `left` counts down how many may be looked at."""
    left[0] -= 1
    name = next((each for each in generators(case.polynomial) if each not in case.ranges), None)
    if name is None:
        return sign_over(case.polynomial, tuple((each, case.ranges[each]) for each in generators(case.polynomial)))
    meanings = _meanings(name, dimensions)
    if meanings is None or left[0] < 0 or _divides(name, case.polynomial):
        return Sign.UNKNOWN
    cases = [_Case(replaced(case.polynomial, {name: each.polynomial}), {**case.ranges, **each.ranges}) for each in meanings]
    signs = [_sign_of_case(each, dimensions, left) for each in cases]
    sign = common_sign(signs)
    if sign is not Sign.UNKNOWN or len(signs) == 1:
        return sign
    bound = _bounded_by(name, case, dimensions, left)
    return bound if bound in signs or Sign.ZERO in signs else Sign.UNKNOWN


def _bounded_by(name: str, case: _Case, dimensions: Dimensions, left: list[int]) -> Sign:
    """The sign that a polynomial has as soon as it has it, or is 0, for one argument of the Max or Min `name`.

    A Max is nowhere less than an argument: with a factor that is nowhere negative, the polynomial is nowhere less than with that argument.
    """
    with_name = [(dict(monomial), each) for monomial, each in case.polynomial.terms if name in dict(monomial)]
    if any(powers.pop(name) != 1 for powers, _ in with_name):
        return Sign.UNKNOWN
    factor = Polynomial(tuple(sorted((tuple(sorted(powers.items())), each) for powers, each in with_name)))
    sign = _sign_of_case(_Case(factor, case.ranges), dimensions, left)
    return sign if isinstance(parse_size(name), sympy.Max) else sign.reversed()


def _divides(name: str, polynomial: Polynomial) -> bool:
    return any(dict(monomial).get(name, 0) < 0 for monomial, _ in polynomial.terms)


@lru_cache(maxsize=4096)
def _meanings(name: str, dimensions: Dimensions) -> tuple[_Case, ...] | None:
    """What a generator may be, one of several; None where nothing is known of it. Raises ShapeError for an unknown dimension."""
    expr: Any = parse_size(name)
    if expr.is_Symbol:
        known = ", ".join(map(str, dimensions)) or "no dimensions"
        raise ShapeError(f"expected sizes over {known}, got one over {name!r}: give it a range")
    if isinstance(expr, (sympy.Max, sympy.Min)):
        return _extremes(expr, dimensions)
    if isinstance(expr, sympy.floor):
        return _divided(Polynomial.of(expr.args[0]), 1)
    if isinstance(expr, sympy.ceiling):
        return _divided(Polynomial.of(expr.args[0]).scaled(-1), -1)
    if isinstance(expr, sympy.Mod):
        return _remainder(Polynomial.of(expr.args[0]), constant(Polynomial.of(expr.args[1])))
    return None


def _extremes(expr: Any, dimensions: Dimensions) -> tuple[_Case, ...]:
    """The arguments of a Max or Min, less those that another one is never behind."""
    last = Sign.NOT_NEGATIVE if isinstance(expr, sympy.Max) else Sign.NOT_POSITIVE
    kept: list[Polynomial] = []
    for each in map(Polynomial.of, expr.args):
        if any(sign_of(other - each, dimensions) in (last, Sign.ZERO) for other in kept):
            continue
        kept = [other for other in kept if sign_of(each - other, dimensions) not in (last, Sign.ZERO)]
        kept.append(each)
    return tuple(_Case(each, {}) for each in kept)


def _divided(expr: Polynomial, factor: int) -> tuple[_Case, ...]:
    """`factor` times floor of a polynomial: what is left of it once the remainder is gone."""
    top = whole(expr)
    if not _is_whole(top):
        name = f"{FRACTION}{expr}"
        return (_Case((expr - generator(name)).scaled(factor), {name: (0, 1)}),)
    divisor = int(top.terms[0][1] / expr.terms[0][1])
    name = f"remainder of {top} by {divisor}"
    return (_Case((top - generator(name)).scaled(Fraction(factor, divisor)), {name: (0, divisor - 1)}),)


def _remainder(top: Polynomial, by: Rational | None) -> tuple[_Case, ...] | None:
    """A remainder by a number."""
    if not isinstance(by, int) or by <= 0 or not _is_whole(top):
        return None
    name = f"remainder of {top} by {by}"
    return (_Case(generator(name), {name: (0, by - 1)}),)


def _is_whole(expr: Polynomial) -> bool:
    """Whether a polynomial is a whole number at every point."""
    known = all(parse_size(name).is_integer is True for name in generators(expr))  # type: ignore[union-attr]
    return known and all(each.denominator == 1 and all(power > 0 for _, power in monomial) for monomial, each in expr.terms)
