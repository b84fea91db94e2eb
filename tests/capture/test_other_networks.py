"""Networks beside the model that still require gradients: teachers, references, critics. What counts is where a gradient would go."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import lowtide
from tests.training import check

Loss = Callable[[nn.Module, Tensor], Any]


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6))


def distilled(other: nn.Module) -> Loss:
    def loss(model: nn.Module, x: Tensor) -> Any:
        with torch.no_grad():
            wanted = other(x)
        return functional.mse_loss(model(x), wanted)

    return loss


def detached(other: nn.Module) -> Loss:
    return lambda model, x: model(other(x).detach()).square().mean()


def averaged(other: nn.Module) -> Loss:
    def loss(model: nn.Module, x: Tensor) -> Any:
        with torch.no_grad():
            for old, new in zip(other.parameters(), model.parameters(), strict=True):
                old.mul_(0.9).add_(new, alpha=0.1)
            wanted = other(x)
        return functional.mse_loss(model(x), wanted), sum(each.sum() for each in other.state_dict().values())

    return loss


def differentiated(other: nn.Module) -> Loss:
    def loss(model: nn.Module, x: Tensor) -> Any:
        (gradient,) = torch.autograd.grad(other(x).square().mean(), other[0].weight)  # type: ignore[index]
        return model(x).mean() * gradient.sum()

    return loss


def frozen_critic(other: nn.Module) -> Loss:
    other.requires_grad_(False)
    return critic(other)


def critic(other: nn.Module) -> Loss:
    return lambda model, x: other(model(x)).mean()


def with_a_pass_of_its_own(other: nn.Module) -> Loss:
    def loss(model: nn.Module, x: Tensor) -> Any:
        other(x).mean().backward()
        return model(x).mean()

    return loss


class Product(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight.t()

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return gradients[0] @ weight, gradients[0].t() @ x


def by_a_function(other: nn.Module) -> Loss:
    return lambda model, x: Product.apply(model(x), other[0].weight).mean()  # type: ignore[index]


def made(kind: Callable[[nn.Module], Loss]) -> tuple[nn.Module, Tensor, Loss, torch.optim.Optimizer]:
    torch.manual_seed(0)
    model, other = net(), net()
    return model, torch.randn(5, 6), kind(other), torch.optim.AdamW(model.parameters(), lr=0.1)


@pytest.mark.parametrize("kind", [distilled, detached, averaged, differentiated, frozen_critic])
def test_what_no_gradient_reaches_is_only_read(kind: Callable[[nn.Module], Loss]) -> None:
    check(lambda: made(kind))


@pytest.mark.parametrize("kind", [critic, with_a_pass_of_its_own, by_a_function])
def test_what_a_gradient_would_be_left_on_is_refused(kind: Callable[[nn.Module], Loss]) -> None:
    torch.manual_seed(0)
    model, other, x = net(), net(), torch.randn(5, 6)
    before = copy.deepcopy(other.state_dict())
    with pytest.raises(lowtide.CaptureError, match=r"leads to a tensor of shape \(\d+.*no.*requires_grad_\(False\).*detach\(\) stops"):
        lowtide.optimize(model, x, loss=kind(other), optimizer=torch.optim.SGD(model.parameters(), 0.1))
    assert all(each.grad is None for each in other.parameters())
    assert all(torch.equal(before[name], item) for name, item in other.state_dict().items())
