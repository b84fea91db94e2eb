"""Equations between sizes, solved: what dimensions have to do with one another.

Each equation is written over what is known so far, and solved for one dimension: one that then is whole and a sum of others, nothing taken
away, comes first, and of such the one declared last. What is found narrows the range of the others. An equation that can be
solved for none waits until one of its dimensions is known. The effort follows the number of equations, not of their pairs.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fractions import Fraction
from functools import lru_cache
from math import ceil, floor
from typing import NamedTuple

import sympy

from lowtide.errors import ShapeError
from lowtide.ir.shapes.dimension import Dimension, Dimensions
from lowtide.ir.shapes.polynomial import Monomial, Polynomial, Rational, generator
from lowtide.ir.sizes import Size
from lowtide.ir.text.sizes import parse_size
from research.shapes.terms import constant, generators, replaced


class Equation(NamedTuple):
    """Two sizes that are equal, and why."""

    first: Size
    second: Size
    because: str  # the node, for messages

    def __str__(self) -> str:
        return f"{self.because}: {self.first} equals {self.second}"


@dataclass(frozen=True)
class ShapeGraph:
    """Common dimensions, and what all others are over them."""

    dimensions: Dimensions  # that are left, their ranges narrowed to what those of the others allow
    meanings: Mapping[str, Polynomial]  # by dimension that is gone
    unsolved: tuple[Equation, ...]  # that hold, too, and say of no dimension what it is
    gone: Dimensions = ()  # those that have meanings, with their ranges

    def simplified(self, size: Size) -> Size:
        """A size over the common dimensions."""
        return size if isinstance(size, int) else substituted(Polynomial.of(size), self.meanings).size


def solved(given: Iterable[Equation], dimensions: Dimensions) -> ShapeGraph:
    """Equations between sizes over `dimensions`, solved. Raises ShapeError where they contradict one another or a range."""
    solver = _Solver(dimensions)
    for equation in dict.fromkeys(given):
        solver.add(equation)
    return solver.shapes()


def substituted(polynomial: Polynomial, meanings: Mapping[str, Polynomial]) -> Polynomial:
    """With what dimensions mean in their places, within functions too."""
    touched = [name for name in generators(polynomial) if not meanings.keys().isdisjoint(_symbols(name))]
    return replaced(polynomial, {name: meanings.get(name) or _within(name, meanings) for name in touched}) if touched else polynomial


def _within(name: str, meanings: Mapping[str, Polynomial]) -> Polynomial:
    """A function of dimensions with what they mean in their places."""
    expr = sympy.sympify(parse_size(name))
    instead = {symbol: meanings[str(symbol)].size for symbol in expr.free_symbols if str(symbol) in meanings}
    return Polynomial.of(expr.subs(instead, simultaneous=True))


@lru_cache(maxsize=4096)
def _symbols(name: str) -> frozenset[str]:
    """The dimensions within a generator."""
    size = parse_size(name)
    return frozenset() if isinstance(size, int) else frozenset(map(str, size.free_symbols))


class _Solver:
    """Equations solved so far."""

    def __init__(self, dimensions: Dimensions) -> None:
        self._ranges = {each.name: each for each in dimensions}
        self._rank = {each.name: position for position, each in enumerate(dimensions)}
        self._meanings: dict[str, Polynomial] = {}
        self._waiting: defaultdict[str, dict[Equation, None]] = defaultdict(dict)  # by dimension

    def add(self, equation: Equation) -> None:
        """Take one more equation into account, and those that waited for what it says."""
        pending = deque([equation])
        while pending:
            current = pending.popleft()
            difference = self._difference(current)
            if constant(difference) == 0:
                continue
            if constant(difference) is not None:
                raise ShapeError(f"{current.because}: expected equal sizes, got {current.first} and {current.second}")
            name = self._solvable(difference)
            if name is None:
                for each in _names(difference):
                    self._waiting[each][current] = None
            else:
                self._meanings[name] = _solution(name, difference)
                self._narrow(self._meanings[name], self._ranges[name], current)
                pending += self._waiting.pop(name, {})

    def shapes(self) -> ShapeGraph:
        """All that is known. What was found last is over common dimensions alone, what was found before it over these and the later."""
        meanings: dict[str, Polynomial] = {}
        for name in reversed(self._meanings):
            meanings[name] = substituted(self._meanings[name], meanings)
        left = tuple(each for name, each in self._ranges.items() if name not in meanings)
        gone = tuple(each for name, each in self._ranges.items() if name in meanings)
        waiting = dict.fromkeys(each for some in self._waiting.values() for each in some)
        return ShapeGraph(left, meanings, tuple(each for each in waiting if self._difference(each).terms), gone)

    def _difference(self, equation: Equation) -> Polynomial:
        """What is 0, over what is not known yet, without factors that are nowhere 0."""
        difference = Polynomial.of(equation.first) - Polynomial.of(equation.second)
        while known := [name for name in _names(difference) if name in self._meanings]:
            for name in known:  # so that long chains of meanings are walked once
                self._meanings[name] = substituted(self._meanings[name], self._meanings)
            difference = substituted(difference, self._meanings)
        shared = {name: min(dict(monomial).get(name, 0) for monomial, _ in difference.terms) for name in generators(difference)}
        for name, power in shared.items():
            if power and name in self._ranges and self._ranges[name].least > 0:
                difference = difference * generator(name) ** -power
        return difference

    def _solvable(self, difference: Polynomial) -> str | None:
        """The dimension to solve for: one that stands by itself in one term, and in no other."""
        positions: defaultdict[str, list[Monomial]] = defaultdict(list)
        for monomial, _ in difference.terms:
            for name in {each for expr, _ in monomial for each in _symbols(expr)}:
                positions[name].append(monomial)
        alone = [name for name, monomials in positions.items() if name in self._ranges and monomials == [((name, 1),)]]
        return max(alone, key=lambda name: (_is_plain(_solution(name, difference)), self._rank[name]), default=None)

    def _narrow(self, meaning: Polynomial, range_: Dimension, because: Equation) -> None:
        """What the range of a dimension says of the only one that it is a multiple of, give or take a number."""
        terms = dict(meaning.terms)
        offset = terms.pop((), 0)
        if not terms and not range_.least <= offset <= range_.most:
            raise ShapeError(f"{because}: expected {range_}, got {offset}")
        if len(terms) != 1:
            return
        ((monomial, factor),) = terms.items()
        ((name, power), *more) = monomial
        if power != 1 or more or name not in self._ranges:
            return
        least, most = _within_range(range_, offset, factor)
        other = self._ranges[name]
        if max(least, other.least) > min(most, other.most):
            raise ShapeError(f"{because}: expected numbers for both {range_} and {other}, got ranges that have none in common")
        self._ranges[name] = Dimension(name, max(least, other.least), min(most, other.most))


def _names(polynomial: Polynomial) -> set[str]:
    return {name for expr in generators(polynomial) for name in _symbols(expr)}


def _solution(name: str, difference: Polynomial) -> Polynomial:
    """What a dimension is where a difference that it stands in by itself is 0."""
    alone = ((name, 1),)
    factor = Fraction(dict(difference.terms)[alone])
    return Polynomial(tuple(term for term in difference.terms if term[0] != alone)).scaled(-1 / factor)


def _is_plain(meaning: Polynomial) -> bool:
    """Whether it is a sum of whole multiples, nothing taken away."""
    return all(each > 0 and each.denominator == 1 and all(power > 0 for _, power in monomial) for monomial, each in meaning.terms)


def _within_range(range_: Dimension, offset: Rational, factor: Rational) -> tuple[int, int]:
    """The least and the most whole x for which factor * x + offset lies within a range."""
    ends = [Fraction(end - offset) / factor for end in (range_.least, range_.most)]
    return ceil(min(ends)), floor(max(ends))
