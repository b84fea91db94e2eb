"""Conditions on dimensions against sympy's own substitution, and the part of a range in which they hold."""

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloorDiv

from lowtide.errors import FormatError
from lowtide.ir.shapes.conditions import Condition, all_hold, part_of_range
from lowtide.ir.shapes.dimension import Dimension
from tests.ranges import S0, S1, SIZES, dimensions, points, value

KINDS = {sympy.Eq: int.__eq__, sympy.Ne: int.__ne__, sympy.Lt: int.__lt__, sympy.Le: int.__le__, sympy.Gt: int.__gt__, sympy.Ge: int.__ge__}


@given(SIZES, SIZES, st.sampled_from(sorted(KINDS, key=str)), dimensions())
def test_a_condition_holds_where_sympy_says_so(left, right, kind, ranges):
    holds = all_hold([Condition(kind(left, right))], ranges)
    for point in points(ranges)[::5]:
        assert holds(point) == KINDS[kind](int(value(left, point)), int(value(right, point)))


def test_words_between_relations():
    ranges = (Dimension("s0", 0, 9), Dimension("s1", 0, 9))
    relation = sympy.Or(sympy.And(S0 > 3, S1 < 2), sympy.Not(sympy.Eq(FloorDiv(S0, 2), S1)), evaluate=False)
    holds = all_hold([Condition(relation), Condition(sympy.true)], ranges)
    for point in points(ranges):
        s0, s1 = point["s0"], point["s1"]
        assert holds(point) == ((s0 > 3 and s1 < 2) or s0 // 2 != s1)


def test_the_part_of_a_range_around_a_point():
    ranges = (Dimension("s0", 0, 9000), Dimension("s1", 0, 9))
    holds = all_hold([Condition(S0 < 16), Condition(S0 + S1 > 6)], ranges)
    assert part_of_range(ranges, holds, {"s0": 5, "s1": 4}) == (Dimension("s0", 3, 15), Dimension("s1", 2, 9))


def test_what_is_no_whole_number_does_not_hold():
    holds = all_hold([Condition(sympy.Eq(S0 / 2, S0 / 2, evaluate=False))], (Dimension("s0", 0, 9),))
    assert [holds({"s0": number}) for number in range(4)] == [True, False, True, False]


def test_what_is_no_relation_is_refused():
    with pytest.raises(FormatError, match="expected a relation of sizes"):
        all_hold([Condition(sympy.Xor(S0 > 1, S0 > 2, evaluate=False))], (Dimension("s0", 0, 9),))
