"""BTLM-3B: a decoder of GPT-2's kind with SwiGLU, ALiBi and the maximal update parametrisation.

Dey et al., "BTLM-3B-8K: 7B Parameter Performance in a 3B Parameter Model" (2023), section 2, and the configuration that its authors
published: 32 layers of width 2560, 32 heads, feed-forward layers of 6826, 50,257 tokens, no dropout, the output layer is the embedding
transposed. The maximal update parametrisation scales the embeddings by 14.6 and the logits by 2.22 times 256 / width, and divides the
scores of attention by the width of a head, not by its root. Attention writes its scores out.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

_BASE_WIDTH = 256  # of the small network that the rates and scales were tuned on
_EMBEDDING_SCALE, _OUTPUT_SCALE = 14.6, 2.22
_DEVIATION = 0.073  # of initial weights at the base width


@dataclass(frozen=True)
class Shape:
    """What the network looks like; by default as published."""

    layers: int = 32
    width: int = 2560
    heads: int = 32
    inner: int = 6826  # two thirds of four widths: SwiGLU has three matrices where others have two
    vocabulary: int = 50_257

    @property
    def width_scale(self) -> float:
        """Base width by width: "mup_width_scale"."""
        return _BASE_WIDTH / self.width


class BTLM(nn.Module):
    """Tokens [batch, length] in, logits of the next one [batch, length, vocabulary] out."""

    def __init__(self, shape: Shape = Shape()) -> None:
        super().__init__()
        self.shape = shape
        self.embed = nn.Embedding(shape.vocabulary, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.norm = nn.LayerNorm(shape.width)
        _initialise(self, shape)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.embed(tokens) * _EMBEDDING_SCALE
        bias = causal_alibi(self.shape.heads, tokens.shape[1], x.dtype, tokens.device)
        for block in self.blocks:
            x = block(x, bias)
        return functional.linear(self.norm(x), self.embed.weight) * (_OUTPUT_SCALE * self.shape.width_scale)


class Block(nn.Module):
    """Attention, then SwiGLU, each after a norm and beside a shortcut."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(shape.width), nn.LayerNorm(shape.width)
        self.attention, self.mlp = Attention(shape), SwiGLU(shape)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        x = x + self.attention(self.before_attention(x), bias)
        return x + self.mlp(self.before_mlp(x))


class Attention(nn.Module):
    """Attention of several heads. `bias` [heads, length, length] is added to the scores: it tells of distance and hides what follows."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.heads = shape.heads
        self.qkv, self.out = nn.Linear(shape.width, 3 * shape.width), nn.Linear(shape.width, shape.width)

    def forward(self, x: Tensor, bias: Tensor) -> Tensor:
        batch, length, width = x.shape
        q, k, v = (part.view(batch, length, self.heads, -1).transpose(1, 2) for part in self.qkv(x).chunk(3, -1))
        scores = q @ k.transpose(-1, -2) / (width // self.heads)
        mixed = torch.softmax(scores + bias, -1) @ v
        return self.out(mixed.transpose(1, 2).reshape(batch, length, width))


class SwiGLU(nn.Module):
    """`down(up(x) * silu(gate(x)))`."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.up, self.gate = nn.Linear(shape.width, shape.inner), nn.Linear(shape.width, shape.inner)
        self.down = nn.Linear(shape.inner, shape.width)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(self.up(x) * functional.silu(self.gate(x)))


def slopes(heads: int, device: torch.device | str = "cpu") -> Tensor:
    """ALiBi's slopes [heads], a geometric series from `2 ** (-8 / heads)` down to `2 ** -8`; Press et al. (2022), section 3."""
    if heads < 1 or heads & (heads - 1):
        raise ValueError(f"expected heads to be a power of two, for which ALiBi's slopes are one series; got {heads}")
    return torch.exp2(torch.arange(1, heads + 1, device=device) * (-8 / heads))


def causal_alibi(heads: int, length: int, dtype: torch.dtype, device: torch.device | str = "cpu") -> Tensor:
    """What is added to scores [heads, length, length]: minus slope times distance to the past, minus infinity for what is to come."""
    places = torch.arange(length, device=device)
    behind = places[:, None] - places[None, :]
    distance = torch.where(behind < 0, torch.inf, behind.float())
    return (-slopes(heads, device)[:, None, None] * distance).to(dtype)


def next_token_loss(model: nn.Module, tokens: Tensor) -> Tensor:
    """Cross-entropy of each next token, in 32 bits."""
    logits = model(tokens)[:, :-1].float()
    return functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def _initialise(model: BTLM, shape: Shape) -> None:
    """Hidden weights are of variance by width; those that write to the shortcut also by depth; biases are zero."""
    hidden = _DEVIATION * shape.width_scale**0.5
    for name, parameter in model.named_parameters():
        if name == "embed.weight":
            nn.init.normal_(parameter, std=_DEVIATION)
        elif name.endswith(("out.weight", "down.weight")):
            nn.init.normal_(parameter, std=hidden / (2 * shape.layers) ** 0.5)
        elif parameter.dim() == 2:
            nn.init.normal_(parameter, std=hidden)
        elif name.endswith(("qkv.bias", "out.bias", "up.bias", "gate.bias", "down.bias")):
            nn.init.zeros_(parameter)
