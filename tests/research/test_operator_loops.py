"""The loops around an operator, and what these weigh."""

from __future__ import annotations

from math import prod

from lowtide.cost.device import node_flops
from research.fusion.clusters import LoopWeights
from research.fusion.loops import extents_of
from tests.cpu.networks import Builder


def test_loops_multiply_to_what_the_operator_table_counts():
    build = Builder(1, 6, 9, 9)
    build.convolution(build.x, 12, 3)
    build.convolution(build.x, 6, 3, 2, groups=6)
    build.convolution(build.x, 12, 5, groups=2)
    flat = Builder(7, 5)
    flat.node("aten.addmm.default", (flat.parameter(4), flat.x, flat.parameter(5, 4)), 7, 4)
    flat.node("aten.mm.default", (flat.x, flat.parameter(5, 3)), 7, 3)
    for node in (*build.nodes, *flat.nodes):
        assert 2 * prod(extents_of(node)) == node_flops(node)


def test_others_have_a_loop_for_each_dimension_of_the_largest():
    build = Builder(3, 8)
    build.node("aten.sum.dim_IntList", (build.x, (1,)), 3)
    assert extents_of(build.nodes[0]) == (3, 8)


def test_weights_are_linear_in_extents():
    build = Builder(1, 4, 8, 8)
    build.convolution(build.x, 6, 3)
    extents = extents_of(build.nodes[0])
    assert LoopWeights(2.0, 3.0).of(build.nodes[0]) == 2.0 * sum(extents) + 3.0 * len(extents)
