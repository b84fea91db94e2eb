"""Conditions on dimensions against sympy's own substitution, and the part of a range in which they hold."""

import pytest
import sympy
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloorDiv

from lowtide.errors import FormatError
from lowtide.ir.shapes.conditions import Condition, all_hold, part_of_range, steps_of_range
from lowtide.ir.shapes.dimension import Dimension
from tests.ranges import S0, S1, SIZES, dimensions, points, value

KINDS = {sympy.Eq: int.__eq__, sympy.Ne: int.__ne__, sympy.Lt: int.__lt__, sympy.Le: int.__le__, sympy.Gt: int.__gt__, sympy.Ge: int.__ge__}


@given(SIZES, SIZES, st.sampled_from(sorted(KINDS, key=str)), dimensions())
def test_a_condition_holds_where_sympy_says_so(left, right, kind, ranges):
    holds = all_hold([Condition(kind(left, right))], ranges)
    for point in points(ranges)[::5]:
        sides = [value(side, point) for side in (left, right)]
        assert holds(point) == (all(side.is_Integer for side in sides) and KINDS[kind](*map(int, sides)))


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


@pytest.mark.parametrize(
    ("relations", "step"),
    [
        ([sympy.Eq(sympy.Mod(S0, 8), 0)], 8),
        ([sympy.Eq(sympy.Mod(S0, 4), 0), sympy.Eq(sympy.Mod(S0, 6), 0)], 12),
        ([sympy.Eq(8 * sympy.floor(S0 / 8), S0)], 8),
        ([sympy.Eq(2 * sympy.floor(S0 / 2), S0), S0 < 100], 2),
        ([sympy.Not(sympy.Ne(S0, 4 * FloorDiv(S0, 4), evaluate=False), evaluate=False)], 4),
        ([S0 < 100], None),
        ([sympy.Eq(S0, 48)], None),
    ],
)
def test_the_steps_that_conditions_leave(relations, step):
    ranges, conditions = (Dimension("s0", 8, 200),), [Condition(each) for each in relations]
    found = steps_of_range(conditions, ranges, all_hold(conditions, ranges), {"s0": 48})
    assert found == ({} if step is None else {"s0": step})


@given(st.integers(0, 40), st.integers(0, 60), st.integers(1, 9))
def test_an_extent_in_steps_is_counted(first, more, step):
    dimension = Dimension.of_extents("side", first, first + more, step)
    extents = list(range(first, first + more + 1, step))
    assert [dimension.extent(number) for number in range(dimension.least, dimension.most + 1)] == extents
    assert [each for each in range(first + more + 12) if dimension.number(each) is not None] == extents
    assert all(dimension.extent(dimension.number(each)) == each for each in extents)
