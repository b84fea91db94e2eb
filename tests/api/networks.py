"""Networks, batches and losses that several tests train with."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn, optim
from torch.nn import functional


def adamw(model: nn.Module) -> optim.Optimizer:
    return optim.AdamW(model.parameters(), lr=0.01)


def sgd(model: nn.Module) -> optim.Optimizer:
    return optim.SGD(model.parameters(), lr=0.1, momentum=0.9)


def workload(model: Callable[[], nn.Module], batch: Callable[[], Any], loss: Callable[..., Any], optimizer: Any = adamw):
    """Made in this order, so that one seed gives one workload."""

    def make():
        built = model()
        return built, batch(), loss, optimizer(built)

    return make


def cross_entropy(model: nn.Module, x: Tensor, y: Tensor) -> Tensor:
    return functional.cross_entropy(model(x), y)


def next_character(model: nn.Module, characters: Tensor) -> Tensor:
    """Of each row but its last character, the one that follows."""
    return functional.cross_entropy(model(characters[:, :-1]).flatten(0, 1), characters[:, 1:].flatten())


def squares(model: nn.Module, *batch: Any) -> Tensor:
    return model(*batch).square().mean()


def chosen_rows(model: nn.Module, x: Tensor, index: Tensor) -> Tensor:
    """Fails in the middle of a step where an index is too large."""
    return model(x)[index].square().mean()


def pictures() -> tuple[Tensor, Tensor]:
    return torch.randn(4, 3, 8, 8), torch.randint(0, 5, (4,))


def rows() -> tuple[Tensor]:
    return (torch.randn(4, 6),)


def convnet() -> nn.Module:
    """Batch norm, in-place activations, dropout in all its spellings, pooling, a bilinear resize."""
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True), nn.MaxPool2d(2),
        nn.Conv2d(8, 8, 3, padding=1, groups=2), nn.GroupNorm(2, 8), nn.Hardswish(inplace=True), nn.Dropout2d(0.2),
        nn.Upsample(scale_factor=2, mode="bilinear"), nn.SiLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten(),
        nn.Dropout(0.2, inplace=True), nn.Linear(32, 16), nn.LeakyReLU(inplace=True), nn.AlphaDropout(0.1), nn.Linear(16, 5),
    )  # fmt: skip


class Gpt(nn.Module):
    """Blocks of attention with dropout, norms, residuals, and an embedding tied to the last layer."""

    def __init__(self, blocks: int = 3, width: int = 32):
        super().__init__()
        self.embed = nn.Embedding(50, width)
        layers = [nn.TransformerEncoderLayer(width, 4, 4 * width, 0.1, "gelu", batch_first=True, norm_first=True) for _ in range(blocks)]
        self.blocks, self.head = nn.ModuleList(layers), nn.Linear(width, 50, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def next_token(model: nn.Module, tokens: Tensor) -> Tensor:
    """The loss of guessing each token from itself: numbers are what counts here."""
    return functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
