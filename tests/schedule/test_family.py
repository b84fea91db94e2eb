"""Orders for ranges: problems over dimensions at points, and which orders are kept, against brute force."""

from itertools import combinations

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.cost.memory import order_problem, simulate
from lowtide.cost.symbolic import SymbolicProblem, symbolic_problem
from lowtide.errors import ShapeError
from lowtide.ir.shapes.dimension import Dimension
from lowtide.ir.shapes.points import at
from lowtide.ir.text.graph_text import parse
from lowtide.problems import Status
from lowtide.problems.order import OrderProblem, Task
from lowtide.ranges.candidate import sample_points
from lowtide.ranges.planner import fewest, one_by_one
from lowtide.schedule.auto import schedule
from tests.listing import listing
from tests.problems import same
from tests.ranges import points
from tests.symbolic import symbolic_cases

unhurried = settings(deadline=None, max_examples=60)


@unhurried
@given(symbolic_cases())
def test_a_problem_at_a_point_is_that_of_its_numbers(symbolic):
    problem = symbolic.problem
    for point in points(symbolic.dimensions)[::3]:
        assert same(problem.at(point), symbolic.at(point).problem)


def crossing() -> SymbolicProblem:
    """Two branches that join, each with a large intermediate and a small result: at small `s` one goes first, at large `s` the other."""
    s = sympy.Symbol("s", integer=True, nonnegative=True)
    sizes = (s * s, 100 * s, 60, s, 1, 1)
    tasks = (
        Task("a", makes=(0,)), Task("b", makes=(1,)), Task("a small", makes=(2,), reads=(0,)), Task("b small", makes=(3,), reads=(1,)),
        Task("join", makes=(4,), reads=(2, 3)),
    )  # fmt: skip
    bare = OrderProblem.of([1] * 6, tasks, kept=[4])
    return SymbolicProblem((Dimension("s", 1, 1000),), bare, sizes, ())


def test_a_symbolic_problem_of_a_graph_is_that_of_the_graph_at_each_point():
    graph = listing()
    problem = symbolic_problem(graph, round_to=512)
    for number in (1, 7, 4096):
        point = {"S0": 12 * number, "S1": number}
        assert same(problem.at(point), order_problem(at(graph, point), round_to=512))


def test_a_reuse_that_only_one_point_permits_is_none():
    text = """\
def graph(  # s in 8..64
    x,  # float32[s] 4*s B input cpu
):
    a = aten.exp.default(x)  # float32[s] 4*s B activation cpu
    b = aten.make.default(a)  # float32[8] 32 B activation cpu; takes a by aten.make_.default
    c = aten.exp.default(b)  # float32[8] 32 B activation cpu; takes b by aten.exp_.default
    return (c,)
"""
    graph = parse(text)
    problem = symbolic_problem(graph)
    assert order_problem(at(graph, {"s": 8})).take_ids.tolist() == [0, 1]
    assert problem.at({"s": 8}).take_ids.tolist() == [1]
    assert problem.at({"s": 8}).take_output.tolist() == [-1, -1, 2]
    assert simulate(problem.at({"s": 8}), [0, 1, 2]).peak_bytes == 32 + 64


@given(st.lists(st.tuples(st.integers(0, 50), st.integers(0, 5000)), min_size=1, max_size=3), st.integers(4, 40))
def test_sampled_points_are_of_the_range_and_hold_its_corners(given_ranges, most):
    dimensions = tuple(Dimension(f"s{place}", least, least + more) for place, (least, more) in enumerate(given_ranges))
    found = sample_points(dimensions, most)
    assert len({tuple(point.values()) for point in found}) == len(found)
    assert found[0] == {each.name: each.most for each in dimensions}
    assert {each.name: each.least for each in dimensions} in found
    assert all(each.least <= point[each.name] <= each.most for point in found for each in dimensions)
    assert all(each.least == 0 or point[each.name] > 0 for point in found for each in dimensions)


def test_no_dimensions_are_one_point():
    assert sample_points(()) == ({},)


def test_wrong_points_and_sizes_are_refused():
    problem = crossing()
    with pytest.raises(ShapeError, match=r"dimension s: expected a number from 1 to 1000, got 1001"):
        problem.at({"s": 1001})
    cubes = (sympy.Symbol("s") ** 3, *problem.tensor_bytes[1:])
    huge = SymbolicProblem((Dimension("s", 1, 10**9),), problem.structure, cubes, ())
    with pytest.raises(ShapeError, match=r"at \{'s': 1000000000\}: expected sizes that add up to at most 2\*\*62 bytes, got more"):
        huge.at({"s": 10**9})


def test_the_answer_at_each_point_is_the_solvers():
    problem = crossing()
    for point in sample_points(problem.dimensions):
        assert schedule(problem.at(point)).status is Status.OPTIMAL


@st.composite
def peaks_of_orders(draw):
    """[orders, points], each order the best at some point."""
    points_of = draw(st.integers(1, 6))
    rows = draw(st.lists(st.lists(st.integers(1, 9), min_size=points_of, max_size=points_of), min_size=1, max_size=5))
    return np.array(rows, np.int64)


@unhurried
@given(peaks_of_orders(), st.sampled_from([1.0, 1.3]))
def test_as_few_orders_are_kept_as_stay_near_the_least(peaks, ratio):
    near = peaks <= peaks.min(axis=0) * ratio
    kept = fewest(near, peaks)
    enough = [
        chosen
        for size in range(1, len(peaks) + 1)
        for chosen in map(list, combinations(range(len(peaks)), size))
        if near[chosen].any(axis=0).all()
    ]
    assert kept in enough
    assert len(kept) == len(enough[0])
    assert peaks[kept].min(axis=0).sum() == min(peaks[each].min(axis=0).sum() for each in enough if len(each) == len(kept))
    served = one_by_one(near)
    assert near[served].any(axis=0).all()
