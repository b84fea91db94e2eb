"""A small network that has all that optimizers meet, and how it is trained."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn, optim
from torch.nn import functional

from tests.api.networks import cross_entropy


class Net(nn.Module):
    """All that optimizers meet: matrices, vectors, a frozen parameter, one without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.LayerNorm(8), nn.Linear(8, 3)
        self.frozen = nn.Parameter(torch.randn(8), requires_grad=False)
        self.unused = nn.Parameter(torch.randn(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(functional.relu(self.norm(self.first(x)) + self.frozen))


def made(optimizer: Callable[..., optim.Optimizer], **settings: Any):
    """A workload that trains `Net` with this optimizer."""

    def make():
        model = Net()
        return model, (torch.randn(4, 6), torch.randint(0, 3, (4,))), cross_entropy, optimizer(model.parameters(), **settings)

    return make
