"""A small GPT over characters, pre-norm as in GPT-2, and the text that every machine with Python has: its standard library's sources."""

from __future__ import annotations

import sysconfig
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 128  # ASCII


@dataclass(frozen=True)
class Shape:
    """What the network looks like."""

    blocks: int = 6
    width: int = 512
    heads: int = 8
    length: int = 128  # characters that it sees at once
    dropout: float = 0.1


class CharGPT(nn.Module):
    """Characters [batch, length] in, logits of the next one [batch, length, VOCABULARY] out."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.characters = nn.Embedding(VOCABULARY, shape.width)
        self.positions = nn.Embedding(shape.length, shape.width)
        self.dropout = nn.Dropout(shape.dropout)
        self.blocks = nn.Sequential(*(Block(shape) for _ in range(shape.blocks)))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, VOCABULARY, bias=False)
        self.apply(_initialise)

    def forward(self, characters: torch.Tensor) -> torch.Tensor:
        places = torch.arange(characters.shape[1], device=characters.device)
        x = self.dropout(self.characters(characters) + self.positions(places))
        return self.head(self.norm(self.blocks(x)))


class Block(nn.Module):
    """Attention to what came before, then a two-layer perceptron, each beside a shortcut."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention = Attention(shape)
        self.up, self.down = nn.Linear(shape.width, 4 * shape.width), nn.Linear(4 * shape.width, shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attention(self.norm1(x))
        return x + self.dropout(self.down(functional.gelu(self.up(self.norm2(x)))))


class Attention(nn.Module):
    """Causal attention of several heads."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv, self.out = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)
        self.dropout = nn.Dropout(shape.dropout)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.dropout(self.out(mixed.transpose(1, 2).reshape(batch, length, width)))


def next_character_loss(model: nn.Module, characters: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of predicting each next character, in nats."""
    return functional.cross_entropy(model(characters).flatten(0, 1), following.flatten())


def standard_library() -> torch.Tensor:
    """The standard library's top-level modules in alphabetical order, int64 [characters]; what is not ASCII is a question mark."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = "\n".join(path.read_text(encoding="utf-8") for path in files)
    return torch.frombuffer(bytearray(text.encode("ascii", "replace")), dtype=torch.uint8).long()


def batches(text: torch.Tensor, count: int, batch_size: int, length: int, seed: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Random windows of the text: characters and the ones that follow them, each int64 [batch_size, length]."""
    generator = torch.Generator().manual_seed(seed)
    starts = torch.randint(len(text) - length, (count, batch_size), generator=generator)
    windows = text[starts[..., None] + torch.arange(length + 1)]
    return [(window[:, :-1].contiguous(), window[:, 1:].contiguous()) for window in windows]


def _initialise(module: nn.Module) -> None:
    """GPT-2's: normal weights of deviation 0.02, no biases."""
    if isinstance(module, (nn.Linear, nn.Embedding)):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
