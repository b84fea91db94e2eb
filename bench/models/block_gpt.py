"""A GPT of plain blocks whose attention writes its scores out: small in parameters, large in activations."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from bench.models.workload import Entry, labels

_VOCABULARY, _LENGTH = 1000, 256


class Block(nn.Module):
    """Softmax attention over all tokens, then a two-layer perceptron, each beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.before_attention, self.before_mlp = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        parts = self.qkv(self.before_attention(x)).chunk(3, -1)
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in parts)
        mixed = torch.softmax(q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5, -1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.before_mlp(x))


class BlockGPT(nn.Module):
    """Tokens [batch, length] in, logits [batch, length, vocabulary] out."""

    def __init__(self, blocks: int = 6, width: int = 256, heads: int = 4) -> None:
        super().__init__()
        self.embed = nn.Embedding(_VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, _VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(self.norm(x))
        return logits


def squared_logits(model: nn.Module, tokens: Tensor) -> Tensor:
    """A loss that needs no targets."""
    loss: Tensor = model(tokens).float().pow(2).mean()
    return loss


BLOCK_GPT = Entry(
    "block-gpt", BlockGPT, lambda batch: (labels(_VOCABULARY, batch, _LENGTH),), squared_logits,
    "6 blocks, width 256, 4 heads, 256 tokens, no dropout, attention written out", batch_size=4,
)  # fmt: skip
