"""The matrix of a fixed order against playing the order at every point."""

from dataclasses import replace
from itertools import islice, permutations

import numpy as np
import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.cost.memory import order_problem, simulate
from lowtide.cost.symbolic import Footprints, SymbolicProblem, symbolic_problem
from lowtide.errors import CheckError, ShapeError
from lowtide.ir.graph import Graph
from lowtide.ir.shapes.dimension import Dimension
from lowtide.ir.shapes.points import at
from tests.graphs import graphs
from tests.listing import listing
from tests.problems import cases, topological_orders, unhurried
from tests.ranges import S0, SIZES, points
from tests.symbolic import Symbolic, symbolic_cases


def some_order(symbolic, random):
    return random.choice(list(islice(topological_orders(symbolic.case), 20)))


@unhurried
@given(symbolic_cases(), st.sampled_from([1, 4, 512]), st.randoms(use_true_random=False))
def test_the_peak_at_each_point_is_what_playing_the_order_there_gives(symbolic, round_to, random):
    problem, order = replace(symbolic.problem, round_to=round_to), some_order(symbolic, random)
    found = Footprints.of(problem, order)
    for point in points(symbolic.dimensions):
        assert found.at(point) == simulate(problem.at(point), order).peak_bytes


def _can_be_written(size):
    """Text holds no powers beyond 16."""
    return all(abs(power.exp) <= 16 for power in sympy.sympify(size).atoms(sympy.Pow) if power.exp.is_Integer)


@st.composite
def odd_cases(draw):
    """Sizes with quotients, Max and Mod in them."""
    case = draw(cases(5))
    numbers = {*case.tensor_bytes, case.resident_bytes}
    squares = SIZES.map(lambda size: size**2).filter(_can_be_written)
    size_of = {each: draw(squares) for each in sorted(numbers)}
    dimensions = tuple(Dimension(name, 1, 1 + draw(st.integers(0, 2))) for name in ("s0", "s1"))
    return Symbolic(case, dimensions, size_of)


@settings(deadline=None, max_examples=60)
@given(odd_cases(), st.sampled_from([1, 4]), st.randoms(use_true_random=False))
def test_the_same_for_sizes_that_are_no_polynomials(symbolic, round_to, random):
    problem, order = replace(symbolic.problem, round_to=round_to), some_order(symbolic, random)
    found = Footprints.of(problem, order)
    for point in points(symbolic.dimensions):
        assert found.at(point) == simulate(problem.at(point), order).peak_bytes


@unhurried
@given(symbolic_cases(), st.data(), st.randoms(use_true_random=False))
def test_measured_workspaces_count(symbolic, data, random):
    problem, order = symbolic.problem, some_order(symbolic, random)
    nodes = len(order)
    columns = data.draw(st.lists(st.integers(-1, 2), min_size=nodes, max_size=nodes))
    spaces = data.draw(st.lists(st.integers(0, 50), min_size=3, max_size=3))
    found = Footprints.of(problem, order, columns)
    for point in points(symbolic.dimensions)[:6]:
        at_point = problem.at(point)
        more = np.array([0 if column < 0 else spaces[column] for column in columns], np.int64)
        expected = simulate(replace(at_point, workspace_bytes=more), order).peak_bytes
        assert found.at(point, spaces) == expected


@settings(deadline=None, max_examples=40)
@given(graphs())
def test_the_footprint_of_a_graph_of_numbers_is_its_peak(graph):
    order = tuple(range(len(graph.nodes)))
    assert Footprints.of(symbolic_problem(graph), order).at({}) == simulate(order_problem(graph), order).peak_bytes


def test_no_row_is_below_another():
    graph = listing()
    order = tuple(range(len(graph.nodes)))
    found = Footprints.of(symbolic_problem(graph), order)
    assert all(not (one <= other).all() for one, other in permutations(found.matrix, 2))
    assert len(found.matrix) < len(order)
    for point in ({"S0": 12, "S1": 1}, {"S0": 49152, "S1": 4096}):
        assert found.at(point) == simulate(order_problem(at(graph, point)), order).peak_bytes


def test_wrong_points_columns_and_sizes_are_refused():
    problem = symbolic_problem(Graph((), (), (), (Dimension("s0", 1, 10**9),)))
    with pytest.raises(ShapeError, match="dimension s0: expected a number from 1"):
        Footprints.of(problem, ()).at({"s0": 0})
    with pytest.raises(CheckError, match="expected columns of 0 nodes, got 1"):
        Footprints.of(problem, (), [0])
    for resident in ((S0**3,), (S0**2,) * 5):
        huge = SymbolicProblem(problem.dimensions, problem.structure, (), resident)
        with pytest.raises(ShapeError, match=r"expected sizes that add up to at most 2\*\*62 bytes"):
            Footprints.of(huge, ()).at({"s0": 10**9})


def test_no_sizes_are_floats_unless_they_come_near_the_limit(monkeypatch):
    """A product of floats waits for threads, which takes milliseconds where processors are busy; one of integers does not."""
    problem = symbolic_problem(Graph((), (), (), (Dimension("s0", 1, 10**9),)))
    found = Footprints.of(SymbolicProblem(problem.dimensions, problem.structure, (), (S0**2,) * 4), ())
    asked = []
    monkeypatch.setattr(Footprints, "_adds_up_beyond", lambda self, vector: asked.append(vector) or False)
    assert found.at({"s0": 10**6}) == 4 * 10**12
    assert not asked
    assert found.at({"s0": 10**9}) == 4 * 10**18
    assert not asked
    assert Footprints.of(SymbolicProblem(problem.dimensions, problem.structure, (), (S0**2,) * 5), ()).at({"s0": 10**9})
    assert asked
