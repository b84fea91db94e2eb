"""Random sizes over named dimensions, their ranges, and the slow way to know what they are: sympy's own substitution."""

from __future__ import annotations

from itertools import product
from typing import Any

import sympy
from hypothesis import strategies as st

from lowtide.ir.shapes.dimension import Dimension

S0, S1 = sympy.symbols("s0 s1", integer=True, nonnegative=True)
LEAVES = st.integers(0, 20).map(sympy.Integer) | st.sampled_from([S0, S1])


def _grown(inner: Any, functions: bool) -> Any:
    sums = (
        st.builds(lambda a, b: a + b, inner, inner)
        | st.builds(lambda a, b: a - b, inner, inner)
        | st.builds(lambda a, b: a * b, inner, inner)
        | st.builds(lambda a, b: a**b, inner, st.integers(1, 3))
    )
    if not functions:
        return sums
    return (
        sums
        | st.builds(lambda a, b: a // b, inner, st.integers(1, 9))
        | st.builds(lambda a, b: sympy.ceiling(a / b), inner, st.integers(1, 9))
        | st.builds(sympy.Max, inner, inner)
        | st.builds(sympy.Min, inner, inner)
        | st.builds(sympy.Mod, inner, st.integers(1, 9))
    )


POLYNOMIALS = st.recursive(LEAVES, lambda inner: _grown(inner, False), max_leaves=6)
SIZES = st.recursive(LEAVES, lambda inner: _grown(inner, True), max_leaves=6)


@st.composite
def dimensions(draw: st.DrawFn, most: int = 6) -> tuple[Dimension, ...]:
    """Small ranges of s0 and s1, so that all points can be looked at."""
    leasts = [draw(st.integers(0, 5)) for _ in range(2)]
    return tuple(Dimension(f"s{place}", least, least + draw(st.integers(0, most))) for place, least in enumerate(leasts))


def points(ranges: tuple[Dimension, ...]) -> list[dict[str, int]]:
    """All of them."""
    return [
        dict(zip((each.name for each in ranges), numbers, strict=True))
        for numbers in product(*(range(each.least, each.most + 1) for each in ranges))
    ]


def value(size: Any, point: dict[str, int]) -> sympy.Rational:
    """A size at a point, by sympy, which leaves some `Min(1, 2)` as they are unless it is told."""
    return sympy.Rational(sympy.sympify(size).subs({S0: point.get("s0", 0), S1: point.get("s1", 0)}).doit())
