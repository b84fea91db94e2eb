"""The seven networks of MAGIS (ASPLOS 2024) as its published code writes them down: leaner than the networks whose names they bear.

Nothing has a bias. Transformers are their blocks alone, on inputs that are embedded already: no embeddings, no head, no masks, no dropout,
norms without weights, ReLU for every activation; BTLM's feed-forward layers are four widths wide. ResNet-50 has no batch normalisation
and an average pool where others have a maximum. The U-Nets have neither; they double pictures by repeating pixels, and U-Net++ has one
convolution for each node. The loss is the mean square distance to random targets.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.models.workload import Batch, Entry, images

_LADDER = (64, 128, 256, 512, 1024)


class Block(nn.Module):
    """Attention that writes its scores out, then two layers with ReLU, each after a norm and beside a shortcut."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm = nn.LayerNorm(width, elementwise_affine=False)
        self.query, self.key, self.value, self.out = (nn.Linear(width, width, bias=False) for _ in range(4))
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.ReLU(), nn.Linear(4 * width, width, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        normed = self.norm(x)
        q, k, v = (layer(normed).view(batch, length, self.heads, -1).transpose(1, 2) for layer in (self.query, self.key, self.value))
        mixed = torch.softmax(q @ k.transpose(-1, -2) / (width // self.heads) ** 0.5, -1) @ v
        x = x + self.out(mixed.transpose(1, 2).reshape(batch, length, width))
        return x + self.mlp(self.norm(x))


class Patches(nn.Module):
    """Pictures [n, 3, h, w] to their patches' pixels [n, patches, 3 * side * side]."""

    def __init__(self, side: int) -> None:
        super().__init__()
        self.side = side

    def forward(self, pictures: Tensor) -> Tensor:
        cut = pictures.unfold(2, self.side, self.side).unfold(3, self.side, self.side)  # [n, 3, rows, columns, side, side]
        return cut.permute(0, 2, 3, 1, 4, 5).flatten(3).flatten(1, 2)


class UNet(nn.Module):
    """[n, 1, h, w] -> [n, 1, h, w]."""

    def __init__(self, ladder: Sequence[int] = _LADDER) -> None:
        super().__init__()
        self.down = nn.ModuleList(_convolutions(few, many, 2) for few, many in pairwise((1, *ladder)))
        self.up = nn.ModuleList(_convolutions(few + many, few, 2) for few, many in pairwise(ladder))
        self.head = nn.Sequential(_convolutions(ladder[0], 2, 1), nn.Conv2d(2, 1, 1, bias=False), nn.Sigmoid())

    def forward(self, pictures: Tensor) -> Tensor:
        skips = [self.down[0](pictures)]
        for block in self.down[1:]:
            skips.append(block(functional.avg_pool2d(skips[-1], 2)))
        x = skips.pop()
        for block in reversed(self.up):
            x = block(torch.cat([skips.pop(), _doubled(x)], 1))
        scores: Tensor = self.head(x)
        return scores


class UNetPlusPlus(nn.Module):
    """[n, 1, h, w] -> [n, 1, h, w], of the last node of the top row. Node (i, j) sees all nodes of its row and node (i + 1, j - 1)."""

    def __init__(self, ladder: Sequence[int] = _LADDER) -> None:
        super().__init__()
        self.down = nn.ModuleList(_convolutions(few, many, 1) for few, many in pairwise((1, *ladder)))
        self.nested = nn.ModuleDict(
            {
                f"{i}_{j}": _convolutions(j * ladder[i] + ladder[i + 1], ladder[i], 1)
                for j in range(1, len(ladder))
                for i in range(len(ladder) - j)
            }
        )
        self.head = nn.Sequential(nn.Conv2d(ladder[0], 1, 1, bias=False), nn.Sigmoid())

    def forward(self, pictures: Tensor) -> Tensor:
        rows: list[list[Tensor]] = []
        x = pictures
        for depth, block in enumerate(self.down):
            rows.append([block(x)])
            x = functional.avg_pool2d(rows[-1][0], 2) if depth + 1 < len(self.down) else x
            for i in reversed(range(depth)):
                raised = _doubled(rows[i + 1][-1])
                rows[i].append(self.nested[f"{i}_{depth - i}"](torch.cat([*rows[i], raised], 1)))
        scores: Tensor = self.head(rows[0][-1])
        return scores


def squares(model: nn.Module, x: Tensor, target: Tensor) -> Tensor:
    """Mean square distance of what comes out to a target."""
    return functional.mse_loss(model(x), target)


def _doubled(x: Tensor) -> Tensor:
    return functional.interpolate(x, scale_factor=2, mode="nearest")


def _convolutions(inputs: int, outputs: int, count: int) -> nn.Sequential:
    """Convolutions of 3x3, each with ReLU."""
    layers = [layer for k in range(count) for layer in (nn.Conv2d(outputs if k else inputs, outputs, 3, padding=1, bias=False), nn.ReLU())]
    return nn.Sequential(*layers)


def _resnet50() -> nn.Module:
    """Imported here: torchvision takes seconds."""
    from torchvision.models import resnet50

    model: nn.Module = resnet50(norm_layer=lambda channels: nn.Identity())
    model.maxpool, model.fc = nn.AvgPool2d(3, 2, 1), nn.Linear(2048, 1000, bias=False)
    return model


def _trunk(layers: int, width: int, heads: int, dtype: torch.dtype = torch.float32) -> nn.Module:
    return nn.Sequential(*(Block(width, heads) for _ in range(layers))).to(dtype)


def _vit() -> nn.Module:
    return nn.Sequential(Patches(16), *(Block(768, 12) for _ in range(12)), nn.Linear(768, 1000, bias=False))


def _embedded(width: int, dtype: torch.dtype, batch_size: int) -> Batch:
    return images(batch_size, 512, width).to(dtype), images(batch_size, 512, width).to(dtype)


def _pictures(channels: int, side: int, target: Sequence[int], batch_size: int) -> Batch:
    return images(batch_size, channels, side, side), images(batch_size, *target)


def _language(name: str, layers: int, width: int, heads: int, dtype: torch.dtype) -> Entry:
    make, batch = partial(_trunk, layers, width, heads, dtype), partial(_embedded, width, dtype)
    return Entry(f"{name}, lean", make, batch, squares, f"{layers} blocks of width {width}, {heads} heads, 512 tokens", 32)


ENTRIES = (
    Entry("resnet50, lean", _resnet50, partial(_pictures, 3, 224, (1000,)), squares, "no batch normalisation, 3x224x224", 64),
    _language("bert-base", 12, 768, 12, torch.float32),
    Entry("vit-base, lean", _vit, partial(_pictures, 3, 224, (196, 1000)), squares, "12 blocks of width 768, 196 patches", 64),
    Entry("unet, lean", UNet, partial(_pictures, 1, 256, (1, 256, 256)), squares, "64 to 1024 channels, 1x256x256", 32),
    Entry("unetplusplus, lean", UNetPlusPlus, partial(_pictures, 1, 256, (1, 256, 256)), squares, "64 to 1024 channels, 1x256x256", 16),
    _language("gpt-neo-1.3B", 24, 2048, 16, torch.bfloat16),
    _language("btlm-3B", 32, 2560, 32, torch.bfloat16),
)
