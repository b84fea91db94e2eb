"""Repeated work against counting: every tile of the downstream operator, and what it needs."""

from __future__ import annotations

import itertools
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.cost.flops import node_flops
from lowtide.fuse.cluster.reuse import Intensive, category, repeated, reuse_of
from lowtide.fuse.cluster.weights import Weights, fitted
from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.nests import Nest, nest_of
from tests.fuse.networks import Builder


def needed(node: Node, value: Value, tile: dict[str, int]) -> Counter[tuple[int, ...]]:
    """How many tiles need each element, by running all loops."""
    nest = nest_of(node)
    access = nest.access(value)
    assert access is not None
    outer = [loop for loop in nest.loops if not loop.reduces]
    inner = [loop for loop in nest.loops if loop.reduces]
    starts = [range(0, loop.extent, tile.get(loop.name, loop.extent)) for loop in outer]
    found: Counter[tuple[int, ...]] = Counter()
    for start in itertools.product(*starts):
        spans = [range(at, min(at + tile.get(loop.name, loop.extent), loop.extent)) for at, loop in zip(start, outer, strict=True)]
        elements = set()
        for at in itertools.product(*spans, *(range(loop.extent) for loop in inner)):
            place = dict(zip((loop.name for loop in (*outer, *inner)), at, strict=True))
            elements.add(tuple(sum(step * place[name] for name, step in index) for index in access.dims))
        found.update(elements)
    return found


def convolution(channels: int, out: int, side: int, size: int, stride: int = 1, groups: int = 1) -> tuple[Node, Value]:
    """Without padding, so that each element that is indexed exists."""
    build = Builder(1, channels, side, side)
    weight = build.parameter(out, channels // groups, size, size)
    made = (side - size) // stride + 1
    args = (build.x, weight, None, (stride, stride), (0, 0), (1, 1), False, (0, 0), groups)
    build.node("aten.convolution.default", args, 1, out, made, made)
    return build.nodes[0], build.x


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_repeated_work_is_what_counting_finds(data: st.DataObject):
    kind = data.draw(st.sampled_from(["pointwise", "depthwise", "both"]))
    channels, stride = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    size = 1 if kind == "pointwise" else data.draw(st.integers(2, 3))
    side = size + stride * data.draw(st.integers(1, 4))
    groups = channels if kind == "depthwise" else 1
    node, value = convolution(channels, channels if kind == "depthwise" else data.draw(st.integers(1, 3)), side, size, stride, groups)
    loops = [loop for loop in nest_of(node).loops if not loop.reduces]
    tile = {loop.name: data.draw(st.integers(1, loop.extent), loop.name) for loop in loops if data.draw(st.booleans())}
    counted = needed(node, value, tile)
    assert repeated(node, value, tile) == pytest.approx(sum(counted.values()) / len(counted))


def test_categories_are_those_of_the_paper():
    assert category(*convolution(4, 4, 8, 3, groups=4)) is Intensive.WINDOWED
    assert category(*convolution(4, 6, 8, 1)) is Intensive.POINTWISE
    assert category(*convolution(4, 6, 8, 3)) is Intensive.NEITHER
    assert category(*convolution(1, 1, 8, 1)) is Intensive.MAPPED
    assert category(*convolution(4, 4, 8, 2, stride=2, groups=4)) is Intensive.MAPPED


def test_a_product_reads_its_left_argument_again_along_its_columns():
    build = Builder(16, 8)
    weight = build.parameter(8, 4)
    build.node("aten.mm.default", (build.x, weight), 16, 4)
    reuse = reuse_of(build.nodes[0], build.x)
    assert reuse is not None
    assert reuse.untiled == {"n"}
    assert repeated(build.nodes[0], build.x, {"m": 4}) == 1.0
    assert repeated(build.nodes[0], build.x, {"n": 1}) == 4.0


def test_what_is_not_known_is_none_and_refused():
    build = Builder(2, 8)
    build.same("aten.cumsum.default", build.x, 1)
    assert reuse_of(build.nodes[0], build.x) is None
    assert category(build.nodes[0], build.x) is None
    with pytest.raises(ValueError, match=r"aten\.cumsum"):
        repeated(build.nodes[0], build.x, {})
    with pytest.raises(ValueError, match="tiles of one or more"):
        repeated(*convolution(2, 2, 4, 1), {"o": 0})


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


def test_weights_are_linear_in_extents_and_fitted():
    node, _ = convolution(4, 6, 8, 3)
    extents = [loop.extent for loop in nest_of(node).loops]
    assert Weights(2.0, 3.0).of(node) == 2.0 * sum(extents) + 3.0 * len(extents)
    nests: list[list[Nest]] = [
        [nest_of(convolution(4, out, side, size)[0])] for out, side, size in ((2, 8, 3), (9, 5, 1), (4, 20, 3), (30, 6, 1))
    ]
    wanted = Weights(0.25, 4.0)
    found = fitted(nests, [sum(map(wanted.of_nest, each)) for each in nests])
    assert (found.slope, found.bias) == pytest.approx((0.25, 4.0))
    assert fitted(nests, [0.0] * 4) == Weights(0.0, 0.0)
    with pytest.raises(ValueError, match="two sets"):
        fitted(nests[:1], [1.0])
