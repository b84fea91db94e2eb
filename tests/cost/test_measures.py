"""What is measured at points of a range, and what is said in between."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.cost.measures import Grid, Measures
from lowtide.errors import CheckError, ShapeError
from lowtide.ir.graph import Graph, Kind, Node, Storage, Value
from lowtide.ir.shapes.dimension import Dimension
from tests.ranges import S0, S1

DIMENSIONS = (Dimension("s0", 1, 16), Dimension("s1", 4, 64))
ENDS = ((1, 16), (4, 64))


@st.composite
def grids(draw, least=0):
    """Grids over both dimensions, their points in any order, with at least so many numbers between the ends."""
    within = [st.lists(st.integers(one + 1, other - 1), min_size=least, max_size=3) for one, other in ENDS]
    numbers = [sorted({*ends, *draw(each)}) for ends, each in zip(ENDS, within, strict=True)]
    points = [{"s0": one, "s1": other} for one in numbers[0] for other in numbers[1]]
    return draw(st.permutations(points))


def node(name, size, *inputs):
    return Node("aten.make.default", inputs, (Value(name, Storage(name, size, "cpu", Kind.ACTIVATION), "uint8", (size,), (1,)),))


def graph():
    x = Value("x", Storage("x", 4 * S0 * S1, "cpu", Kind.INPUT), "uint8", (4 * S0 * S1,), (1,))
    first = node("a", S0 * S1**2, x)
    return Graph((x,), (first, node("b", 8, first.outputs[0]), node("c", S0, x)), first.results, DIMENSIONS)


ANY = st.tuples(*(st.integers(*ends) for ends in ENDS)).map(lambda numbers: dict(zip(("s0", "s1"), numbers, strict=True)))


@given(grids(), st.data())
@settings(deadline=None)
def test_at_a_point_of_the_grid_is_what_was_measured_there(points, data):
    spaces = data.draw(st.lists(st.lists(st.integers(0, 2**40), min_size=3, max_size=3), min_size=len(points), max_size=len(points)))
    times = np.array(spaces, np.float64) / 7
    found = Measures.of(graph(), points, spaces, times)
    for point, expected, us in zip(points, spaces, times, strict=True):
        said = found.workspaces_at(point)
        assert all(one <= other <= one * 1.001 + 1 for one, other in zip(expected, said, strict=True))
        assert found.times_at(point) == tuple(us.tolist())


@given(grids(least=1), ANY, st.tuples(*[st.integers(0, 9)] * 4))
@settings(deadline=None)
def test_what_grows_evenly_is_exact_everywhere(points, point, factors):
    a, b, c, d = factors
    bytes_at = lambda at: 2**20 * (a + b * at["s0"] + c * at["s1"] + d * at["s0"] * at["s1"])  # noqa: E731
    found = Measures.of(graph(), points, [[bytes_at(at), 7, 0] for at in points])
    assert found.workspaces_at(point) == (bytes_at(point), 7, 0)


@given(grids(), ANY, st.sampled_from([1, 7, 16]), st.sampled_from([0.3, 0.5, 1, 2]))
@settings(deadline=None)
def test_what_grows_in_steps_or_ever_slower_is_never_below_in_between(points, point, step, power):
    """As the workspaces of kernels that work in tiles, or on one part for each thread."""
    bytes_at = lambda at: 2**20 * step * -(-at["s0"] // step) + int(2**20 * at["s1"] ** power)  # noqa: E731
    found = Measures.of(graph(), points, [[bytes_at(at), bytes_at(at) // 3, 0] for at in points])
    for at in (point, *points):
        said = found.workspaces_at(at)
        assert said[0] >= bytes_at(at)
        assert said[1] >= bytes_at(at) // 3
        assert at is point or said == (bytes_at(at), bytes_at(at) // 3, 0)


@given(grids(), ANY, st.integers(1, 3))
@settings(deadline=None)
def test_copies_of_what_a_node_makes_or_reads_are_exact_everywhere(points, point, times):
    made = lambda at: times * at["s0"] * at["s1"] ** 2  # noqa: E731
    read = lambda at: times * 4 * at["s0"] * at["s1"]  # noqa: E731
    found = Measures.of(graph(), points, [[made(at), made(at), read(at)] for at in points])
    assert found.workspaces_at(point) == (made(point), made(point), read(point))
    assert len(found.columns_at(point)) == 2


@given(grids(), ANY, st.integers(1, 3), st.integers(0, 2**17))
@settings(deadline=None)
def test_copies_with_room_for_threads_beside_them_are_exact_everywhere(points, point, times, room):
    made = lambda at: times * 2**10 * at["s0"] * at["s1"] ** 2 + room  # noqa: E731
    found = Measures.of(graph(), points, [[made(at), 0, 0] for at in points])
    assert made(point) <= found.workspaces_at(point)[0] <= made(point) * 1.001 + 1


@given(grids(), ANY)
@settings(deadline=None)
def test_what_grows_faster_is_never_below_in_between(points, point):
    found = Measures.of(graph(), points, [[0, 0, at["s0"] ** 2] for at in points])
    assert found.workspaces_at(point)[2] >= point["s0"] ** 2


@given(grids(), ANY, st.tuples(st.floats(0.01, 9), *[st.just(0) | st.floats(1, 3)] * 2))
@settings(deadline=None)
def test_times_that_are_products_of_powers_are_exact_everywhere(points, point, powers):
    factor, one, other = powers
    us = lambda at: factor * at["s0"] ** one * at["s1"] ** other  # noqa: E731
    found = Measures.of(graph(), points, np.zeros((len(points), 3)), [[us(at), 1, 0] for at in points]).times_at(point)
    assert found == pytest.approx((us(point), 1, 0))


@given(grids(), ANY, st.tuples(*[st.floats(0.01, 9)] * 3))
@settings(deadline=None)
def test_times_of_a_launch_and_of_bytes_are_exact_everywhere(points, point, factors):
    launch, one, both = factors
    us = lambda at: launch + one * at["s0"] + both * at["s0"] * at["s1"]  # noqa: E731
    found = Measures.of(graph(), points, np.zeros((len(points), 3)), [[us(at), 1, 0] for at in points]).times_at(point)
    assert found[0] == pytest.approx(us(point))


def test_times_come_later_or_never():
    points = [{"s0": one, "s1": other} for one in (16, 1) for other in (4, 64)]
    found = Measures.of(graph(), points, np.zeros((4, 3)))
    assert found.times_at(points[0]) == ()
    assert found.timed(points, [[16, 1, 0], [16, 1, 2], [1, 1, 0], [1, 1, 2]]).times_at({"s0": 4, "s1": 4}) == (pytest.approx(4), 1, 0)


def test_what_is_no_grid_is_refused():
    corners = [{"s0": one, "s1": other} for one in (1, 16) for other in (4, 64)]
    for points, match in (
        (corners[:3], "expected a grid, each of 4 points once; got 3"),
        ([*corners, corners[0]], "expected a grid, each of 4 points once; got 5"),
        (corners[:2], "expected both ends of s0 in 1..16 among them, got 1"),
        ([], "expected both ends of s0 in 1..16 among them, got none"),
        ([{"s0": 99, "s1": 4}], "dimension s0: expected a number from 1 to 16, got 99"),
    ):
        with pytest.raises(ShapeError, match=match):
            Grid.of(DIMENSIONS, points)
    with pytest.raises(CheckError, match=r"workspace_bytes: expected 4 points and 3 nodes, got an array of shape \(4, 2\)"):
        Measures.of(graph(), corners, np.zeros((4, 2)))
    with pytest.raises(CheckError, match="node_us: expected 4 points"):
        Measures.of(graph(), corners, np.zeros((4, 3)), np.zeros((3, 3)))


def test_a_graph_of_numbers_has_one_point():
    x = Value("x", Storage("x", 4, "cpu", Kind.INPUT), "uint8", (4,), (1,))
    found = Measures.of(Graph((x,), (node("a", 8, x),), ()), [{}], [[5]], [[2.5]])
    assert (found.workspaces_at({}), found.times_at({})) == ((5,), (2.5,))
