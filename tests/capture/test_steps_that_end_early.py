"""Optimizers that look at what they have computed and go no further, as D-Adaptation and Prodigy do where nothing moves."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.base.skeleton import leaves


class Adapts(torch.optim.Optimizer):
    """Finds its step size by itself. `ends` decides on the sum of what has moved."""

    def __init__(self, parameters: Any, ends: Callable[[Any], Any], *, read: bool = True) -> None:
        super().__init__(parameters, {"lr": 1.0, "d": 1e-2, "d0": 1e-2, "k": 0})
        self.ends, self.read = ends, read

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        group = self.param_groups[0]
        d, moved = group["d"], 0.0 if self.read else torch.zeros(())
        for parameter in group["params"]:
            state = self.state[parameter]
            if "s" not in state:
                state["steps"], state["s"], state["history"] = 0, torch.zeros_like(parameter), [torch.ones(()), "new"]
                state["first"] = parameter.clone() if parameter.any() else torch.tensor(0.0)
            state["s"].mul_(0.9).add_(parameter.grad, alpha=d)
            total = state["s"].abs().sum()
            moved = moved + (total.item() if self.read else total)
        if self.ends(moved):
            return
        ratio = (group["lr"] / moved) if self.read else (group["lr"] / moved).item()
        group["d"] = d = max(d, min(ratio, d * 1.5)) if d == group["d0"] else d
        for parameter in group["params"]:
            state = self.state[parameter]
            state["steps"] += 1
            state["history"][0] = state["history"][0] * 0.5
            parameter.sub_(state["s"], alpha=d)
        group["k"] += 1


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.one, self.two = nn.Linear(4, 5), nn.Linear(5, 3)
        nn.init.zeros_(self.two.bias)

    def forward(self, x: Tensor) -> Tensor:
        hidden: Tensor = self.two(torch.tanh(self.one(x)))
        return hidden


def loss(model: nn.Module, x: Tensor, weight: Tensor) -> Tensor:
    return (model(x).square() * weight).mean()


def batches(weights: list[float]) -> list[tuple[Tensor, Tensor]]:
    draws = torch.Generator().manual_seed(0)
    return [(torch.randn(6, 4, generator=draws), torch.tensor(each)) for each in weights]


def check(optimizer: Callable[[Any], torch.optim.Optimizer], weights: list[float], **settings: Any) -> lowtide.Step:
    model, hooks = Net(), [0, 0]
    twin = copy.deepcopy(model)
    mine, its = optimizer(model.parameters()), optimizer(twin.parameters())
    for at, each in enumerate((mine, its)):
        each.register_step_post_hook(lambda *_, at=at: hooks.__setitem__(at, hooks[at] + 1))
    step = lowtide.optimize(model, batches(weights)[0], loss=loss, optimizer=mine, **settings)
    for number, batch in enumerate(batches(weights)):
        its.zero_grad()
        expected = loss(twin, *batch)
        expected.backward()
        its.step()
        assert torch.equal(step(*batch), expected), number
        here, there = ([*leaves([*net.parameters()]), *leaves(each.state_dict())] for net, each in ((model, mine), (twin, its)))
        assert [path for path, _ in here] == [path for path, _ in there]
        for (path, one), (_, other) in zip(here, there, strict=True):
            assert torch.equal(one, other) if isinstance(one, Tensor) else (type(one), one) == (type(other), other), (number, path)
        assert hooks[0] == hooks[1]
    return step


NO_WORKSPACES = lowtide.Planning(workspaces=False)
ENDS: dict[str, Callable[[Any], Any]] = {
    "equal": lambda moved: moved == 0,
    "not above": lambda moved: not moved > 0,
    "at most": lambda moved: moved <= 0.0,
    "unequal": lambda moved: False if moved != 0 else True,  # noqa: SIM211
}


@pytest.mark.parametrize("read", [True, False])
@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("weights", [[1.0] * 4, [0.0, 0.0, 1.0, 1.0, 1.0], [1.0, 1.0, 0.0, 2.0]], ids=["moves", "late", "pauses"])
def test_a_step_that_ends_where_nothing_moves(ends: str, read: bool, weights: list[float]):
    check(lambda parameters: Adapts(parameters, ENDS[ends], read=read), weights, planning=NO_WORKSPACES)


def test_numbers_that_are_none_decide_as_in_python():
    weights = [1.0, float("nan"), 1.0]
    for ends in ("equal", "at most"):
        model = Net()
        twin = copy.deepcopy(model)
        mine, its = (Adapts(net.parameters(), ENDS[ends]) for net in (model, twin))
        step = lowtide.optimize(model, batches(weights)[0], loss=loss, optimizer=mine, planning=NO_WORKSPACES)
        for batch in batches(weights):
            its.zero_grad()
            loss(twin, *batch).backward()
            its.step()
            step(*batch)
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(one.isnan(), other.isnan())
        assert mine.param_groups[0]["k"] == its.param_groups[0]["k"] == 3


def test_under_a_limit():
    step = check(lambda parameters: Adapts(parameters, ENDS["equal"]), [1.0, 0.0, 1.0, 1.0], memory="95%")
    assert step.plan.peak_bytes


def test_two_decisions_are_refused():
    model, ends = Net(), lambda moved: moved > 1e-9 and moved < 1e9
    with pytest.raises(lowtide.CaptureError, match=r"control flow depends on data|leaves the traced arithmetic"):
        lowtide.optimize(model, batches([1.0])[0], loss=loss, optimizer=Adapts(model.parameters(), ends), planning=NO_WORKSPACES)


class Chooses(torch.optim.SGD):
    """Goes on either way."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            parameter.sub_(parameter.grad, alpha=0.1 if parameter.grad.sum() > 0 else 0.2)


def test_a_decision_after_which_both_ways_go_on_is_refused():
    model = Net()
    with pytest.raises(lowtide.CaptureError, match="control flow depends on data: the optimizer compares"):
        lowtide.optimize(model, batches([1.0])[0], loss=loss, optimizer=Chooses(model.parameters(), 0.1), planning=NO_WORKSPACES)


class Asks(torch.optim.SGD):
    """Asks its parameters before it updates them."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                size = max(group["momentum"], parameter.abs().max())  # as Adafactor scales what it does
                parameter.sub_(parameter.grad * (0.1 * size))


@pytest.mark.parametrize("least", [0.0, 0.45, 9.0])
def test_a_question_about_parameters_is_asked_by_each_step(least: float):
    weights = [1.0, 3.0, 5.0, 9.0, -5.0, -9.0, -9.0]
    check(lambda parameters: Asks(parameters, 0.1, momentum=least), weights, planning=NO_WORKSPACES)


def test_a_setting_that_is_asked_for_may_change():
    model = Net()
    twin = copy.deepcopy(model)
    mine, its = (Asks(net.parameters(), 0.1, momentum=0.0) for net in (model, twin))
    step = lowtide.optimize(model, batches([1.0])[0], loss=loss, optimizer=mine, planning=NO_WORKSPACES)
    for number, batch in enumerate(batches([1.0] * 5)):
        for each in (mine, its):
            each.param_groups[0]["momentum"] = 0.3 * number
        its.zero_grad()
        loss(twin, *batch).backward()
        its.step()
        step(*batch)
        for one, other in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(one, other)
