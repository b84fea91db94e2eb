"""Modules whose inference functions are saved, each with a batch for it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

ResultSpec = tuple[nn.Module, tuple[Any, ...]]


class Pair(NamedTuple):
    """A class of the caller's own."""

    one: Tensor
    other: Tensor


class Between(nn.Module):
    """Two regions with an operator of torch's between them, and results in a dictionary."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.Linear(8, 5)

    def forward(self, x: Tensor) -> dict[str, Any]:
        y = self.norm(self.first(x)).relu()
        return {"all": y.cumsum(2), "parts": [self.second(y.cumsum(2).mean((2, 3))), None, 3.5], "name": "net"}


class Words(nn.Module):
    """Token ids, tied weights, a constant, attention, and a result in several containers."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.out = nn.Embedding(32, 16), nn.Linear(16, 32, bias=False)
        self.out.weight = self.embed.weight
        self.register_buffer("places", torch.arange(6))
        self.where, self.norm, self.qkv = nn.Embedding(6, 16), nn.LayerNorm(16), nn.Linear(16, 48)

    def forward(self, ids: Tensor, shift: Tensor, scale: float = 1.0) -> Any:
        x = self.norm(self.embed(ids) + self.where(self.places)) * torch.tensor([0.5, 2.0]).repeat(8) + shift
        q, k, v = (each.unflatten(-1, (2, 8)).transpose(1, 2) for each in self.qkv(x).chunk(3, -1))
        x = x + F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2) * scale
        return OrderedDict(logits=self.out(x), hidden=(x, ids))


class Groups(nn.Module):
    """Group norms, which torch runs, and a weight as a result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = nn.Conv2d(4, 8, 3, stride=2), nn.GroupNorm(2, 8), nn.Conv2d(8, 4, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        return self.second(F.silu(self.norm(self.first(x)))), self.norm.weight


class Given(nn.Module):
    """Whatever a function makes of a product."""

    def __init__(self, make: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.inner, self.make = nn.Linear(4, 6), make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.inner(x))


def plain() -> ResultSpec:
    """One region of everything that images go through."""
    layers = [nn.Conv2d(3, 8, 3, 2, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU6(), nn.Conv2d(8, 8, 3, 1, 1, groups=8), nn.Hardswish()]
    return nn.Sequential(*layers, nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)), (torch.randn(2, 3, 12, 12),)


def between() -> ResultSpec:
    return Between(), (torch.randn(1, 3, 6, 6),)


def words() -> ResultSpec:
    return Words(), (torch.randint(0, 32, (2, 6)), torch.randn(2, 1, 16))


def groups() -> ResultSpec:
    return Groups(), (torch.randn(2, 4, 9, 9),)


NETS = (plain, between, words, groups)
