"""Parameters are those of the model wherever the program has them from: a list made beforehand, a variable, the groups of an optimizer."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import lowtide
from lowtide.errors import CaptureError
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


def _net() -> tuple[nn.Sequential, tuple[Tensor]]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 6), nn.Tanh(), nn.Linear(6, 2)), (torch.randn(3, 4),)


def _square(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


class Scaled(torch.optim.SGD):
    """Gradients by factors that it keeps beside its parameters."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, 0.1)
        self.factors = {each: 0.5**at for at, each in enumerate(self.param_groups[0]["params"])}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for each in self.param_groups[0]["params"]:
            if each in self.factors:
                each.grad.mul_(self.factors[each])
        return super().step()


def of_ids(known: Collection[int]) -> Callable[[Tensor], bool]:
    return lambda each: id(each) in known


def of_keys(known: Collection[int]) -> Callable[[Tensor], bool]:
    return lambda each: next(map(id, [each])) in known


IDENTITIES: dict[str, Callable[[list[Tensor]], Callable[[Tensor], bool]]] = {
    "ids": lambda kept: of_ids(frozenset(map(id, kept))),
    "ids of a map": lambda kept: of_keys(dict.fromkeys(map(id, kept))),
    "is": lambda kept: lambda each: any(each is other for other in kept),
    "is not": lambda kept: lambda each: not all(each is not other for other in kept),
}


@pytest.mark.parametrize("where", ["loss", "after_backward"])
@pytest.mark.parametrize("way", IDENTITIES)
def test_a_parameter_is_the_models_own(way: str, where: str):
    kept: dict[str, Callable[[Tensor], bool]] = {}

    def chosen(model: nn.Module, here: str) -> list[Tensor]:
        return [each for each in model.parameters() if kept["is"](each)] if where == here else []

    def make() -> Any:
        model, batch = _net()
        kept["is"] = IDENTITIES[way]([model[0].weight, model[2].bias])

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            return _square(model, x) + 0.1 * sum(each.square().sum() for each in chosen(model, "loss"))

        return model, batch, loss, torch.optim.SGD(model.parameters(), 0.1)

    def after(model: nn.Module) -> None:
        for each in chosen(model, "after_backward"):
            each.grad.mul_(0.5)

    check(make, after_backward=after)


class Named(torch.optim.SGD):
    """Factors by identity, and one parameter of its own."""

    def __init__(self, parameters: Iterable[Tensor]) -> None:
        super().__init__(parameters, 0.1)
        self.first, *others = self.param_groups[0]["params"]
        self.factors = {id(each): 0.5 for each in others}

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for each in self.param_groups[0]["params"]:
            each.grad.mul_(3.0 if each is self.first else self.factors.get(id(each), 1.0))
        return super().step()


def test_an_optimizer_knows_its_parameters():
    def make() -> Any:
        model, batch = _net()
        return model, batch, _square, Named(model.parameters())

    check(make)


@pytest.mark.parametrize("held", [set, frozenset, dict.fromkeys, list])
def test_parameters_are_found_among_those_that_are_kept(held: Callable[[Iterable[Tensor]], Any]):
    def make() -> Any:
        model, batch = _net()
        first = held([model[0].weight])

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            return _square(model, x) + sum(each.square().sum() for each in [*model.parameters()][:1] if each in first)

        return model, batch, loss, torch.optim.SGD(model.parameters(), 0.1)

    check(make)


def test_what_is_kept_for_a_parameter_is_found_by_the_models_own():
    def make() -> Any:
        model, batch = _net()
        start = {each: each.detach().clone() for each in model.parameters()}

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            return _square(model, x) + sum((each - start[each]).square().sum() for each in model.parameters() if each in start)

        return model, batch, loss, Scaled(model.parameters())

    check(make)


def test_counts_that_a_step_keeps_by_parameter_are_refused():
    model, batch = _net()
    counts = dict.fromkeys(model.parameters(), 0)

    def count(model: nn.Module) -> None:
        for each in model.parameters():
            counts[each] += 1

    with pytest.raises(CaptureError, match="a dict that it reads had"):
        lowtide.optimize(
            model, batch, loss=_square, optimizer=torch.optim.SGD(model.parameters(), 0.1), training=lowtide.Training(after_backward=count)
        )
    assert {*counts.values()} == {0}


def test_a_hook_that_each_step_adds_to_a_parameter_is_refused():
    model, batch = _net()

    def loss(model: nn.Sequential, x: Tensor) -> Tensor:
        model[0].weight.register_hook(lambda gradient: gradient * 0.5)
        return _square(model, x)

    with pytest.raises(CaptureError, match=r"hook on the gradient of 0\.weight and leaves it there"):
        lowtide.optimize(model, batch, loss=loss, optimizer=torch.optim.SGD(model.parameters(), 0.1))


def test_a_hook_that_a_step_takes_away_is_one_for_each_step():
    left: list[Any] = []

    def make() -> Any:
        model, batch = _net()

        def loss(model: nn.Sequential, x: Tensor) -> Tensor:
            left.append(model[0].weight.register_hook(lambda gradient: gradient * 0.5))
            return _square(model, x)

        return model, batch, loss, torch.optim.SGD(model.parameters(), 0.1)

    check(make, after_backward=lambda model: left.pop().remove())
