"""Optimizers that cannot be captured are refused: the message says what and what to do, and nothing is touched."""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn, optim

import lowtide
from lowtide.capture.difference import difference
from lowtide.errors import CaptureError
from tests.captures import X, captured
from tests.refusals import refused, square
from tests.training import Settings as Plain
from tests.training import eager_step


@pytest.mark.parametrize(
    ("optimizer", "message"),
    [
        (optim.LBFGS, "LBFGS evaluates the model several times a step.*first-order"),
        (optim.SparseAdam, "SparseAdam works on sparse gradients.*Adam"),
    ],
)
def test_optimizers_that_cannot_be_captured(optimizer, message):
    refused(lambda model, x: model(x).square().sum(), message, optimizer=optimizer)


class Own(optim.Optimizer):
    """SGD whose step size is a function of its learning rate."""

    def __init__(self, parameters: Any, lr: float, rule: Callable[[float], Any]) -> None:
        super().__init__(parameters, {"lr": lr})
        self.rule = rule

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                if parameter.grad is not None:
                    parameter.sub_(parameter.grad * self.rule(group["lr"]))


@pytest.mark.parametrize("rule", [math.sqrt, lambda lr: lr])
def test_a_hyper_parameter_that_escapes_is_seen_where_the_last_program_alone_is_captured(rule):
    with (
        contextlib.nullcontext() if rule is not math.sqrt else pytest.raises(CaptureError, match="turns a hyper-parameter into a constant")
    ):
        captured(optimizer=lambda parameters, lr: Own(parameters, lr, rule), latest=True)


class Torchs(Own):
    """Passes for one of torch's, of which one parameter of each kind is looked at; only biases escape."""

    __module__ = "torch.optim.torchs"
    updates = 0

    @torch.no_grad()
    def step(self) -> None:
        for parameter in self.param_groups[0]["params"]:
            lr = self.param_groups[0]["lr"]
            parameter.sub_(parameter.grad * (self.rule(lr) if parameter.dim() == 1 else lr))
            Torchs.updates += 1


@pytest.mark.parametrize(("rule", "updates"), [(math.sqrt, None), (lambda lr: lr, 8 + 2 * 2)])
def test_of_torchs_optimizers_a_parameter_of_each_kind_is_looked_at(rule, updates):
    model = nn.Sequential(*(nn.Linear(X.shape[1], X.shape[1]) for _ in range(4)))
    Torchs.updates = 0
    with contextlib.nullcontext() if updates else pytest.raises(CaptureError, match="turns a hyper-parameter into a constant"):
        captured(model, optimizer=lambda parameters, lr: Torchs(parameters, lr, rule))
        assert Torchs.updates == updates


@pytest.mark.parametrize("optimizer", [optim.SGD, optim.Adam, optim.Adagrad])
def test_the_last_program_alone_is_the_last_of_all(optimizer):
    alone = captured(optimizer=optimizer, latest=True)
    assert len(alone) == 1
    assert not difference(captured(optimizer=optimizer)[-1], alone[0])


@pytest.mark.parametrize("rule", [math.sqrt, math.exp, lambda lr: float.__add__(lr, 1.0)], ids=range(3))
def test_a_hyper_parameter_that_escapes(rule):
    refused(
        lambda model, x: model(x).sum(),
        "Own turns a hyper-parameter into a constant .*cannot be captured",
        optimizer=lambda parameters, lr: Own(parameters, lr, rule),
    )


@pytest.mark.parametrize(
    "rule",
    [
        lambda lr: lr**2 / 3 - 1 // (1 + lr),
        lambda lr: 0.5**lr % 0.3,
        lambda lr: -abs(-lr) if lr > 0.15 else +lr,
        lambda lr: float(lr) + int(10 * lr) + round(lr, 1),
        lambda lr: math.floor(10 * lr) + math.ceil(10 * lr) + math.trunc(10 * lr) + divmod(10 * lr, 3)[0] + divmod(7, lr)[1],
        lambda lr: float(f"{lr:.3f}") + max(lr, 0.15) + len(range(int(lr * 20))),
        lambda lr: torch.full((), lr),
        lambda lr: torch.tensor(lr).sqrt() + torch.as_tensor(lr, dtype=torch.float64),
        lambda lr: math.sqrt(lr) + math.pow(2, lr) - math.log(lr, 3) * math.exp(-lr),
        lambda lr: max(lr, 0.25) + min([lr, 0.25, 0.5]) + max(lr * 2, 3 * lr**2, key=lambda number: -number),
        lambda lr: float(np.sqrt(lr)),
    ],
    ids=range(11),
)
def test_arithmetic_on_hyper_parameters_follows_their_changes(rule):
    def run(optimized: bool) -> list[Tensor]:
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
        optimizer = Own(model.parameters(), 0.1, rule)
        step = (
            lowtide.optimize(model, torch.ones(2, 3), loss=square, optimizer=optimizer, planning=lowtide.Planning(workspaces=False))
            if optimized
            else None
        )
        for lr in (0.1, 0.2, 0.27, 0.5):
            optimizer.param_groups[0]["lr"] = lr
            step(torch.ones(2, 3)) if step else eager_step(model, square, optimizer, (torch.ones(2, 3),), {}, Plain())
        return [parameter.detach() for parameter in model.parameters()]

    for expected, found in zip(run(False), run(True), strict=True):
        assert torch.equal(expected, found)


@pytest.mark.parametrize(
    "rule",
    [
        lambda lr, weight: 1.0 if weight.norm().item() > 0.5 else 2.0,
        lambda lr, weight: 1.0 if torch.is_nonzero(weight.sum()) else 2.0,
        lambda lr, weight: [1.0, 2.0][int(weight.norm() > 0.5)],
        lambda lr, weight: float(weight.norm()),
    ],
    ids=range(4),
)
def test_optimizers_that_decide_on_parameters(rule):
    class Decides(Own):
        @torch.no_grad()
        def step(self) -> None:
            for group in self.param_groups:
                for parameter in (each for each in group["params"] if each.grad is not None):
                    parameter.sub_(parameter.grad * rule(group["lr"], parameter))

    refused(
        lambda model, x: model(x).sum(), "control flow depends on data|a number read from a tensor leaves the traced arithmetic",
        optimizer=lambda parameters, lr: Decides(parameters, lr, abs),
    )  # fmt: skip


def test_an_optimizer_that_keeps_what_no_slot_can_hold():
    class Counts(Own):
        def step(self) -> None:
            self.count = {*getattr(self, "count", ()), len(getattr(self, "count", ()))}
            super().step()

    refused(
        lambda model, x: model(x).sum(), "the optimizer's step changes its attribute 'count'.*`state`",
        optimizer=lambda parameters, lr: Counts(parameters, lr, abs),
    )  # fmt: skip


def test_parameters_of_which_none_is_the_models():
    refused(
        lambda model, x: model(x).sum(),
        r"no parameter of SGD is one of the model's \(parameter 0 of group 0, of shape \(2, 3\)\)",
        optimizer=lambda parameters, lr: optim.SGD([nn.Parameter(torch.ones(2, 3))], lr),
    )


def test_one_that_only_the_loss_reads():
    stray = nn.Parameter(torch.ones(()))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        refused(
            lambda model, x: (model(x) * stray).sum(),
            r"a tensor of shape \(\) that requires gradients, used at .*is not a parameter of the model",
            optimizer=lambda parameters, lr: optim.SGD([*parameters, stray], lr),
        )
