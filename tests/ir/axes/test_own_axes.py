"""Masks as bits, in parts of whole blocks."""

import pytest
import torch

import lowtide.kernels.operators  # noqa: F401  its operators
from bench.parts import call, wrong_axes
from lowtide.ir.operators.nodes import axes_of

CALLS = {
    "lowtide.masked.default": lambda x, bits: (x, bits),
    "lowtide.masked_mul.default": lambda x, bits: (x, bits, 0.9),
    "lowtide.pack_bits.default": lambda x, bits: (x,),
    "lowtide.pack_positive.default": lambda x, bits: (x,),
}


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize(("shape", "units"), [((6, 2, 2**15), 6), ((512, 768), 2), ((5, 2**15), 1), ((4, 100), 1)])
def test_masks_are_cut_between_blocks_alone(name, shape, units):
    torch.manual_seed(0)
    x = torch.randn(shape)
    args = CALLS[name](x, torch.ops.lowtide.pack_bits(torch.randn(shape) > 0.1))
    axes = axes_of(call(name, args)[0])
    assert [axis.extent for axis in axes] == [units] * (units > 1)
    for seed in range(3):
        assert list(wrong_axes(name, args, seed=seed)) == []


def test_what_lies_otherwise_is_not_cut():
    x = torch.randn(2**15, 6).t()
    args = (x, torch.ops.lowtide.pack_bits(x), 0.5)
    assert axes_of(call("lowtide.masked_mul.default", args)[0]) == ()
