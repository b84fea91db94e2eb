"""Comparison over ranges: every answer against all points of small ranges and random points of large ones."""

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.errors import ShapeError
from lowtide.ir.shapes.dimension import Dimension
from lowtide.ir.shapes.polynomial import Polynomial
from research.shapes import sign
from research.shapes.compare import Comparison, compare
from tests.ranges import POLYNOMIALS, S0, S1, SIZES, dimensions, points, value

unhurried = settings(deadline=None, max_examples=150)
WIDE = (Dimension("s0", 1, 4096), Dimension("s1", 2, 64))


def holds(answer, difference):
    return {
        Comparison.EQUAL: difference == 0,
        Comparison.AT_MOST: difference <= 0,
        Comparison.AT_LEAST: difference >= 0,
        Comparison.UNKNOWN: True,
    }[answer]


@unhurried
@given(SIZES, SIZES, dimensions())
def test_what_is_proven_holds_at_every_point(first, second, ranges):
    answer = compare(first, second, ranges)
    assert all(holds(answer, value(first, point) - value(second, point)) for point in points(ranges))


@unhurried
@given(SIZES, SIZES, st.integers(1, 4096), st.integers(2, 64))
def test_what_is_proven_holds_at_random_points_of_a_wide_range(first, second, s0, s1):
    answer = compare(first, second, WIDE)
    assert holds(answer, value(first, {"s0": s0, "s1": s1}) - value(second, {"s0": s0, "s1": s1}))


@unhurried
@given(POLYNOMIALS, POLYNOMIALS, dimensions(most=3))
def test_polynomials_over_small_ranges_are_always_decided(first, second, ranges):
    """There the boxes get down to points, so an unknown answer means that there is none. 0 everywhere may be found to be 0 or less."""
    differences = [value(first, point) - value(second, point) for point in points(ranges)]
    answer = compare(first, second, ranges)
    assert (answer is Comparison.UNKNOWN) == (min(differences) < 0 < max(differences))
    assert all(holds(answer, each) for each in differences)


@given(SIZES, SIZES, dimensions())
@settings(deadline=None, max_examples=50)
def test_exchanged_sizes_give_the_opposite_answer(first, second, ranges):
    opposite = {Comparison.AT_MOST: Comparison.AT_LEAST, Comparison.AT_LEAST: Comparison.AT_MOST}
    answer = compare(first, second, ranges)
    assert compare(second, first, ranges) == opposite.get(answer, answer)


@pytest.mark.parametrize(
    ("first", "second", "expected"),
    [
        (11008 * S1, 12288 * S1, Comparison.AT_MOST),
        (589824 * S0, 48 * S0 * S1**2, Comparison.AT_LEAST),  # at S1 = 64 it is least
        (48 * S0 * S1**2, 12 * S0 * S1, Comparison.AT_LEAST),
        (S0 + S1, S1 + S0, Comparison.EQUAL),
        (S0, S1, Comparison.UNKNOWN),
        (S0 * (S0 - 1), 0, Comparison.AT_LEAST),
        (S0**2 + 2, 3 * S0, Comparison.AT_LEAST),  # less than 0 only between 1 and 2
        ((S0 - S1) ** 2, 0, Comparison.AT_LEAST),
        ((S0 - S1) ** 2 * (S0 - 5000), 0, Comparison.AT_MOST),
        (sympy.floor(S0 / 2), S0, Comparison.AT_MOST),
        (2 * sympy.floor(S0 / 2) + sympy.Mod(S0, 2), S0, Comparison.EQUAL),
        (sympy.ceiling(S0 / 512) * 512, S0, Comparison.AT_LEAST),
        (sympy.Max(1, S0), S0, Comparison.EQUAL),
        (sympy.Max(S0, S1), S1, Comparison.AT_LEAST),
        (sympy.Min(S0, S1), sympy.Max(S0, S1), Comparison.AT_MOST),
        (S0 / 2, S0, Comparison.AT_MOST),
        (S0 / S1, S0, Comparison.AT_MOST),
        (sympy.floor(S0 / S1), S0, Comparison.AT_MOST),
        (sympy.Mod(S0, S1), S0, Comparison.UNKNOWN),
        (7, 7, Comparison.EQUAL),
        (3, 7, Comparison.AT_MOST),
    ],
)
def test_cases(first, second, expected):
    assert compare(first, second, WIDE) == expected


def test_a_fraction_is_not_cut_as_whole_numbers_are():
    """Between 0 and 1 there is 1/2: floor(s0/s1) may lie below what both ends would say."""
    ranges = (Dimension("s0", 1, 3), Dimension("s1", 2, 2))
    part = sympy.floor(S0 / S1)
    assert compare(4 * (S0 / S1 - part) * (1 - S0 / S1 + part), 0, ranges) == Comparison.AT_LEAST
    assert compare(4 * (S0 / S1 - part) * (S0 / S1 - part - 1), 0, ranges) in (Comparison.AT_MOST, Comparison.UNKNOWN)


def test_a_whole_part_of_what_is_no_whole_number_is_not_that():
    ranges = (Dimension("s0", 1, 9), Dimension("s1", 0, 9))
    assert compare(sympy.floor(sympy.Max(S0 / 2, S1 / 3)), sympy.Max(S0 / 2, S1 / 3), ranges) != Comparison.EQUAL


def test_an_unknown_dimension_is_named():
    with pytest.raises(ShapeError, match=r"expected sizes over s0 in 1..4096, s1 in 2..64, got one over 's7'"):
        compare(sympy.Symbol("s7"), 3, WIDE)


def test_effort_is_bounded(monkeypatch):
    """What needs more boxes than there may be is unknown, at once."""
    looked = []
    counted = sign.coefficients
    monkeypatch.setattr(sign, "coefficients", lambda *given: looked.append(1) or counted(*given))
    difference = (S0**2 + S1**2 - 3 * S0 * S1 + 7) ** 2 + S0 * S1 - 1
    compare(difference, sympy.Integer(1000), (Dimension("s0", 0, 10**9), Dimension("s1", 0, 10**9)))
    assert len(looked) < 200


@unhurried
@given(SIZES, SIZES, SIZES, dimensions())
def test_polynomials_are_a_ring(first, second, third, ranges):
    one, two, three = map(Polynomial.of, (first, second, third))
    assert (one + two) * three == one * three + two * three
    assert one - one == Polynomial.of(0)
    assert all(value((one * two - three).size, point) == value(first * second - third, point) for point in points(ranges)[:4])
