"""Images whose channels lie apart are turned in registers, a tile at a time: whatever their sizes, and however many threads share them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import nn

import lowtide
from lowtide.cpu import networks as made
from lowtide.ir.bodies import Region, is_region


@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize("shape", [(1, 16, 4, 4), (1, 17, 5, 7), (3, 40, 9, 3), (2, 9, 1, 8)])
def test_every_element_arrives(shape: tuple[int, int, int, int], threads: None) -> None:
    torch.manual_seed(0)
    model, x = nn.Conv2d(shape[1], shape[1], 1, groups=shape[1]).eval(), torch.randn(shape)
    step = lowtide.optimize(model, (x,), exact=False)
    (region,) = (Region.of(node) for node in step.plan.graph.nodes if is_region(node))
    assert made.built(region.body, region.fixed, region.joined)[0].source.count("turned<") == 2
    x[0, 3, 0, 2] = float("nan")
    for count in (1, 3):
        torch.set_num_threads(count)
        assert torch.allclose(step(x), model(x), atol=1e-6, equal_nan=True)
