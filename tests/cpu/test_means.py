"""Means over places: of pixels, of words, of pixels whose channels come last; each in one region with what is around it."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from lowtide.ir.bodies import is_region

TOLERANCE = 1e-5  # of the largest value, against double precision


class Means(nn.Module):
    """Of what a linear layer makes, and of the batch as it is, with an operator behind each."""

    def __init__(self, dims: tuple[int, ...], keepdim: bool) -> None:
        super().__init__()
        self.dims, self.keepdim = dims, keepdim
        self.first, self.last, self.beside = nn.Linear(21, 35), nn.Linear(35, 6), nn.Linear(21, 6)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        made = torch.relu(self.first(x)).mean(self.dims, keepdim=self.keepdim) + 1.0
        given = x.mean(self.dims, keepdim=self.keepdim).sigmoid()
        return self.last(made) + self.beside(given)


@pytest.mark.parametrize("keepdim", [False, True])
@pytest.mark.parametrize(
    ("shape", "dims"),
    [
        ((2, 9, 21), (1,)),
        ((1, 9, 21), (-2,)),
        ((2, 1, 21), (1,)),
        ((2, 5, 7, 21), (1, 2)),
        ((1, 5, 7, 21), (-3, -2)),
        ((2, 6, 1, 21), (2, 1)),
    ],
)
def test_means_over_places(shape: tuple[int, ...], dims: tuple[int, ...], keepdim: bool) -> None:
    torch.manual_seed(0)
    model, x = Means(dims, keepdim).eval(), torch.randn(shape)
    step = lowtide.optimize(model, (x,), exact=False)
    (region,) = filter(is_region, step.plan.graph.nodes)
    assert {node.op for node in region.body.nodes} >= {"aten.mean.dim"}
    with torch.no_grad():
        want = model.double()(x.double())
        model.float()
    found = step(x)
    assert found.shape == want.shape
    assert (found.double() - want).abs().max() <= TOLERANCE * want.abs().max()


def test_a_mean_over_channels_is_torchs() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(21, 35), nn.ReLU()).eval()
    model.register_forward_hook(lambda module, args, made: made.mean(2))
    x = torch.randn(2, 9, 21)
    step = lowtide.optimize(model, (x,), exact=False)
    assert [node.op for node in step.plan.graph.nodes if not is_region(node) and "mean" in node.op] == ["aten.mean.dim"]
    with torch.no_grad():
        assert torch.allclose(step(x), model(x), rtol=1e-5, atol=1e-6)
