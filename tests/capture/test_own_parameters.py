"""Parameters are those of the model wherever the program has them from: a list made beforehand, a variable, the groups of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.training import check

Parameters = Callable[[], Iterable[Tensor]]
Loss = Callable[[nn.Sequential, Tensor, Parameters], Tensor]


def always(items: Iterable[Tensor]) -> Parameters:
    return lambda: items


WAYS: dict[str, Callable[[nn.Sequential, torch.optim.Optimizer], Parameters]] = {
    "model": lambda model, optimizer: model[0].parameters,
    "list": lambda model, optimizer: always([*model[0].parameters()]),
    "groups": lambda model, optimizer: lambda: optimizer.param_groups[0]["params"],
    "variables": lambda model, optimizer: always((model[0].weight, model[0].bias)),
    "dictionary": lambda model, optimizer: dict(model[0].named_parameters()).values,
}


def frozen_for_a_while(model: nn.Sequential, x: Tensor, parameters: Parameters) -> Tensor:
    for each in parameters():
        each.requires_grad = False
    value = model(x).square().mean()
    for each in parameters():
        each.requires_grad_(True)
    return value + 0.1 * model(-x).mean()


def flags_are_read(model: nn.Sequential, x: Tensor, parameters: Parameters) -> Tensor:
    model[0].requires_grad_(False)
    trained = sum(each.requires_grad for each in parameters())
    model[0].requires_grad_(True)
    return model(x).square().mean() * (1 + trained)


def penalised(model: nn.Sequential, x: Tensor, parameters: Parameters) -> Tensor:
    return model(x).square().mean() + 0.1 * sum(each.square().sum() for each in parameters())


def differentiated(model: nn.Sequential, x: Tensor, parameters: Parameters) -> Tensor:
    value = model(x).square().mean()
    gradients = torch.autograd.grad(value, list(parameters()), create_graph=True, allow_unused=True)
    return value + 0.1 * sum(each.square().sum() for each in gradients if each is not None)


def written(model: nn.Sequential, x: Tensor, parameters: Parameters) -> Tensor:
    value = model(x).square().mean()
    with torch.no_grad():
        for each in parameters():
            each.clamp_(-0.2, 0.2)
    return value.detach() + model(x).mean()


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("program", [frozen_for_a_while, flags_are_read, penalised, differentiated, written])
def test_what_a_program_does_to_parameters_counts_wherever_it_has_them_from(program: Loss, way: str):
    def make() -> Any:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2))
        optimizer = torch.optim.SGD([{"params": [*each.parameters()]} for each in (model[0], model[2])], 0.1)
        parameters = WAYS[way](model, optimizer)
        return model, (torch.randn(3, 4),), lambda model, x: program(model, x, parameters), optimizer

    check(make)
