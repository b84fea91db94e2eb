"""How often a program is followed until it is captured or refused: each time costs what a capture costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import lowtide
from lowtide.capture.effects import attempts as capture_attempts
from tests.leaving import Net, square


def attempts(loss: Any, monkeypatch: pytest.MonkeyPatch, model: nn.Module | None = None) -> int:
    """How many times a capture follows this loss: a negative number where it is refused."""
    counts, with_leaving = list[int](), capture_attempts._with_leaving

    def counting(capture: Callable[..., Any], *rest: Any) -> Any:
        counts.append(0)

        def counted(*args: Any) -> Any:
            counts[-1] += 1
            return capture(*args)

        return with_leaving(counted, *rest)

    monkeypatch.setattr(capture_attempts, "_with_leaving", counting)
    model = Net() if model is None else model
    try:
        lowtide.optimize(
            model,
            torch.rand(5, 3),
            loss=loss,
            optimizer=optim.SGD(model.parameters(), lr=0.1),
            planning=lowtide.Planning(workspaces=False),
        )
    except lowtide.CaptureError:
        return -counts[0]
    return counts[0]


def test_a_plain_loss_is_followed_once(monkeypatch):
    assert attempts(square, monkeypatch) == 1


def test_a_running_total_is_followed_five_times(monkeypatch):
    """As it is, with stand-ins for containers and numbers, with the total that those go into, with stand-ins for what changes, twice."""
    model = Net()
    model.total = 0.0

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = square(model, x)
        model.total += value.item()
        return value

    assert attempts(loss, monkeypatch, model) == 5


def test_a_refusal_is_known_after_four(monkeypatch):
    """As it is, with stand-ins, with sums, and once more to name who keeps what it should not."""

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = square(model, x)
        return value * 2 if value > 0.1 else value.exp()

    assert attempts(loss, monkeypatch) == -4
