"""One program for a range: on every shape it does what the program of that shape does."""

from __future__ import annotations

from dataclasses import replace

import pytest
import sympy
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lowtide.errors import FormatError, ShapeError
from lowtide.ir.check.graph_check import check_graph
from lowtide.ir.graph import Graph, Kind, Node, Storage, Value
from lowtide.ir.shapes.dimension import Dimension
from lowtide.ir.shapes.points import at
from lowtide.ir.text.graph_text import parse
from lowtide.lower.python import lower, positions
from lowtide.remat.entries import Codes
from lowtide.remat.write_out import rematerialise
from lowtide.runtime.copies import DirectMemory
from lowtide.runtime.program import Program
from tests.lower.bare_plans import plan
from tests.lower.ranged_graphs import DIMENSIONS, Decided, ranged_graphs

TEXT = """\
def graph(  # s0 in 1..64, s1 in 16..2048
    w,  # float32[8, 8] 256 B parameter cpu
    x,  # float32[s0, s1, 8] 32*s0*s1 B input cpu
):
    h = aten.view.default(x, (size("s0*s1"), 8))  # float32[s0*s1, 8] on x
    y = aten.mm.default(h, w)  # float32[s0*s1, 8] 32*s0*s1 B activation cpu
    half = aten.slice.Tensor(y, 0, size("floor(s1/2)"), size("s1"))  # float32[s1 - floor(s1/2), 8] offset[8*floor(s1/2)] on y
    z = aten.relu.default(half)  # float32[s1 - floor(s1/2), 8] 32*s1 - 32*floor(s1/2) B activation cpu
    return (z,)
"""
S = sympy.Symbol("s", integer=True, nonnegative=True)


def input_of(name: str, *shape: object) -> Value:
    return Value(name, Storage(name, 4, "cpu", Kind.INPUT), "float32", shape, (1,) * len(shape))


def made(name: str, *shape: object) -> Value:
    return Value(name, Storage(name, 4, "cpu", Kind.ACTIVATION), "float32", shape, (1,) * len(shape))


@given(ranged_graphs(), st.tuples(*(st.integers(each.least, each.most) for each in DIMENSIONS)))
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much])
def test_one_program_does_on_each_shape_what_that_shapes_own_does(graph, numbers):
    check_graph(graph)
    point = dict(zip(("s0", "s1"), numbers, strict=True))
    batch = [torch.randn(*numbers), torch.randn(numbers[1])]
    decided, numeric = Decided.in_order(graph), at(graph, point)
    own = plan(*numeric.nodes, inputs=numeric.inputs, outputs=numeric.outputs)
    expected = Program(lower(own))([tensor.clone() for tensor in batch])
    found = Program(lower(decided))([tensor.clone() for tensor in batch])
    for value, one, other in zip(numeric.outputs, expected, found, strict=True):
        assert torch.equal(one, other)
        assert (tuple(other.shape), other.stride(), other.storage_offset()) == (value.shape, one.stride(), one.storage_offset())
    lines, said = lower(decided).splitlines(), positions(decided)
    assert len(lines) == len(said) - 1
    assert all("=" in lines[said.index(step)] for step in range(len(graph.nodes)))


def test_a_programs_head_reads_dimensions_and_computes_each_expression_once():
    lines = lower(Decided.in_order(parse(TEXT))).splitlines()
    assert lines[0] == "# 4 operators; for s0 in 1..64, s1 in 16..2048"
    assert "from lowtide.ir.shapes.points import divided" in lines
    assert lines[lines.index("def step(inputs):") + 1 :][:7] == [
        "    (w, x, ) = inputs",
        "    s0 = x.size(0)",
        "    s1 = x.size(1)",
        "    n0 = s0*s1",
        "    n1 = divided(s1, 2)",
        "    h = x.view([n0, 8])  # float32[s0*s1, 8]",
        "    y = h.mm(w)  # float32[s0*s1, 8]",
    ]
    assert "    half = aten.slice.Tensor(y, 0, n1, s1)  # float32[s1 - floor(s1/2), 8]" in lines


def test_variables_of_sizes_are_no_values():
    x, s, n0 = input_of("x", S), made("s", S), made("n0", S)
    nodes = (
        Node("aten.add.Tensor", (x, S), (s,)),
        Node("aten.mul.Tensor", (s, 2 * S), (n0,)),
        Node("aten.sub.Tensor", (n0, S + 1), (made("whole", S),)),
    )
    source = lower(Decided.in_order(Graph((x,), nodes, nodes[-1].results, (Dimension("s", 1, 9),))))
    assert Program(source)([torch.ones(3)])[0].tolist() == [4.0 * 6 - 4] * 3


def test_a_program_needs_only_the_dimensions_of_its_arguments():
    other = sympy.Symbol("other", integer=True, nonnegative=True)
    x = input_of("x", S, 2 * other)
    node = Node("aten.mul.Tensor", (x, S), (made("y", S, 2 * other),))
    graph = Graph((x,), (node,), node.results, (Dimension("other", 1, 9), Dimension("s", 1, 9)))
    assert Program(lower(Decided.in_order(graph)))([torch.ones(2, 4)])[0].tolist() == [[2.0] * 4] * 2


def test_a_dimension_that_no_input_has_is_refused():
    x = input_of("x", 2 * S)
    node = Node("aten.mul.Tensor", (x, S), (made("y", 2 * S),))
    graph = Graph((x,), (node,), node.results, (Dimension("s", 1, 9),))
    with pytest.raises(FormatError, match="dimension s: expected an input one of whose extents is s"):
        lower(Decided.in_order(graph))


def test_an_expression_over_no_dimension_of_the_graph_is_refused():
    x = input_of("x", S)
    node = Node("aten.mul.Tensor", (x, S), (made("y", 3),))
    with pytest.raises(ShapeError, match="expected dimensions that have a range"):
        lower(plan(node, inputs=(x,), outputs=node.results))


def test_a_size_that_is_not_whole_on_a_shape_is_an_error_there():
    x = input_of("x", S)
    node = Node("aten.mul.Tensor", (x, S / 2), (made("y", S),))
    program = Program(lower(Decided(Graph((x,), (node,), node.results, (Dimension("s", 1, 9),)), (0,), (-1,))))
    assert program([torch.ones(4)])[0].tolist() == [2.0] * 4
    with pytest.raises(ShapeError, match="size s/2: expected a whole number, got 3/2"):
        program([torch.ones(3)])


def test_what_goes_to_the_host_and_back_is_said_as_an_expression():
    x, a, b, c = input_of("x", S), made("a", S), made("b", S), made("c", S)
    a, b, c = (replace(each, storage=replace(each.storage, nbytes=4 * S)) for each in (a, b, c))
    nodes = (Node("aten.relu.default", (x,), (a,)), Node("aten.mul.Tensor", (a, S), (b,)), Node("aten.add.Tensor", (a, b), (c,)))
    graph, codes = Graph((x,), nodes, (c,), (Dimension("s", 1, 9),)), Codes(3, 3)
    written = rematerialise(graph, [0, codes.store(0), 1, codes.drop(0), codes.load(0), 2]).graph
    source = lower(Decided(written, tuple(range(len(written.nodes))), (-1,) * len(written.nodes)))
    assert "    a_host = host.store(a)  # 4*s B to the host" in source.splitlines()
    assert "    a_back = host.load(a_host)  # 4*s B from the host" in source.splitlines()
    assert Program(source, host=DirectMemory())([torch.ones(3)])[0].tolist() == [4.0] * 3
