"""Graphs at points, sizes compiled and by sympy, and the text of graphs over dimensions."""

from itertools import pairwise

import pytest
import sympy
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._sympy.functions import FloorDiv

from lowtide.errors import FormatError, ShapeError
from lowtide.ir.check.graph_check import check_graph
from lowtide.ir.graph import Graph, Kind, Node, Storage, Value
from lowtide.ir.shapes.dimension import Dimension
from lowtide.ir.shapes.points import at, compiled, size_at, sizes_at, sizes_of
from lowtide.ir.sizes import contiguous_stride, product
from lowtide.ir.text.graph_text import parse, to_text
from research.shapes.compare import Comparison, compare
from tests.graphs import graphs
from tests.ranges import S0, S1, SIZES, dimensions, points, value

RANGES = (Dimension("s0", 1, 64), Dimension("s1", 16, 2048))
TEXT = """\
def graph(  # s0 in 1..64, s1 in 16..2048
    w,  # float32[8, 8] 256 B parameter cpu
    x,  # float32[s0, s1, 8] 32*s0*s1 B input cpu
):
    h = aten.view.default(x, (size("s0*s1"), 8))  # float32[s0*s1, 8] on x
    y = aten.mm.default(h, w)  # float32[s0*s1, 8] 32*s0*s1 B activation cpu
    half = aten.slice.Tensor(y, 0, size("floor(s1/2)"), size("s1"))  # float32[s1 - floor(s1/2), 8] offset[8*floor(s1/2)] on y
    z = fused.call.default(half, 3.5)  # float32[s1 - floor(s1/2), 8] 32*s1 - 32*floor(s1/2) B activation cpu
        def body(
            a,  # float32[s1 - floor(s1/2), 8] 32*s1 - 32*floor(s1/2) B activation cpu
        ):
            b = aten.relu.default(a)  # float32[s1 - floor(s1/2), 8] 32*s1 - 32*floor(s1/2) B activation cpu
            return (b,)
    return (z,)
"""
AT_2_17 = """\
def graph(
    w,  # float32[8, 8] 256 B parameter cpu
    x,  # float32[2, 17, 8] 1.06 KiB input cpu
):
    h = aten.view.default(x, (34, 8))  # float32[34, 8] on x
    y = aten.mm.default(h, w)  # float32[34, 8] 1.06 KiB activation cpu
    half = aten.slice.Tensor(y, 0, 8, 17)  # float32[9, 8] offset[64] on y
    z = fused.call.default(half, 3.5)  # float32[9, 8] 288 B activation cpu
        def body(
            a,  # float32[9, 8] 288 B activation cpu
        ):
            b = aten.relu.default(a)  # float32[9, 8] 288 B activation cpu
            return (b,)
    return (z,)
"""


def test_text_of_a_graph_over_dimensions_reads_back():
    graph = parse(TEXT)
    assert graph.dimensions == RANGES
    assert to_text(graph) == TEXT
    check_graph(graph)


def test_a_graph_at_a_point_has_numbers_everywhere():
    graph = at(parse(TEXT), {"s1": 17, "s0": 2})
    assert to_text(graph) == AT_2_17
    assert {type(size) for size in sizes_of(graph)} == {int}
    check_graph(graph)


@given(graphs())
@settings(deadline=None, max_examples=50)
def test_a_graph_of_numbers_is_itself(graph):
    assert at(graph, {}) is graph


@given(graphs(), st.integers(0, 9))
@settings(deadline=None, max_examples=50)
def test_all_that_is_no_size_stays(graph, number):
    """A dimension that no size is over changes nothing: views, versions, writes, control edges, reuses and bodies are as they were."""
    over = Graph(graph.inputs, graph.nodes, graph.outputs, (Dimension("s0", 0, 9),))
    found = at(over, {"s0": number})
    assert to_text(found) == to_text(graph)
    check_graph(found)
    pairs = zip(found.nodes, graph.nodes, strict=True)
    assert all(one is other for one, other in pairs if other.body is None and not other.after), "what holds none but numbers stays itself"


@st.composite
def chains(draw):
    """Graphs of a few nodes over random sizes, offsets and arguments."""
    values = []
    for place in range(draw(st.integers(1, 4))):
        shape = tuple(draw(st.lists(SIZES.map(lambda size: sympy.Max(size, 1)), min_size=1, max_size=3)))
        storage = Storage(f"v{place}", 4 * product(shape), "cpu", Kind.INPUT if place == 0 else Kind.ACTIVATION)
        values.append(Value(f"v{place}", storage, "float32", shape, contiguous_stride(shape)))
    nodes = [Node("aten.make.default", (before, (after.shape, draw(SIZES)), 2), (after,)) for before, after in pairwise(values)]
    return Graph((values[0],), tuple(nodes), (values[-1],), draw(dimensions()))


def numbers_of(graph):
    """The sizes of a chain in their order: shapes, then arguments."""
    for node in graph.nodes:
        (made,) = node.outputs
        yield from (*made.shape, *made.stride, made.offset, made.storage.nbytes, *node.args[1][0], node.args[1][1])


@given(chains(), st.data())
@settings(deadline=None, max_examples=60)
def test_every_size_at_a_point_is_what_sympy_says(graph, data):
    try:
        again = parse(to_text(graph))
    except FormatError:  # an expression of more symbols than text may hold
        return
    point = data.draw(st.sampled_from(points(graph.dimensions)))
    expected = [value(size, point) for size in numbers_of(graph)]
    assert list(numbers_of(at(graph, point))) == expected
    assert to_text(at(again, point)) == to_text(at(graph, point))


@given(st.lists(SIZES, max_size=4), dimensions())
@settings(deadline=None)
def test_compiled_sizes_are_what_sympy_says(sizes, ranges):
    for point in points(ranges)[::7]:
        assert sizes_at(sizes, ranges, point) == tuple(value(size, point) for size in sizes)


def test_sizes_never_overflow():
    huge = (Dimension("s0", 0, 10**17),)
    assert size_at(7 * S0**5, huge, {"s0": 10**17}) == 7 * 10**85


def test_sizes_are_compiled_once():
    assert compiled((S0 * 2, 3), RANGES) is compiled((S0 * 2, 3), RANGES)


@pytest.mark.parametrize(
    ("point", "message"),
    [
        (
            {"s0": 2, "s1": 17, "s9": 3},
            r"expected numbers for s0 in 1\.\.64, s1 in 16\.\.2048, got one for 's9'",
        ),
        ({"s0": 2}, r"expected a number for each of s0 in 1\.\.64, s1 in 16\.\.2048, got none for s1"),
        ({"s0": 65, "s1": 17}, "dimension s0: expected a number from 1 to 64, got 65: stay within, or declare a wider range"),
        ({"s0": 2.0, "s1": 17}, "dimension s0: expected a whole number, got 2.0"),
        ({"s0": True, "s1": 17}, "dimension s0: expected a whole number, got True"),
    ],
)
def test_a_wrong_point_is_refused(point, message):
    with pytest.raises(ShapeError, match=message):
        at(parse(TEXT), point)


@pytest.mark.parametrize(
    ("size", "message"),
    [
        (S0 / 2, "size s0/2: expected a whole number, got 3/2: give dimensions that it divides"),
        (S0 / (S1 - 17), "expected sizes that divide by 1 or more, got a division by 0"),
        (sympy.Symbol("t") + 1, r"size t \+ 1: expected dimensions that have a range \(s0, s1\), got t: give it one"),
    ],
)
def test_a_size_that_is_no_number_at_a_point_is_refused(size, message):
    with pytest.raises(ShapeError, match=message):
        size_at(size, RANGES, {"s0": 3, "s1": 17})


@pytest.mark.parametrize("size", [sympy.sin(S0), 1.5 * S0, "s0", sympy.Symbol("s0") ** S1])
def test_what_is_no_size_is_refused(size):
    with pytest.raises(FormatError, match=r"expected (a size|a power|one of the functions)"):
        size_at(size, RANGES, {"s0": 3, "s1": 17})


def test_functions_of_torch_are_read():
    assert size_at(FloorDiv(S1, 3) + 1, RANGES, {"s0": 3, "s1": 17}) == 6
    assert compare(FloorDiv(S1, 3), sympy.floor(S1 / 3), RANGES) is Comparison.EQUAL


def test_a_negative_size_is_refused():
    storage = Storage("x", 4 * (S0 - 5), "cpu", Kind.INPUT)
    x = Value("x", storage, "float32", (S0 - 5,), (1,))
    with pytest.raises(ShapeError, match="x: expected sizes of 0 or more, got s0 - 5 = -3"):
        at(Graph((x,), (), (x,), RANGES), {"s0": 2, "s1": 16})


@pytest.mark.parametrize(("least", "most"), [(5, 4), (-1, 4), (0, 10**18)])
def test_an_empty_range_is_refused(least, most):
    with pytest.raises(ShapeError, match="dimension s0: expected a range of numbers"):
        Dimension("s0", least, most)


def test_a_name_that_is_none_is_refused():
    with pytest.raises(ShapeError, match="expected an identifier as the name of a dimension, got 's-0'"):
        Dimension("s-0", 1, 2)


@pytest.mark.parametrize(
    ("head", "message"),
    [
        ("def graph():  # s0 in 1..", "line 1: expected dimensions such as"),
        ("def graph():  # s0 in 5..4", "line 1: dimension s0: expected a range of numbers"),
        ("def graph():  # s0 in 1..4, s0 in 1..5", "line 1: expected dimensions of different names, got two named s0"),
    ],
)
def test_dimensions_that_do_not_read_are_refused(head, message):
    with pytest.raises(FormatError, match=message):
        parse(f"{head}\n    return ()\n")
