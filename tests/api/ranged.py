"""What ranges of shapes are tried on: texts, and pictures that are halved."""

from __future__ import annotations

import copy

import torch
from torch import nn
from torch.nn import functional

import lowtide
from bench.in_values import in_values

DYNAMIC = {0: {0: ("rows", 2, 8), 1: ("length", 8, 64)}, 1: {0: "rows", 1: "length"}}


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 32)
        self.layers = nn.ModuleList(nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True) for _ in range(1))
        self.head = nn.Linear(32, 50)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden)
        return self.head(hidden)


def token_loss(model, tokens, labels):
    return functional.cross_entropy(model(tokens).flatten(0, 1), labels.flatten())


def batch_of(rows, length):
    return torch.randint(0, 50, (rows, length)), torch.randint(0, 50, (rows, length))


class Halving(nn.Module):
    """Two levels down and up, as a U-Net goes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Conv2d(1, 4, 3, padding=1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(8, 1, 1)

    def forward(self, pictures):
        above = self.first(pictures).relu()
        below = self.second(functional.max_pool2d(above, 4)).relu()
        return self.last(torch.cat([functional.interpolate(below, scale_factor=4), above], 1)).square().mean()


def halving(dynamic, **settings):
    torch.manual_seed(0)
    model = Halving()
    twin = copy.deepcopy(model)
    optimizer, other = (torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, twin))
    example = (torch.randn(3, 1, 24, 24),)
    step = lowtide.optimize(model, example, loss=lambda m, x: m(x), optimizer=optimizer, **in_values(dynamic=dynamic, **settings))

    def same(side):
        pictures = torch.randn(3, 1, side, side)
        loss = step(pictures)
        other.zero_grad()
        expected = twin(pictures)
        expected.backward()
        other.step()
        return torch.equal(loss, expected.detach()) and all(map(torch.equal, model.parameters(), twin.parameters()))

    return step, same
