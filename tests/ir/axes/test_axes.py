"""Every rule of axes: the operator in parts of random sizes, put together, is the whole operator; along as many axes as it should have."""

import random
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.parts import call, wrong_axes
from lowtide.capture import calls
from lowtide.ir.operators import elementwise, own
from lowtide.ir.operators.nodes import ROWS, axes_of
from tests.operator_axes_calls import CALLS, ELEMENTWISE, cast

DTYPES = (torch.float32, torch.float64, torch.bfloat16)


@pytest.mark.parametrize("name", CALLS)
def test_parts_along_each_axis_make_the_whole(name):
    for dtype in DTYPES:
        for number, (extents, args, named) in enumerate(CALLS[name]):
            given_args, kwargs = cast(args, dtype), cast(named, dtype)
            try:
                node, _ = call(name, given_args, kwargs)
            except (NotImplementedError, RuntimeError):
                assert dtype is torch.bfloat16, "no such kernel"
                continue
            assert sorted(axis.extent for axis in axes_of(node)) == sorted(extents), f"call {number}"
            assert list(wrong_axes(name, given_args, kwargs, seed=number)) == []


@pytest.mark.parametrize("name", ELEMENTWISE)
def test_element_by_element_each_dimension_is_an_axis(name):
    for dtype in DTYPES:
        for args in ELEMENTWISE[name]:
            given_args = cast(args, dtype)
            try:
                node, _ = call(name, given_args)
            except (NotImplementedError, RuntimeError):
                assert dtype is torch.bfloat16, "no such kernel"
                continue
            assert [axis.extent for axis in axes_of(node)] == [4, 6]
            assert list(wrong_axes(name, given_args)) == []


@pytest.mark.parametrize("name", ["aten.mm.default", "aten.slice.Tensor", "aten.cat.default", "aten.split.Tensor"])
def test_what_nobody_reads_has_no_axis(name):
    _, args, named = CALLS[name][0]
    node, _ = call(name, args, named)
    for outputs in ((), (None,) * len(node.outputs)):
        assert axes_of(replace(node, outputs=outputs)) == ()


def test_every_rule_has_calls():
    tried = {name.rpartition(".")[0] for name in (*CALLS, *ELEMENTWISE)} | {*CALLS, *ELEMENTWISE}
    ruled = {row.name for row in ROWS.values() if row.axes is not None}
    assert ruled - tried == {row.name for row in own.ROWS if row.axes is not None} - tried, "tried in test_own_axes"


def test_what_is_element_by_element_is_what_torch_tags():
    for row in elementwise.TAGGED:
        name = row.name.removeprefix("aten.")
        base, _, overload = name.partition(".")
        packet = getattr(torch.ops.aten, base)
        ops = [getattr(packet, each) for each in ([overload] if overload else packet.overloads())]
        assert any(torch.Tag.pointwise in op.tags for op in ops), name
        assert not any(torch.Tag.nondeterministic_seeded in op.tags for op in ops), name


@given(st.lists(st.integers(1, 4), min_size=1, max_size=5), st.integers(0, 2**31))
@settings(max_examples=40, deadline=None)
def test_any_reshape_splits_along_the_outermost_of_a_group(shape, seed):
    whole, rng = torch.randn(shape), random.Random(seed)
    rest, sizes = whole.numel(), []
    while rest > 1 or not sizes:
        sizes.append(rng.choice([number for number in range(1, min(rest, 13)) if rest % number == 0] + [rest]))
        rest //= sizes[-1]
    assert list(wrong_axes("aten.view.default", (whole, sizes), seed=seed)) == []


@given(st.lists(st.integers(2, 4), min_size=1, max_size=4))
@settings(max_examples=10, deadline=None)
def test_a_view_of_the_same_shape_has_an_axis_for_each_dimension(shape):
    node, _ = call("aten.view.default", (torch.randn(shape), shape))
    assert [axis.extent for axis in axes_of(node)] == shape


@given(st.integers(0, 2**31), st.lists(st.sampled_from([1, 2, 3, 5]), max_size=4), st.data())
@settings(max_examples=30, deadline=None)
def test_any_broadcast_is_cut_where_an_argument_is_whole(seed, shape, data):
    other = [data.draw(st.sampled_from([1, extent])) for extent in shape[data.draw(st.integers(0, len(shape))) :]]
    pair = (torch.randn(shape), torch.randn(other))
    for args in (pair, pair[::-1]):
        assert list(wrong_axes("aten.add.Tensor", args, seed=seed)) == []
    node, _ = call("aten.add.Tensor", pair)
    assert len(axes_of(node)) == sum(extent > 1 for extent in shape)


def test_what_draws_random_numbers_has_no_axis():
    node, _ = call("aten.native_dropout.default", (torch.ones(4, 6), 0.5, True))
    assert axes_of(node) == ()
    assert calls.node_is_random(node)
