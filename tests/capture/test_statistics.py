"""Running statistics that an operator updates although its schema does not say so."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import lowtide


class Calls(nn.Module):
    """Runs a function on itself and the batch."""

    def __init__(self, function: Callable[[Calls, Tensor], Tensor]) -> None:
        super().__init__()
        self.function = [function]
        self.layer = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.register_buffer("variance", torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.function[0](self, x)


def _updated(model: Calls, x: Tensor) -> Tensor:
    y = model.layer(x)
    before = y - model.mean
    torch.batch_norm_update_stats(y.detach(), model.mean, model.variance, 0.1)
    return before.tanh().sum() + (y - model.mean).sum()


def test_an_update_whose_results_nobody_reads_is_made_between_the_reads_around_it() -> None:
    model, x = Calls(_updated), torch.randn(5, 3)
    eager = copy.deepcopy(model)
    step = lowtide.optimize(model, (x,), planning=lowtide.Planning(workspaces=False))
    for _ in range(2):
        assert torch.equal(step(x), eager(x))
    assert torch.equal(model.mean, eager.mean)
    assert torch.equal(model.variance, eager.variance)
    assert model.mean.any()


def _of_the_step(_: Calls, x: Tensor) -> Tensor:
    """What was read before an update is as it was."""
    mean, variance = torch.zeros(3), torch.ones(3)
    before = mean + 1
    torch.batch_norm_update_stats(x, mean, variance, 0.1)
    torch.batch_norm_update_stats(x * 2, mean, variance, 0.1)
    return before.sum() + mean.sum() * variance.sum()


def test_statistics_of_the_step_are_updated_in_copies() -> None:
    model, x = Calls(_of_the_step), torch.randn(5, 3)
    step = lowtide.optimize(model, (x,))
    assert step.source.count("lowtide.batch_norm_update_stats_functional") == 2
    for _ in range(2):
        assert torch.equal(step(x), model(x))


def _results_given(_: Calls, x: Tensor) -> Tensor:
    mean, variance = torch.zeros(3), torch.ones(3)
    into = torch.empty_like(x), torch.empty(3), torch.empty(3)
    torch.native_batch_norm(x, torch.ones(3), torch.zeros(3), mean, variance, True, 0.1, 1e-5, out=into)
    return mean.sum()


def test_statistics_of_the_step_are_not_updated_by_what_has_no_form_that_returns_them() -> None:
    with pytest.raises(lowtide.CaptureError, match="has no functional form"):
        lowtide.optimize(Calls(_results_given), (torch.randn(5, 3),), planning=lowtide.Planning(workspaces=False))
