"""Several optimizers on one loss: they step one after the other, as a loop would have them."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn, optim

import lowtide
from bench.in_values import in_values
from tests.training import differences


def net() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.LayerNorm(8), nn.GELU(), nn.Linear(8, 4))


def loss(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def by_shape(model: nn.Module) -> list[optim.Optimizer]:
    matrices = [each for each in model.parameters() if each.dim() == 2]
    return [optim.Muon(matrices, lr=0.01), optim.AdamW([each for each in model.parameters() if each.dim() < 2], lr=0.02)]


def by_layer(model: nn.Module) -> list[optim.Optimizer]:
    model[1].requires_grad_(False)  # type: ignore[index, operator]
    early, late = list(model[0].parameters()), list(model[3].parameters())  # type: ignore[index]
    return [optim.SGD(late, lr=0.1, momentum=0.9), optim.Adam([{"params": early[:1]}, {"params": early[1:], "lr": 0.3}])]


@pytest.mark.parametrize("make", [by_shape, by_layer])
def test_each_trains_its_own_in_turn(make: Any) -> None:
    left, right = net(), net()
    ours, theirs = make(left), make(right)
    rates = [[optim.lr_scheduler.ExponentialLR(each, 0.5) for each in some] for some in (ours, theirs)]
    seen: tuple[list[Any], list[Any]] = [], []
    for some, notes in zip((ours, theirs), seen, strict=True):
        some[1].register_step_post_hook(lambda optimizer, args, kwargs, notes=notes: notes.append(type(optimizer)))
    batches = [torch.randn(5, 6) for _ in range(4)]
    step = lowtide.optimize(left, batches[0], loss=loss, optimizer=ours, planning=lowtide.Planning(workspaces=False))
    for number, x in enumerate((*batches, batches[0][:3])):  # the last as a plain loop would
        value = step(x)
        for each in theirs:
            each.zero_grad()
        expected = loss(right, x)
        expected.backward()
        for each in theirs:
            each.step()
        assert torch.equal(value, expected)
        if number == 1:
            for scheduler in (*rates[0], *rates[1]):
                scheduler.step()
    assert not differences(left.state_dict(), right.state_dict())
    for mine, other in zip(ours, theirs, strict=True):
        assert not differences(mine.state_dict(), other.state_dict())
    assert seen[0] == seen[1]


def test_a_head_that_is_replaced_goes_on_as_in_a_loop() -> None:
    models = [net(), net()]
    both = [by_layer(model) for model in models]
    step = lowtide.optimize(models[0], torch.ones(5, 6), loss=loss, optimizer=both[0], planning=lowtide.Planning(workspaces=False))
    for number in range(4):
        if number == 2:
            head = nn.Linear(8, 4)
            for model, optimizers in zip(models, both, strict=True):
                model[3] = copy.deepcopy(head)  # type: ignore[index]
                optimizers[0].param_groups.clear()
                optimizers[0].state.clear()
                optimizers[0].add_param_group({"params": list(model[3].parameters())})  # type: ignore[index]
        x = torch.randn(5, 6)
        value = step(x)
        for each in both[1]:
            each.zero_grad()
        expected = loss(models[1], x)
        expected.backward()
        for each in both[1]:
            each.step()
        assert torch.equal(value, expected)
    assert not differences(models[0].state_dict(), models[1].state_dict())


class Both:
    """A class of a user's own around two optimizers."""

    def __init__(self, one: optim.Optimizer, more: list[optim.Optimizer]) -> None:
        self.one, self.more, self.count = one, more, 0

    def step(self) -> None:
        for each in (self.one, *self.more):
            each.step()


def test_a_wrapper_of_a_users_own_is_told_what_to_give_instead() -> None:
    model = net()
    params = list(model.parameters())
    wrapper = Both(optim.SGD(params[:1], 0.1), [optim.Adam(params[1:])])
    arguments: dict[str, Any] = {"loss": loss, "workspaces": False}
    with pytest.raises(TypeError, match=r"got a Both, which holds optimizers: give those \(`optimizer=\[wrapper.one, \*wrapper.more\]`\)"):
        lowtide.optimize(model, torch.ones(5, 6), optimizer=wrapper, **in_values(**arguments))
    lowtide.optimize(model, torch.ones(5, 6), optimizer=[wrapper.one, *wrapper.more], **in_values(**arguments))


def test_what_several_cannot_be_is_refused() -> None:
    model = net()
    params = list(model.parameters())
    arguments: dict[str, Any] = {"loss": loss, "workspaces": False}
    with pytest.raises(lowtide.CaptureError, match=r"optimizers 0 and 1 of the list both train a parameter of shape \(8, 6\).*one of them"):
        lowtide.optimize(model, torch.ones(5, 6), optimizer=[optim.SGD(params, 0.1), optim.Adam(params[:1])], **in_values(**arguments))
    with pytest.raises(TypeError, match="or a list of them that step one after the other; got a str"):
        lowtide.optimize(model, torch.ones(5, 6), optimizer=[optim.SGD(params, 0.1), "adam"], **in_values(**arguments))
    with pytest.raises(TypeError, match="got a list"):
        lowtide.optimize(model, torch.ones(5, 6), optimizer=[], **in_values(**arguments))
    with pytest.raises(lowtide.CaptureError, match=r"scaler skips each of several.*bfloat16"):
        lowtide.optimize(model, torch.ones(5, 6), optimizer=by_layer(model), **in_values(scaler=torch.amp.GradScaler("cpu"), **arguments))
