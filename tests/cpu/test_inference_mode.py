"""Inference mode anywhere: kernels are generated, results are eager's, and weights that torch does not count writes of are looked at."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import nn

import lowtide


def net() -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 16, 4)).eval()


@pytest.mark.parametrize(("model_in", "batch_in", "made_in", "called_in"), [*product((False, True), repeat=4)])
def test_kernels_are_generated_and_results_are_eagers(model_in: bool, batch_in: bool, made_in: bool, called_in: bool):
    torch.manual_seed(0)
    with torch.inference_mode(model_in):
        model = net()
    with torch.inference_mode(batch_in):
        x = torch.randn(1, 3, 6, 6)
    with torch.inference_mode(made_in):
        step = lowtide.optimize(model, (x,), exact=False)
    with torch.no_grad():
        wanted = model(x)
    assert len(step.plan.generated) == 1
    with torch.inference_mode(called_in):
        fn = step.frozen(x)
        for _ in range(4):
            assert torch.allclose(step(x), wanted, atol=1e-5)
            assert torch.allclose(fn(x), wanted, atol=1e-5)


def test_a_written_weight_is_noticed():
    torch.manual_seed(0)
    with torch.inference_mode():
        model, x = net(), torch.randn(1, 3, 6, 6)
        step = lowtide.optimize(model, (x,), exact=False)
        for _ in range(4):
            before = step(x)
        model[0].weight.add_(1)
        assert not torch.allclose(model(x), before)
        assert torch.allclose(step(x), model(x), rtol=1e-4, atol=1e-4)
