"""Fake results look like real ones; where torch's own fakes say so by now, the correction can go."""

import random

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.capture.corrections import corrected, kernel

NORM = torch.ops.aten.native_batch_norm.default
HALF, FULL = torch.bfloat16, torch.float32


def _looks(results):
    return [(result.dtype, tuple(result.shape), tuple(result.stride())) for result in results]


def _arguments(given, weights, statistics):
    norm = [torch.ones(3, dtype=weights), torch.zeros(3, dtype=weights)] if weights else [None, None]
    running = [torch.zeros(3, dtype=statistics), torch.ones(3, dtype=statistics)] if statistics else [None, None]
    return (torch.randn(2, 3, 4, 4).to(given), *norm, *running)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize(
    ("given", "weights", "statistics"), [(FULL, FULL, FULL), (HALF, FULL, FULL), (HALF, HALF, HALF), (HALF, None, FULL)]
)
def test_statistics_of_a_batch_norm_are_of_the_real_type(given, weights, statistics, training):
    real = _arguments(given, weights, statistics)
    with FakeTensorMode() as mode:
        fakes = tuple(None if each is None else mode.from_tensor(each) for each in real)
        found = corrected(NORM, fakes, NORM(*fakes, training, 0.1, 1e-5))
    assert _looks(found) == _looks(NORM(*real, training, 0.1, 1e-5))


def test_the_correction_is_still_needed():
    with FakeTensorMode() as mode:
        fakes = tuple(mode.from_tensor(each) for each in _arguments(HALF, FULL, FULL))
        assert NORM(*fakes, True, 0.1, 1e-5)[1].dtype == HALF, "torch's fake is right by now: delete the correction"


def _views(count):
    """Random tensors with extents of 1, permuted and expanded, and shapes to view them in."""
    draw = random.Random(0)
    for _ in range(count):
        shape = [draw.choice([1, 1, 2, 3, 4]) for _ in range(draw.randint(1, 5))]
        order = draw.sample(range(len(shape)), len(shape))
        wanted = [extent for extent in (shape[dim] for dim in order) if extent != 1]
        if len(wanted) > 1 and draw.random() < 0.5:
            at = draw.randrange(len(wanted) - 1)
            wanted[at : at + 2] = [wanted[at] * wanted[at + 1]]
        for _ in range(draw.randint(0, 2)):
            wanted.insert(draw.randint(0, len(wanted)), 1)
        yield torch.empty(shape).permute(order), wanted


@pytest.mark.parametrize("op", [torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default])
def test_views_have_the_real_strides_along_extents_of_1_too(op):
    differs = 0
    for real, shape in _views(400):
        try:
            expected = op(real, shape)
        except RuntimeError:
            continue
        with FakeTensorMode() as mode:
            fake = mode.from_tensor(real)
            found = kernel(op, (fake, shape), {})(fake, shape)
            differs += op(fake, shape).stride() != expected.stride()
        assert _looks([found]) == _looks([expected])
        assert found.untyped_storage()._cdata == fake.untyped_storage()._cdata
    assert differs, "torch's fakes are right by now: delete the correction"


@pytest.mark.parametrize("op", [torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default])
def test_views_of_nothing_share_its_storage(op):
    with FakeTensorMode() as mode:
        FakeTensorMode.cache_clear()
        fake = mode.from_tensor(torch.empty(0, 8))
        op(fake, [0, 8])
        found = kernel(op, (fake, [-1, 8]), {})(fake, [-1, 8])
        FakeTensorMode.cache_clear()
    assert found.shape == (0, 8)
    assert found.untyped_storage()._cdata == fake.untyped_storage()._cdata


@pytest.mark.parametrize("reduction", [0, 1, 2])
@pytest.mark.parametrize("shape", [(5,), (3, 5), (1, 5)])
def test_the_loss_of_one_example_has_the_real_shape(shape, reduction):
    op, given = torch.ops.aten.multilabel_margin_loss_forward.default, (torch.ones(shape), torch.zeros(shape, dtype=torch.int64), reduction)
    with FakeTensorMode() as mode:
        fakes = (*map(mode.from_tensor, given[:2]), reduction)
        out = op(*fakes)
        found = corrected(op, fakes, out)
    assert _looks(found) == _looks(op(*given))
    assert len(shape) > 1 or reduction or out[0].dim() == 1, "torch's fake is right by now: delete the correction"
