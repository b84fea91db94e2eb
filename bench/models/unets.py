"""U-Net and U-Net++, after their papers.

U-Net: Ronneberger, Fischer, Brox, "U-Net: Convolutional Networks for Biomedical Image Segmentation" (2015), figure 1. Its convolutions are
unpadded and its skips cropped; here they are padded, so that masks are as large as pictures, and there is batch normalisation, as in every
implementation in use. U-Net++: Zhou, Siddiquee, Tajbakhsh, Liang, "UNet++: A Nested U-Net Architecture for Medical Image Segmentation"
(2018), figure 1 and section 3.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor, nn


def _double(inputs: int, outputs: int) -> nn.Sequential:
    """Two convolutions of 3x3, each with batch normalisation and ReLU: [n, inputs, h, w] -> [n, outputs, h, w]."""
    layers: list[nn.Module] = []
    for channels in (inputs, outputs):
        layers += [nn.Conv2d(channels, outputs, 3, padding=1, bias=False), nn.BatchNorm2d(outputs), nn.ReLU(inplace=True)]
    return nn.Sequential(*layers)


def _checked(width: int, depth: int) -> list[int]:
    """Channels by level: doubled at each, from `width`."""
    if width < 1 or depth < 1:
        raise ValueError(f"expected width >= 1 and depth >= 1, got width={width}, depth={depth}")
    return [width * 2**level for level in range(depth + 1)]


def _check_sides(pictures: Tensor, depth: int) -> None:
    height, width = pictures.shape[-2:]
    if height % 2**depth or width % 2**depth:
        raise ValueError(f"expected sides that {2**depth} divides (halved {depth} times), got {height}x{width}")


class UNet(nn.Module):
    """[n, channels, h, w] -> scores [n, classes, h, w]. `width` channels at full size; `depth` times half the sides, twice those."""

    def __init__(self, channels: int = 1, classes: int = 2, width: int = 64, depth: int = 4) -> None:
        super().__init__()
        levels = _checked(width, depth)
        self.depth = depth
        self.down = nn.ModuleList([_double(channels, width), *(_double(few, many) for few, many in pairwise(levels))])
        self.pool = nn.MaxPool2d(2)
        self.up = nn.ModuleList(nn.ConvTranspose2d(many, few, 2, stride=2) for few, many in pairwise(levels))
        self.merge = nn.ModuleList(_double(2 * few, few) for few in levels[:-1])
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, pictures: Tensor) -> Tensor:
        _check_sides(pictures, self.depth)
        skips = [self.down[0](pictures)]
        for block in self.down[1:]:
            skips.append(block(self.pool(skips[-1])))
        x = skips.pop()
        for up, merge in zip(reversed(self.up), reversed(self.merge), strict=True):
            x = merge(torch.cat([skips.pop(), up(x)], dim=1))
        scores: Tensor = self.head(x)
        return scores


class UNetPlusPlus(nn.Module):
    """[n, channels, h, w] -> scores [n, classes, h, w], `depth` of them, one from each node of the top row (deep supervision).

    Node (i, j) sits at level i, j steps along the skip: X(i, j) = H([X(i, 0), ..., X(i, j - 1), U(X(i + 1, j - 1))]), equation 1 of the
    paper.
    """

    def __init__(self, channels: int = 1, classes: int = 2, width: int = 32, depth: int = 4) -> None:
        super().__init__()
        levels = _checked(width, depth)
        self.depth = depth
        self.pool = nn.MaxPool2d(2)
        self.encoder = nn.ModuleList([_double(channels, width), *(_double(few, many) for few, many in pairwise(levels))])
        self.up, self.nested = nn.ModuleDict(), nn.ModuleDict()
        for i, j in self._nodes():
            self.up[f"{i}_{j}"] = nn.ConvTranspose2d(levels[i + 1], levels[i], 2, stride=2)
            self.nested[f"{i}_{j}"] = _double((j + 1) * levels[i], levels[i])
        self.heads = nn.ModuleList(nn.Conv2d(width, classes, 1) for _ in range(depth))

    def _nodes(self) -> list[tuple[int, int]]:
        """The nodes along the skips, in an order in which each finds its inputs."""
        return [(i, j) for j in range(1, self.depth + 1) for i in range(self.depth + 1 - j)]

    def forward(self, pictures: Tensor) -> tuple[Tensor, ...]:
        _check_sides(pictures, self.depth)
        rows = [[self.encoder[0](pictures)]]
        for block in self.encoder[1:]:
            rows.append([block(self.pool(rows[-1][0]))])
        for i, j in self._nodes():
            raised = self.up[f"{i}_{j}"](rows[i + 1][j - 1])
            rows[i].append(self.nested[f"{i}_{j}"](torch.cat([*rows[i], raised], dim=1)))
        return tuple(head(node) for head, node in zip(self.heads, rows[0][1:], strict=True))
