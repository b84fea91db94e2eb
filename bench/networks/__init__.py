"""The networks of the ordering papers as bare ordering problems: shapes only, nothing to run.

problem = bench.networks.PROBLEMS["nasnet-cifar"].problem()
"""

from __future__ import annotations

from dataclasses import replace
from typing import Protocol

from bench.networks.cells import AMOEBANET_A, DARTS_V2, NASNET_A, CellNetwork
from bench.networks.hrnet import HRNet
from bench.networks.randwire import RandWire
from lowtide.problems.order import OrderProblem

__all__ = ["PROBLEMS", "Network"]


class Network(Protocol):
    """Sizes and repeats of a network: a frozen dataclass."""

    def problem(self) -> OrderProblem:
        """One inference at batch 1."""
        ...


_V2 = HRNet(width=18, blocks=2, modules=(1, 3, 2), stage1_channels=64, stage1_blocks=2)
_W32 = HRNet(width=32, blocks=4, modules=(1, 4, 3), stage1_channels=64, stage1_blocks=4)

PROBLEMS: dict[str, Network] = {
    "nasnet-cifar": CellNetwork(NASNET_A, channels=32, repeats=6, side=32, classes=100, stem="conv"),
    "nasnet-imagenet": CellNetwork(NASNET_A, channels=44, repeats=4, side=224, classes=1000, stem="cells"),
    "amoebanet-cifar": CellNetwork(AMOEBANET_A, channels=36, repeats=6, side=32, classes=100, stem="conv"),
    "amoebanet-imagenet": CellNetwork(AMOEBANET_A, channels=50, repeats=4, side=224, classes=1000, stem="cells"),
    "darts-cifar": CellNetwork(DARTS_V2, channels=36, repeats=6, side=32, classes=100, stem="conv"),
    "darts-imagenet": CellNetwork(DARTS_V2, channels=48, repeats=4, side=224, classes=1000, stem="convs"),
    **{f"randwire-s{seed}": RandWire(seed) for seed in range(3)},
    **{f"randwire-s{seed}-stacked": RandWire(seed, stacked=True) for seed in range(3)},
    "hrnet_w18_small-256": HRNet(width=16, blocks=2, modules=(1, 1, 1), stage1_channels=32, stage1_blocks=1),
    "hrnet_w18_small_v2-256": _V2,
    "hrnet_w18_small_v2-256-s1_32x1": replace(_V2, stage1_channels=32, stage1_blocks=1),
    "hrnet_w32-256": _W32,
    "hrnet_w32-256-s1_32x1": replace(_W32, stage1_channels=32, stage1_blocks=1),
}
