"""Settings of the optimizer that a program changes within its step: refused with what to do, and as before afterwards."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from tests.training import Snapshot


def _scheduled(optimizer: torch.optim.Optimizer) -> Callable[[Any], None]:
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    return lambda model: scheduler.step()


def _set(optimizer: torch.optim.Optimizer) -> Callable[[Any], None]:
    return lambda model: optimizer.param_groups[0].update(lr=0.01)


def _added(optimizer: torch.optim.Optimizer) -> Callable[[Any], None]:
    return lambda model: optimizer.param_groups[0].update(note=3)


@pytest.mark.parametrize("of", [_scheduled, _set, _added])
@pytest.mark.parametrize("where", ["loss", "after_backward"])
@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_schedule_within_the_step_is_refused_and_moves_nothing(of: Any, where: str):
    torch.manual_seed(0)
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    act = of(optimizer)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if where == "loss":
            act(model)
        return model(x).pow(2).mean()

    batch, before = (torch.randn(3, 4),), Snapshot.of(model, optimizer)
    hook = act if where == "after_backward" else None
    with pytest.raises(lowtide.CaptureError, match=r"changes the optimizer's '(lr|note)'.*between steps"):
        lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, training=lowtide.Training(after_backward=hook))
    before.assert_same(model, optimizer)


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_scheduler_counts_as_before():
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    before = scheduler.state_dict()
    with pytest.raises(lowtide.CaptureError, match="scheduler"):
        lowtide.optimize(
            model,
            (torch.randn(3, 4),),
            loss=lambda m, x: m(x).mean(),
            optimizer=optimizer,
            training=lowtide.Training(after_backward=lambda m: scheduler.step()),
        )
    assert scheduler.state_dict() == before
