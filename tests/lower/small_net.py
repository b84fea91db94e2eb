"""A network whose generated program is kept as a golden text. Its line numbers are part of that text."""

import torch
from torch import Tensor, nn
from torch.nn import functional


class SmallNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.convolution, self.norm = nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2)
        self.out = nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        x = functional.relu_(self.norm(self.convolution(x)))
        x = x * 2
        x[:, 0] = 0.5
        return self.out(functional.dropout(x.flatten(1), 0.25))


def loss(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), y)


def batch() -> tuple[Tensor, Tensor]:
    return torch.ones(2, 1, 4, 4), torch.zeros(2, dtype=torch.int64)
