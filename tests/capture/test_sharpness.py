"""Sharpness-aware minimisation as the recipe writes it: a gradient at weights that another gradient has moved."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn, optim
from torch.func import functional_call
from torch.nn.functional import cross_entropy

import lowtide

RADIUS = 0.05


def sharpness_aware(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    weights = dict(model.named_parameters())
    gradients = torch.autograd.grad(cross_entropy(model(x), y), list(weights.values()))
    scale = RADIUS / (torch.stack([gradient.norm() for gradient in gradients]).norm() + 1e-12)
    moved = {name: weight + (gradient * scale).detach() for (name, weight), gradient in zip(weights.items(), gradients, strict=True)}
    return cross_entropy(functional_call(model, moved, (x,)), y)


def step_twice(model: nn.Module, optimizer: optim.Optimizer, x: Tensor, y: Tensor) -> None:
    """As the optimizers of the papers do it."""
    weights = list(model.parameters())
    cross_entropy(model(x), y).backward()
    gradients = [weight.grad for weight in weights if weight.grad is not None]
    scale = RADIUS / (torch.stack([gradient.norm() for gradient in gradients]).norm() + 1e-12)
    before = [weight.detach().clone() for weight in weights]
    with torch.no_grad():
        for weight, gradient in zip(weights, gradients, strict=True):
            weight.add_(gradient * scale)
    optimizer.zero_grad()
    cross_entropy(model(x), y).backward()
    with torch.no_grad():
        for weight, old in zip(weights, before, strict=True):
            weight.copy_(old)
    optimizer.step()
    optimizer.zero_grad()


def test_it_is_the_loop_with_two_steps_to_the_last_bit():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.BatchNorm1d(32), nn.ReLU(), nn.Linear(32, 5))
    eager = copy.deepcopy(model)
    batches = [(torch.randn(16, 8), torch.randint(5, (16,))) for _ in range(4)]
    step = lowtide.optimize(
        model, batches[0], loss=sharpness_aware, optimizer=optim.SGD(model.parameters(), lr=0.1, momentum=0.9), memory="90%"
    )
    optimizer = optim.SGD(eager.parameters(), lr=0.1, momentum=0.9)
    for batch in batches:
        step(*batch)
        step_twice(eager, optimizer, *batch)
        assert all(torch.equal(one, other) for one, other in zip(model.state_dict().values(), eager.state_dict().values(), strict=True))
