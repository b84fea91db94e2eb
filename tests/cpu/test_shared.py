"""What threads share of a stage: a window goes the way of the product before it, so that each thread finds near what it made."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

import lowtide
from lowtide.cpu.network import StagedBody, network_of, team
from lowtide.cpu.networks import placed
from lowtide.cpu.source import by_columns
from lowtide.cpu.stages import Product, Windows
from lowtide.ir.bodies import Region, is_region


@pytest.mark.parametrize(("channels", "side", "wanted"), [((16, 32), 12, False), ((128, 256), 4, True)])
def test_a_window_is_shared_as_what_it_reads(channels: tuple[int, int], side: int, wanted: bool) -> None:
    inner, outer = channels
    model = nn.Sequential(
        nn.Conv2d(inner, outer, 1), nn.Conv2d(outer, outer, 3, padding=1, groups=outer), nn.Conv2d(outer, outer, 1)
    ).eval()
    graph = lowtide.optimize(model, (torch.randn(1, inner, side, side),), exact=False).plan.graph
    (region,) = (Region.of(node) for node in graph.nodes if is_region(node))
    target = replace(team().target, threads=2)
    stages = network_of(StagedBody.of(region.body, region.fixed, target), region.joined, placed).stages
    shared = by_columns(stages, target)
    first, window = next(each for each in stages if isinstance(each, Product)), next(each for each in stages if isinstance(each, Windows))
    assert (first in shared, window in shared) == (wanted, wanted)
