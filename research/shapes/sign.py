"""The sign of a polynomial over a box of whole numbers: proven, or unknown.

In turn: a product that all terms share is taken out; at the least of each dimension the polynomial is written anew, where coefficients
of one sign prove one (which covers all that only grows); Bernstein coefficients of one sign prove one, and values of both signs at
corners prove that there is none. What is left is factored, then cut into smaller boxes, a bounded number of them.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any, TypeAlias

import sympy

from lowtide.ir.shapes.polynomial import Monomial, Polynomial, generator, number
from research.shapes.bernstein import Range, coefficients, corners
from research.shapes.terms import generators, replaced, whole

FRACTION = "fraction of "  # begins the names of generators that take all numbers from 0 to 1, not the whole ones alone
_MOST_BOXES = 64  # that one polynomial is cut into
Ranges: TypeAlias = "tuple[tuple[str, Range], ...]"  # by generator


class Sign(enum.Enum):
    """What is proven of all points of a box."""

    ZERO = "it is 0 everywhere"
    NOT_NEGATIVE = "it is 0 or more everywhere"
    NOT_POSITIVE = "it is 0 or less everywhere"
    UNKNOWN = "neither is proven"

    def reversed(self) -> Sign:
        """The sign of the same with its terms' signs changed."""
        return {Sign.NOT_NEGATIVE: Sign.NOT_POSITIVE, Sign.NOT_POSITIVE: Sign.NOT_NEGATIVE}.get(self, self)


def common_sign(signs: Iterable[Sign]) -> Sign:
    """What holds wherever one of several does, nobody knows which."""
    distinct = set(signs) - {Sign.ZERO}
    return distinct.pop() if len(distinct) == 1 else Sign.UNKNOWN if distinct else Sign.ZERO


@lru_cache(maxsize=65536)
def sign_over(polynomial: Polynomial, ranges: Ranges) -> Sign:
    """The sign of a polynomial whose generators take every whole number of their ranges."""
    box = dict(ranges)
    fixed = {name: number(box[name][0]) for name in generators(polynomial) if box[name][0] == box[name][1]}
    if any(box[name][0] <= 0 and power < 0 for monomial, _ in polynomial.terms for name, power in monomial):
        return Sign.UNKNOWN  # a division by 0 at some point
    rest = replaced(polynomial, fixed)
    shared = _shared_powers(rest, box)
    if shared:  # where the product is 0, so is all; everywhere else what is left decides
        rest = Polynomial(tuple(sorted((_divided(monomial, shared), each) for monomial, each in rest.terms)))
        box.update({name: (1, box[name][1]) for name in shared if box[name][0] == 0 and not name.startswith(FRACTION)})
    if not rest.terms:
        return Sign.ZERO
    simple = _sign_of_numbers(each for _, each in _from_least(rest, box).terms)
    if simple is not Sign.UNKNOWN:
        return simple
    known = _bernstein(rest, box)
    if known is not None:
        return known
    factored = _by_factors(rest, tuple(box.items()))
    return factored if factored is not Sign.UNKNOWN else _by_boxes(rest, box)


def _sign_of_numbers(values: Iterable[Any]) -> Sign:
    """The one sign of all numbers, if they have one."""
    return common_sign(Sign.ZERO if each == 0 else Sign.NOT_NEGATIVE if each > 0 else Sign.NOT_POSITIVE for each in values)


def _shared_powers(polynomial: Polynomial, box: Mapping[str, Range]) -> dict[str, int]:
    """By generator that is never negative: its power in the largest product that all terms share."""
    least = {name: min(dict(monomial).get(name, 0) for monomial, _ in polynomial.terms) for name in generators(polynomial)}
    return {name: power for name, power in least.items() if power and box[name][0] >= 0}


def _divided(monomial: Monomial, shared: Mapping[str, int]) -> Monomial:
    powers = dict(monomial)
    return tuple(sorted((name, left) for name in {*powers, *shared} if (left := powers.get(name, 0) - shared.get(name, 0))))


def _from_least(polynomial: Polynomial, box: Mapping[str, Range]) -> Polynomial:
    """Of how much more than its least each generator is."""
    shifted = {name: generator(name) + number(box[name][0]) for name in generators(polynomial) if box[name][0]}
    return replaced(polynomial, shifted)


def _bernstein(polynomial: Polynomial, box: Mapping[str, Range]) -> Sign | None:
    """What Bernstein coefficients say over the whole box; None where more may be found by looking closer."""
    values = coefficients(polynomial, box)
    if values is None:
        return Sign.UNKNOWN
    sign = _sign_of_numbers(values.flat)
    if sign is Sign.UNKNOWN and _sign_of_numbers(corners(values)) is not Sign.UNKNOWN:
        return None
    return sign


def _by_factors(polynomial: Polynomial, ranges: Ranges) -> Sign:
    """The sign of the product of its factors; UNKNOWN where it has but one."""
    names = generators(polynomial)
    powers = {tuple(dict(monomial).get(name, 0) for name in names): int(each) for monomial, each in whole(polynomial).terms}
    leading, factors = sympy.Poly(powers, *sympy.symbols(f"x:{len(names)}")).factor_list()
    if len(factors) == 1 and factors[0][1] == 1:
        return Sign.UNKNOWN
    sign = _sign_of_numbers([leading])
    for factor, power in factors:
        factor_sign = Sign.NOT_NEGATIVE if power % 2 == 0 else sign_over(_of_terms(names, factor.terms()), ranges)
        if factor_sign is Sign.UNKNOWN or factor_sign is Sign.ZERO:
            return factor_sign
        sign = sign if factor_sign is Sign.NOT_NEGATIVE else sign.reversed()
    return sign


def _of_terms(names: tuple[str, ...], terms: Iterable[tuple[tuple[int, ...], Any]]) -> Polynomial:
    """What sympy gives by exponents."""
    named = ((tuple((name, power) for name, power in zip(names, powers, strict=True) if power), int(each)) for powers, each in terms)
    return Polynomial(tuple(sorted(named)))


def _by_boxes(polynomial: Polynomial, box: Mapping[str, Range]) -> Sign:
    """What holds in all of smaller and smaller boxes. Neighbours share no whole number: what lies between two is nobody's."""
    pending, seen, boxes = [dict(box)], {Sign.ZERO}, 0
    while pending:
        expr, boxes = pending.pop(), boxes + 1
        values = coefficients(polynomial, expr)
        if values is None or boxes > _MOST_BOXES:
            return Sign.UNKNOWN
        sign, exact = _sign_of_numbers(values.flat), _sign_of_numbers(corners(values))
        seen.add(exact)
        if common_sign(seen) is Sign.UNKNOWN:
            return Sign.UNKNOWN
        if sign is exact:
            continue
        halves = _halves(expr, generators(polynomial))
        if not halves:
            return Sign.UNKNOWN
        pending += halves
    return common_sign(seen)


def _halves(box: Mapping[str, Range], names: Iterable[str]) -> list[dict[str, Range]]:
    """A box cut in two along its longest side; none where only fractions are left."""
    longest = max((name for name in names if not name.startswith(FRACTION)), key=lambda name: box[name][1] - box[name][0], default="")
    if not longest or box[longest][0] == box[longest][1]:
        return []
    least, most = box[longest]
    middle = (least + most) // 2
    return [{**box, longest: (least, middle)}, {**box, longest: (middle + 1, most)}]
