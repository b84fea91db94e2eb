"""What the algebra of sizes needs beyond sums and products: generators, and other polynomials in their places."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache
from math import lcm

from lowtide.errors import ShapeError
from lowtide.ir.shapes.polynomial import Monomial, Polynomial, Rational, total


@lru_cache(maxsize=65536)
def generators(polynomial: Polynomial) -> tuple[str, ...]:
    """What it is a polynomial of, ascending."""
    return tuple(sorted({name for monomial, _ in polynomial.terms for name, _ in monomial}))


def constant(polynomial: Polynomial) -> Rational | None:
    """The number that it is; None where it has generators."""
    if not polynomial.terms:
        return 0
    return polynomial.terms[0][1] if len(polynomial.terms) == 1 and not polynomial.terms[0][0] else None


def whole(polynomial: Polynomial) -> Polynomial:
    """A positive multiple with whole coefficients."""
    common = lcm(*(each.denominator for _, each in polynomial.terms))
    return polynomial if common == 1 else polynomial.scaled(common)


def replaced(polynomial: Polynomial, meaning: Mapping[str, Polynomial]) -> Polynomial:
    """With polynomials in place of generators. Raises ShapeError where one that is divided by would be no single product."""
    if not any(name in meaning for name in generators(polynomial)):
        return polynomial
    return total(_replaced(monomial, each, meaning) for monomial, each in polynomial.terms)


def _replaced(monomial: Monomial, each: Rational, meaning: Mapping[str, Polynomial]) -> Polynomial:
    result = Polynomial(((tuple((name, power) for name, power in monomial if name not in meaning), each),))
    for name, power in monomial:
        if name in meaning:
            if power < 0 and len(meaning[name].terms) != 1:
                raise ShapeError(f"expected {name} to be a product, since a size is divided by it; got {meaning[name]}")
            result = result * meaning[name] ** power
    return result
