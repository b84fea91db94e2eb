"""Along which loops an operator reads an element again, in which windows, and what its loops weigh."""

from __future__ import annotations

from lowtide.cost.device import node_flops
from lowtide.cpu.partition import LoopWeights
from lowtide.cpu.reform import Reuse, reuse_of
from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.nodes import nest_of
from tests.cpu.networks import Builder


def convolution(channels: int, out: int, side: int, size: int, stride: int = 1, groups: int = 1) -> tuple[Node, Value]:
    """Without padding, so that each element that is indexed exists."""
    build = Builder(1, channels, side, side)
    weight = build.parameter(out, channels // groups, size, size)
    made = (side - size) // stride + 1
    args = (build.x, weight, None, (stride, stride), (0, 0), (1, 1), False, (0, 0), groups)
    build.node("aten.convolution.default", args, 1, out, made, made)
    return build.nodes[0], build.x


def test_a_product_reads_its_left_argument_again_along_its_columns():
    build = Builder(16, 8)
    weight = build.parameter(8, 4)
    build.node("aten.mm.default", (build.x, weight), 16, 4)
    reuse = reuse_of(build.nodes[0], build.x)
    assert reuse is not None
    assert (reuse.again, reuse.windows) == (("n",), ())


def test_windows_of_a_convolution_overlap_where_they_are_longer_than_their_step():
    reuse = reuse_of(*convolution(4, 4, 8, 3, groups=4))
    assert reuse is not None
    assert [(window.dim, window.step, window.span) for window in reuse.windows] == [(2, 1, 3), (3, 1, 3)]
    assert reuse.again == ()
    assert reuse_of(*convolution(4, 4, 8, 2, stride=2, groups=4)) == Reuse((), ())


def test_what_is_not_known_is_none():
    build = Builder(2, 8)
    build.same("aten.cumsum.default", build.x, 1)
    assert reuse_of(build.nodes[0], build.x) is None


def test_loops_multiply_to_what_the_operator_table_counts():
    build = Builder(1, 6, 9, 9)
    build.convolution(build.x, 12, 3)
    build.convolution(build.x, 6, 3, 2, groups=6)
    build.convolution(build.x, 12, 5, groups=2)
    flat = Builder(7, 5)
    flat.node("aten.addmm.default", (flat.parameter(4), flat.x, flat.parameter(5, 4)), 7, 4)
    flat.node("aten.mm.default", (flat.x, flat.parameter(5, 3)), 7, 3)
    for node in (*build.nodes, *flat.nodes):
        assert 2 * nest_of(node).steps == node_flops(node)


def test_weights_are_linear_in_extents():
    node, _ = convolution(4, 6, 8, 3)
    extents = [loop.extent for loop in nest_of(node).loops]
    assert LoopWeights(2.0, 3.0).of(node) == 2.0 * sum(extents) + 3.0 * len(extents)
