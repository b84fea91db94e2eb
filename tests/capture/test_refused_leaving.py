"""What a program puts into places of the caller's and no step can do again is refused, with what helps."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import lowtide
from tests.leaving import Net, square

everywhere: list[Any] = []


def of_all(kept: list[Any], value: Tensor) -> Any:
    kept.append(value.detach())
    return torch.stack(kept)


def at_what_time(kept: list[Any], value: Tensor) -> Any:
    kept.append((time.perf_counter(), value.detach()))


def decided_by_a_number(kept: list[Any], value: Tensor) -> Any:
    kept.append(value.item() if value.item() > 0 else 0)


def at_what_time_in_words(kept: list[Any], value: Tensor) -> Any:
    kept.append(f"{time.perf_counter()}")


def by_position(kept: list[Any], value: Tensor) -> Any:
    kept.append(value.detach())
    return kept[0]


@pytest.mark.parametrize(
    ("keep", "why"),
    [
        (of_all, "still holds what the program computed"),
        (at_what_time, "something else there each time"),
        (decided_by_a_number, "control flow depends on data"),
        (by_position, "reads what other steps leave"),
        (at_what_time_in_words, "a list that it reaches had 1 items and has 2"),
    ],
)
def test_what_follows_from_earlier_steps_is_refused(keep, why):
    def loss(model: nn.Module, x: Tensor) -> Tensor:
        value = square(model, x)
        keep(kept, value)
        return value

    kept: list[Any] = []
    model = Net()
    with pytest.raises(lowtide.CaptureError, match=why):
        lowtide.optimize(
            model, torch.rand(5, 3), loss=loss, optimizer=optim.SGD(model.parameters()), planning=lowtide.Planning(workspaces=False)
        )
    assert kept == []


@pytest.mark.parametrize("optimizer_class", [optim.SGD, optim.Adam])
def test_an_average_in_an_object_that_a_module_holds_goes_on(optimizer_class):
    """The program runs twice in one capture, for Adam's first step and the later ones: neither finds what the other has left."""

    class Averages:
        def __init__(self) -> None:
            self.of: dict[str, Tensor] = {}

        def update(self, model: nn.Module) -> None:
            for name, parameter in model.named_parameters():
                before = self.of.get(name, torch.zeros(()))
                self.of[name] = 0.9 * before + parameter.grad.abs()

    left = []
    for optimized in (False, True):
        torch.manual_seed(0)
        model, batch = Net(), torch.rand(5, 3)
        model.averages, update = Averages(), lambda model: model.averages.update(model)
        optimizer = optimizer_class(model.parameters(), 0.1)
        training, planning = lowtide.Training(after_backward=update), lowtide.Planning(workspaces=False)
        if optimized:
            step = lowtide.optimize(model, batch, loss=square, optimizer=optimizer, training=training, planning=planning)
        for _ in range(4):
            if optimized:
                step(batch)
            else:
                optimizer.zero_grad()
                square(model, batch).backward()
                update(model)
                optimizer.step()
        left.append({name: average.tolist() for name, average in model.averages.of.items()})
    assert left[0] == left[1]
