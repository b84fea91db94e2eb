"""A batch of another shape that the program cannot take: what it raises is what eager PyTorch raises, and training goes on after it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim
from torch.nn import functional

import lowtide
from tests.leaving import Net, square
from tests.training import Settings, differences, eager_step


def checked(model: nn.Module, x: Tensor) -> Tensor:
    if len(x) < 4:
        raise ValueError(f"{len(x)} rows are too few")
    return square(model, x)


def checked_late(model: nn.Module, x: Tensor) -> Tensor:
    return checked(model, functional.dropout(x, 0.5))


def indexed(model: nn.Module, x: Tensor) -> Tensor:
    return square(model, x) + x[4].sum()


def viewed(model: nn.Module, x: Tensor) -> Tensor:
    return (model(x) + x[:, :2].reshape(5, 2)).square().mean()


def looked_up(model: nn.Module, x: Tensor) -> Tensor:
    return square(model, x) * {5: 2.0}[len(x)]


def trained(loss: Callable[..., Any], kind: type[Exception], *, eagerly: bool, width: int) -> list[Any]:
    torch.manual_seed(0)
    model = Net()
    optimizer = optim.Adam(model.parameters(), lr=0.1)
    good = [torch.rand(5, 3) for _ in range(3)]
    step = None if eagerly else lowtide.optimize(model, good[0], loss=loss, optimizer=optimizer)
    left: list[Any] = []
    for x in (good[0], torch.rand(2, width), good[1], torch.rand(2, width), good[2]):
        try:
            if step is None:
                optimizer.zero_grad()
                value = loss(model, x)
                value.backward()
                optimizer.step()
                left.append(value.detach())
            else:
                left.append(step(x))
        except kind as error:
            left.append((type(error).__name__, str(error)))
    return [left, model.state_dict(), [state["step"] for state in optimizer.state.values()]]


@pytest.mark.filterwarnings("ignore:a batch of another shape is run as the loop would run it")
@pytest.mark.parametrize(
    ("loss", "kind", "width"),
    [
        (square, RuntimeError, 4),
        (checked, ValueError, 3),
        (checked_late, ValueError, 3),
        (indexed, IndexError, 3),
        (viewed, RuntimeError, 3),
        (looked_up, KeyError, 3),
    ],
)
def test_what_catches_eagers_error_catches_it(loss, kind, width):
    found = differences(trained(loss, kind, eagerly=True, width=width), trained(loss, kind, eagerly=False, width=width))
    assert not found, "\n".join(found)


def too_large(model: nn.Module, x: Tensor) -> Tensor:
    value = square(model, functional.dropout(x, 0.5))
    if x.max() > 10:
        raise ValueError("large")
    return value


def third(model: Net, x: Tensor) -> Tensor:
    model.calls += 1
    if model.calls % 3 == 0:
        raise ValueError(f"call {model.calls}")
    return square(model, x)


@pytest.mark.parametrize("loss", [too_large, third])
def test_what_the_batch_or_a_count_makes_the_program_raise_is_raised_when_all_before_is_done(loss):
    """The generator has gone on, and the call is counted: the next ones go on as eager's do."""
    ends = []
    for eagerly in (True, False):
        torch.manual_seed(0)
        model = Net()
        model.calls = 0
        optimizer = optim.Adam(model.parameters(), lr=0.1)
        step = None if eagerly else lowtide.optimize(model, torch.rand(5, 3), loss=loss, optimizer=optimizer)
        torch.manual_seed(1)
        left: list[Any] = []
        for number in range(8):
            x = torch.rand(5, 3) + (11 if number in (3, 4, 6) and loss is too_large else 0)
            try:
                left.append(step(x) if step else eager_step(model, loss, optimizer, (x,), {}, Settings()))
            except ValueError as error:
                left.append(str(error))
        ends.append([left, model.state_dict(), model.calls, optimizer.state_dict(), torch.get_rng_state()])
    assert not (found := differences(*ends)), found


def test_under_a_limit_it_is_a_capture_error():
    """The caller's own loop would not keep within it."""
    model = Net()
    optimizer = optim.SGD(model.parameters())
    step = lowtide.optimize(model, torch.rand(5, 3), loss=square, optimizer=optimizer, memory="1MB")
    with pytest.raises(lowtide.CaptureError, match="must have same reduction dim"):
        step(torch.rand(2, 4))
