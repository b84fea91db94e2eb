"""Lists among an optimizer's settings, which its step writes, and optimizers that wait before they move anything."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import optim

import lowtide
from tests.api.small_net import Net, made
from tests.training import check


class Listed(optim.Optimizer):
    """SGD that keeps lists among its settings."""

    def __init__(self, parameters: Any, lr: float, write: Callable[[Any], object], counts: Any = None) -> None:
        super().__init__(parameters, {"lr": lr, "counts": [0, (1.0, [None, False])] if counts is None else counts})
        self.write = write

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            self.write(group["counts"])
            for parameter in (each for each in group["params"] if each.grad is not None):
                parameter.sub_(parameter.grad, alpha=group["lr"] * (1 + group["counts"][0]))


def counts(listed: Any) -> None:
    listed[0] += 1


def counts_within(listed: Any) -> None:
    last = listed[1][1][0]
    listed[1][1][:] = [1 if last is None else last + 1, True]
    listed[0] = listed[1][1][0] * listed[1][0]


@pytest.mark.parametrize("write", [counts, counts_within])
def test_a_list_that_the_step_writes_is_written_by_each_step(write: Callable[[Any], object]) -> None:
    left: list[Any] = []

    def make() -> Any:
        *others, optimizer = made(Listed, lr=0.1, write=write)()
        left.append(optimizer.param_groups[0]["counts"])
        return *others, optimizer

    check(make, steps=4)
    assert left[0][0] == 4
    assert repr(left[0]) == repr(left[-1])


def test_a_list_that_groups_share_cannot_be_written_in_place():
    model, x = Net(), torch.rand(4, 6)
    optimizer = Listed([{"params": [each]} for each in model.last.parameters()], 0.1, counts, [0, 0.5])
    with pytest.raises(lowtide.CaptureError, match="changes the list 'counts', which its groups share"):
        lowtide.optimize(model, x, loss=lambda model, x: model(x).square().sum(), optimizer=optimizer)
    assert optimizer.param_groups[0]["counts"] == [0, 0.5]


class Waits(optim.Optimizer):
    """Only gathers for two steps."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in (each for each in group["params"] if each.grad is not None):
                state = self.state[parameter]
                state["step"] = state.get("step", 0) + 1
                state["mean"] = state.get("mean", torch.zeros_like(parameter)).lerp(parameter.grad, 0.5)
                if state["step"] > 2:
                    parameter.sub_(state["mean"], alpha=group["lr"])


def test_an_optimizer_may_move_nothing_for_some_steps() -> None:
    check(made(Waits, lr=0.1), steps=5)


class Catches(optim.Optimizer):
    """Takes a quotient by zero for zero."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "weight": 0, "sum": 0})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            try:
                share = group["weight"] / group["sum"]
            except ZeroDivisionError:
                share = 0
            group["weight"], group["sum"] = group["weight"] + 1, group["sum"] + group["weight"]
            for parameter in (each for each in group["params"] if each.grad is not None):
                parameter.sub_(parameter.grad, alpha=group["lr"] * (1 + share))


def test_an_optimizer_may_catch_what_it_divides_by() -> None:
    check(made(Catches, lr=0.1), steps=5)
