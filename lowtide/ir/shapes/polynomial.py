"""Sizes as polynomials with rational coefficients: the form in which they are added and compared quickly and exactly.

A generator is a dimension, or a part that is no polynomial, such as "floor(s0/2)", by its text. Exponents may be negative, where a size
is divided by a dimension. Equal polynomials are equal and hash alike, so that what follows from them can be kept.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from fractions import Fraction
from functools import cached_property, lru_cache
from typing import Any, TypeAlias

import sympy

from lowtide.ir.sizes import Size
from lowtide.ir.text.sizes import canonical, parse_size

Monomial: TypeAlias = "tuple[tuple[str, int], ...]"  # (generator, exponent): generators ascending, no exponent of 0
Rational: TypeAlias = "int | Fraction"


def normal(size: Size) -> Size:
    """A size in the form in which equal ones are equal, but for rounding within. Raises FormatError for what is no size."""
    return size if type(size) is int else canonical(Polynomial.of(canonical(size)).size)


@dataclass(frozen=True)
class Polynomial:
    """A sum of monomials with coefficients other than 0."""

    terms: tuple[tuple[Monomial, Rational], ...] = ()  # by monomial, ascending
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_hash", hash(self.terms))

    def __hash__(self) -> int:
        return self._hash

    @staticmethod
    def of(size: Size) -> Polynomial:
        """The polynomial that a size is. Raises FormatError for what is no size."""
        return number(size) if isinstance(size, int) else _of_expression(size)

    @cached_property
    def size(self) -> Size:
        """As the graph's own noun: an int, or an expression."""
        pieces = (sympy.Mul(*(sympy.sympify(parse_size(name)) ** power for name, power in monomial), each) for monomial, each in self.terms)
        whole = sympy.Add(*pieces)
        return int(whole) if whole.is_Integer else whole

    def __add__(self, other: Polynomial) -> Polynomial:
        return total((self, other))

    def __sub__(self, other: Polynomial) -> Polynomial:
        return total((self, other.scaled(-1)))

    def __mul__(self, other: Polynomial) -> Polynomial:
        products = ((_times(one, two), a * b) for one, a in self.terms for two, b in other.terms)
        return _collected(products)

    def __pow__(self, exponent: int) -> Polynomial:
        if exponent < 0:
            ((monomial, each),) = self.terms
            return Polynomial(((tuple((name, power * exponent) for name, power in monomial), _reduced(Fraction(each) ** exponent)),))
        result = number(1)
        for _ in range(exponent):
            result = result * self
        return result

    def scaled(self, factor: Rational) -> Polynomial:
        return Polynomial(tuple((monomial, _reduced(each * factor)) for monomial, each in self.terms) if factor else ())

    def __str__(self) -> str:
        return str(self.size)


def number(value: Rational) -> Polynomial:
    return Polynomial((((), _reduced(value)),) if value else ())


def generator(name: str) -> Polynomial:
    return Polynomial(((((name, 1),), 1),))


def total(pieces: Iterable[Polynomial]) -> Polynomial:
    return _collected(term for piece in pieces for term in piece.terms)


@lru_cache(maxsize=65536)
def _of_expression(size: Any) -> Polynomial:
    read = canonical(size)
    return number(read) if isinstance(read, int) else _of_pieces(read)


def _of_pieces(piece: Any) -> Polynomial:
    """A canonical expression, taken apart as far as it is sums, products and powers."""
    if piece.is_Rational:
        return number(Fraction(int(piece.p), int(piece.q)))
    if piece.is_Add:
        return total(map(_of_pieces, piece.args))
    if piece.is_Mul:
        result = number(1)
        for factor in piece.args:
            result = result * _of_pieces(factor)
        return result
    if piece.is_Pow and piece.exp.is_Integer:
        base = _of_pieces(piece.base)
        if piece.exp > 0 or len(base.terms) == 1:
            return base ** int(piece.exp)
    return generator(str(piece))


def _collected(terms: Iterable[tuple[Monomial, Rational]]) -> Polynomial:
    sums: dict[Monomial, Rational] = {}
    for monomial, each in terms:
        sums[monomial] = sums.get(monomial, 0) + each
    return Polynomial(tuple(sorted((monomial, _reduced(each)) for monomial, each in sums.items() if each)))


def _times(one: Monomial, two: Monomial) -> Monomial:
    if not one or not two:
        return one or two
    powers = dict(one)
    for name, power in two:
        powers[name] = powers.get(name, 0) + power
    return tuple(sorted((name, power) for name, power in powers.items() if power))


def _reduced(value: Rational) -> Rational:
    return value.numerator if isinstance(value, Fraction) and value.denominator == 1 else value
