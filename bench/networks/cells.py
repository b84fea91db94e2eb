"""Networks of two searched cells, stacked: NASNet-A, AmoebaNet-A, DARTS.

A cell has two inputs, states 0 (the output of the cell before the last) and 1 (of the last cell), both brought to its own channels and
side. Each pair of operators on earlier states adds up to a new state; those that are concatenated are its output. In a reduction cell,
operators on the two inputs halve the side.

Sources: NASNet-A, Zoph et al., CVPR 2018, figure 4; AmoebaNet-A, Real et al., AAAI 2019, figure 5; DARTS, Liu et al., ICLR 2019,
figures 4 and 5 (second order). Kernel sizes change no shape; they are named to be recognised.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from bench.networks.shapes import Net, Picture
from lowtide.problems.order import OrderProblem

Edge = tuple[str, int]  # an operator, and the state that it reads


@dataclass(frozen=True)
class Cell:
    """States 2, 3, ... as sums of two operators each, and the states that are concatenated."""

    pairs: tuple[tuple[Edge, Edge], ...]
    concat: tuple[int, ...]


@dataclass(frozen=True)
class Genotype:
    """What a search found."""

    normal: Cell
    reduction: Cell


NASNET_A = Genotype(
    normal=Cell(
        (
            (("sep_5x5", 1), ("sep_3x3", 0)),
            (("sep_5x5", 0), ("sep_3x3", 0)),
            (("avg_pool", 1), ("skip", 0)),
            (("avg_pool", 0), ("avg_pool", 0)),
            (("sep_3x3", 1), ("skip", 1)),
        ),
        (0, 2, 3, 4, 5, 6),
    ),
    reduction=Cell(
        (
            (("sep_5x5", 1), ("sep_7x7", 0)),
            (("max_pool", 1), ("sep_7x7", 0)),
            (("avg_pool", 1), ("sep_5x5", 0)),
            (("skip", 3), ("avg_pool", 2)),
            (("sep_3x3", 2), ("max_pool", 1)),
        ),
        (3, 4, 5, 6),
    ),
)

AMOEBANET_A = Genotype(
    normal=Cell(
        (
            (("avg_pool", 0), ("max_pool", 0)),
            (("skip", 0), ("avg_pool", 1)),
            (("sep_5x5", 2), ("sep_3x3", 1)),
            (("sep_3x3", 2), ("skip", 1)),
            (("avg_pool", 4), ("sep_3x3", 0)),
        ),
        (3, 5, 6),
    ),
    reduction=Cell(
        (
            (("avg_pool", 0), ("sep_3x3", 1)),
            (("max_pool", 1), ("max_pool", 0)),
            (("max_pool", 0), ("sep_7x7", 2)),
            (("sep_7x7", 0), ("avg_pool", 1)),
            (("sep_3x3", 3), ("conv_1x7_7x1", 0)),
        ),
        (4, 5, 6),
    ),
)

DARTS_V2 = Genotype(
    normal=Cell(
        (
            (("sep_3x3", 0), ("sep_3x3", 1)),
            (("sep_3x3", 0), ("sep_3x3", 1)),
            (("sep_3x3", 1), ("skip", 0)),
            (("skip", 0), ("dil_3x3", 2)),
        ),
        (2, 3, 4, 5),
    ),
    reduction=Cell(
        (
            (("max_pool", 0), ("max_pool", 1)),
            (("skip", 2), ("max_pool", 1)),
            (("max_pool", 0), ("skip", 2)),
            (("skip", 2), ("max_pool", 1)),
        ),
        (2, 3, 4, 5),
    ),
)


@dataclass(frozen=True)
class CellNetwork:
    """Three stages of `repeats` normal cells, a reduction cell between them that doubles the channels, and a classifier.

    Stems: "conv" is one convolution to 32 channels (CIFAR-100); "cells" a strided one and two reduction cells of half and all the channels
    (NASNet's and AmoebaNet's on ImageNet); "convs" three strided convolutions, of which cells see the last two (DARTS's on ImageNet).
    """

    genotype: Genotype
    channels: int  # of the first stage
    repeats: int
    side: int  # of the input picture
    classes: int
    stem: Literal["conv", "cells", "convs"]

    def problem(self) -> OrderProblem:
        """One inference."""
        net = Net(3, self.side)
        before, last = _STEMS[self.stem](self, net)
        for stage in range(3):
            channels = self.channels << stage
            if stage:
                before, last = last, _cell(net, self.genotype.reduction, before, last, channels, stride=2)
            for _ in range(self.repeats):
                before, last = last, _cell(net, self.genotype.normal, before, last, channels, stride=1)
        net.classifier(net.relu(last), self.classes)
        return net.problem()


Stem = tuple[Picture | None, Picture]  # the first two states; None where there is but one


def _conv_stem(network: CellNetwork, net: Net) -> Stem:
    return None, net.conv(net.input, 32)


def _cell_stem(network: CellNetwork, net: Net) -> Stem:
    start = net.conv(net.input, 32, stride=2)
    first = _cell(net, network.genotype.reduction, None, start, network.channels // 2, stride=2)
    return first, _cell(net, network.genotype.reduction, start, first, network.channels, stride=2)


def _conv_only_stem(network: CellNetwork, net: Net) -> Stem:
    half = net.relu(net.conv(net.input, network.channels // 2, stride=2))
    first = net.conv(half, network.channels, stride=2)
    return first, net.conv(net.relu(first), network.channels, stride=2)


_STEMS: dict[str, Callable[[CellNetwork, Net], Stem]] = {"conv": _conv_stem, "cells": _cell_stem, "convs": _conv_only_stem}


def _cell(net: Net, cell: Cell, before: Picture | None, last: Picture, channels: int, stride: int) -> Picture:
    second = net.conv(net.relu(last), channels)
    states = [second if before is None else _aligned(net, before, channels, second.side), second]
    for pair in cell.pairs:
        left, right = (_edge(net, op, states[state], stride if state < 2 else 1) for op, state in pair)
        states.append(net.add(left, right))
    return net.concat([states[state] for state in cell.concat])


def _aligned(net: Net, x: Picture, channels: int, side: int) -> Picture:
    """An earlier output with the channels and the side of this cell."""
    return net.conv(net.relu(x), channels) if x.side == side else _halved(net, x, channels)


def _halved(net: Net, x: Picture, channels: int) -> Picture:
    """Factorised reduction: two strided paths, one a pixel aside, each to half the channels (as in NASNet's published code)."""
    x = net.relu(x)
    straight = net.conv(net.pool(x, stride=2), channels // 2)
    aside = net.conv(net.pool(net.cut(net.pad(x)), stride=2), channels - channels // 2)
    return net.batch_norm(net.concat([straight, aside]))


def _edge(net: Net, op: str, x: Picture, stride: int) -> Picture:
    kind = op.split("_")[0]
    if kind == "skip":
        return x if stride == 1 else _halved(net, x, x.channels)
    if kind == "sep":  # applied twice
        return net.separable(net.separable(x, x.channels, stride), x.channels)
    if kind == "dil":
        return net.separable(x, x.channels, stride)
    if kind == "conv":  # one dimension, then the other
        return net.conv(net.conv(x, x.channels, stride), x.channels)
    return net.pool(x, stride)
