"""Bounds of a polynomial over a box by its Bernstein coefficients: it never leaves their range, and at corners it is one of them.

Over a unit box, x**k is a sum of the Bernstein polynomials of degree d with the weights C(i, k) / C(d, k). Those polynomials are nowhere
negative and add up to 1. All is done in whole numbers of any length; positive factors, which leave signs alone, are not divided out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from itertools import product
from math import comb, lcm, prod
from typing import Any, TypeAlias

import numpy as np
from numpy.typing import NDArray

from lowtide.ir.shapes.polynomial import Polynomial
from research.shapes.terms import generators, whole

Range: TypeAlias = "tuple[int, int]"  # the least and the most, both reached
_MOST_COEFFICIENTS = 4096


def coefficients(polynomial: Polynomial, ranges: Mapping[str, Range]) -> NDArray[Any] | None:
    """By axis, a generator ascending: positive multiples of the Bernstein coefficients over the box; None where there are too many.

    All are multiples by the same factor. Exponents must not be negative.
    """
    powers = [dict(monomial) for monomial, _ in polynomial.terms]
    degrees = {name: max(each.get(name, 0) for each in powers) for name in generators(polynomial)}
    if prod(degree + 1 for degree in degrees.values()) > _MOST_COEFFICIENTS:
        return None
    return elevated(whole(polynomial), ranges, degrees)


def elevated(polynomial: Polynomial, ranges: Mapping[str, Range], degrees: Mapping[str, int]) -> NDArray[Any]:
    """The same of at least its own degrees, by axis in the order of `degrees`: for all whole polynomials multiples by the same factor."""
    result = np.zeros([degree + 1 for degree in degrees.values()], dtype=object)
    for monomial, each in polynomial.terms:
        powers = dict(monomial)
        result[tuple(powers.get(name, 0) for name in degrees)] = int(each)
    for axis, (name, degree) in enumerate(degrees.items()):
        result = np.moveaxis(np.tensordot(_change(degree, *ranges[name]), result, axes=([1], [axis])), 0, axis)
    return result


def corners(table: NDArray[Any]) -> list[int]:
    """Of those coefficients the ones that are multiples of the polynomial's values at the corners of the box."""
    return [int(table[at]) for at in product(*({0, extent - 1} for extent in table.shape))]


def weights(degree: int, at: int) -> Sequence[int]:
    """By power k up to `degree`: what x**k over the unit interval adds to coefficient number `at`, times what makes all of them whole."""
    common = lcm(*(comb(degree, power) for power in range(degree + 1)))
    return [comb(at, power) * common // comb(degree, power) for power in range(degree + 1)]


@lru_cache(maxsize=4096)
def _change(degree: int, least: int, most: int) -> NDArray[Any]:
    """[degree + 1, degree + 1] from powers of x to Bernstein coefficients over `least` to `most`."""
    to_unit = np.zeros((degree + 1, degree + 1), dtype=object)
    for power in range(degree + 1):
        for k in range(power + 1):
            to_unit[k, power] = comb(power, k) * least ** (power - k) * (most - least) ** k
    from_unit: NDArray[Any] = np.array([weights(degree, at) for at in range(degree + 1)], dtype=object)
    changed: NDArray[Any] = from_unit @ to_unit
    return changed
