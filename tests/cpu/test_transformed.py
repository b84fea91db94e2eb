"""Convolutions on transformed tiles, parts made where they are joined, shuffled channels: right, and NaN and infinity in their place."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import lowtide
from lowtide.cpu import heads
from lowtide.cpu.networks import networks_of
from lowtide.cpu.recipes import Target
from lowtide.cpu.stages import KernelStage, Map, Winograd
from lowtide.cpu.tiles import Tile, Transform, transform_of

TOLERANCE = 2e-6  # of the largest result


class Net(nn.Module):
    """Odd sizes, with and without padding; two parts joined, channels of both in turns, and one part that is there twice."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.norm = nn.Conv2d(21, 43, 3, padding=1, bias=False), nn.BatchNorm2d(43)
        self.two, self.three = nn.Conv2d(43, 43, 3), nn.Conv2d(43, 43, 3)
        self.last = nn.Conv2d(86, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = torch.relu(self.norm(self.one(x)))
        y = torch.cat([self.two(x), torch.relu(self.three(x))], 1)
        n, c, h, w = y.shape
        y = self.last(y.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w))
        return torch.cat([y, y + 1, y], 1)


def stages(step: lowtide.Step) -> list[KernelStage]:
    return [stage for _, its in networks_of(step.plan.graph) for stage in its.stages]


@pytest.fixture(scope="module", params=[2, 4])
def made(request: pytest.FixtureRequest) -> tuple[nn.Module, torch.Tensor, lowtide.Step]:
    torch.manual_seed(0)
    model, x = Net().eval(), torch.randn(2, 21, 9, 10)
    model.norm.running_mean.normal_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(heads, "transform_of", lambda *_: Transform(request.param, 5, Tile(3, 2)))
        step = lowtide.optimize(model, (x,), exact=False)
        found = [stage for stage in stages(step) if isinstance(stage, Winograd)]
        assert [stage.weight.side for stage in found] == [request.param] * 3
        step(x)
    return model, x, step


def test_results_are_eagers_up_to_rounding(made):
    model, x, step = made
    with torch.no_grad():
        want = model.double()(x.double())
        model.float()
        assert (step(x).double() - want).abs().max() <= TOLERANCE * want.abs().max()


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -3e38])
def test_what_is_not_finite_stays_where_it_is(made, value: float):
    model, x, step = made
    bad = x.clone()
    bad[1, 3, 4, 7] = value
    with torch.no_grad():
        got, want = step(bad), model(bad)
    assert torch.equal(got.isnan(), want.isnan())
    assert torch.equal(got.isinf(), want.isinf())
    assert torch.allclose(got[0], want[0], atol=1e-5)


def test_parts_are_made_where_they_are_joined(made):
    *_, step = made
    copies = [stage for stage in stages(step) if isinstance(stage, Map) and "cat" in "".join(node.op for node in stage.nodes)]
    assert len(copies) == 3  # what is there twice, and read by others


def test_a_transform_is_chosen_where_it_is_less_work():
    wide = Target(16, 32)
    assert transform_of(1, (28, 28), 96, 96, wide).side == 4
    assert transform_of(1, (14, 14), 256, 128, wide).side == 2  # larger tiles' weights would come from afar
    assert transform_of(1, (13, 13), 48, 192, wide).side == 2  # larger tiles would save a twentieth of the time, for twice the weights
    assert transform_of(1, (1, 1), 64, 64, wide) is None
