"""Flags as bits: by kernels on a CPU and by torch's operators, with the same result."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import lowtide.kernels.operators  # noqa: F401  makes the operators known to torch
from lowtide.kernels import bits as module
from tests.graph_runs import ODD, same_bits

DTYPES = [torch.float16, torch.bfloat16, torch.float32, torch.float64]
COUNTS = [1, 7, 8, 9, 1000, module._BLOCK, module._BLOCK + 1, 2 * module._BLOCK + 12345]
own, aten = torch.ops.lowtide, torch.ops.aten


@pytest.fixture(params=["kernels", "torch"])
def way(request, monkeypatch):
    monkeypatch.setattr(module, "SWITCHED_OFF", request.param == "torch")


def numbers(count, dtype, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.cat([torch.tensor(ODD), torch.randn(count, generator=generator) * 3])[-count:].to(dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.usefixtures("way")
def test_dropout(count, dtype):
    x = numbers(count, dtype)
    for keep in (0.9, 0.5, 1 / 3):
        drawn = torch.empty_like(x).bernoulli_(keep)
        expected, packed = x * drawn.div(keep), own.pack_bits(drawn)
        assert packed.numel() == -(-count // 8)
        assert same_bits(own.masked_mul(x, packed, keep), expected)
        assert same_bits(own.masked_mul.out(x, packed, keep, out=x.clone()), expected)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.usefixtures("way")
def test_rectifiers(count, dtype):
    x, gradient = numbers(count, dtype), numbers(count, dtype, 1)
    packed, expected = own.pack_positive(x), aten.threshold_backward(gradient, x, 0)
    assert same_bits(own.masked(gradient, packed), expected)
    assert same_bits(own.masked.out(gradient, packed, out=gradient), expected)


@settings(max_examples=25)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.randoms(use_true_random=False))
def test_masks_of_any_layout_come_back(shape, random):
    order = random.sample(range(len(shape)), len(shape))
    mask = (torch.rand(shape) > 0.5).permute(order)
    packed = own.pack_bits(mask)
    assert torch.equal(own.unpack_bits(packed, list(mask.shape), list(mask.stride())), mask)


@pytest.mark.usefixtures("way")
def test_masks_come_back():
    for count in COUNTS:
        mask = torch.rand(count) > 0.5
        assert torch.equal(own.unpack_bits(own.pack_bits(mask), [count], [1]), mask)


def test_both_ways_leave_the_same_bits(monkeypatch):
    x = numbers(COUNTS[-1], torch.float32)
    by_kernels = own.pack_bits(x), own.pack_positive(x)
    monkeypatch.setattr(module, "SWITCHED_OFF", True)
    assert all(torch.equal(*pair) for pair in zip(by_kernels, (own.pack_bits(x), own.pack_positive(x)), strict=True))
