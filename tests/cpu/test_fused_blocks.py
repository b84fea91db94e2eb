"""Several operators as one kernel: all shapes of blocks against float64, by one and by three threads."""

import copy

import pytest
import torch
from torch import Tensor, nn

import lowtide
from bench.ago.blocks import all_legal
from lowtide.api import maker as told
from lowtide.base.messages import time_text
from lowtide.cpu import network
from lowtide.cpu import networks as made
from lowtide.cpu.stages import RowBlock, with_blocks

BLOCKS: list[tuple[int, tuple[int, ...]]] = []  # parts of each block that was made, and the shape that its window reads


class Blocks(nn.Module):
    """Convolution and pooling, pointwise and depthwise operators with tails of channels, strides, dilation, operators read twice."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, 20, 3, stride=2, padding=1)
        self.pool = nn.MaxPool2d(3, 2, ceil_mode=True)
        self.wide = nn.Sequential(nn.Conv2d(20, 52, 1, bias=False), nn.BatchNorm2d(52), nn.ReLU6())
        self.deep = nn.Sequential(nn.Conv2d(52, 52, 5, stride=2, padding=2, groups=52, bias=False), nn.BatchNorm2d(52), nn.SiLU())
        self.flat = nn.Conv2d(52, 24, 1)
        self.spread = nn.Conv2d(24, 24, 3, padding=2, dilation=2, groups=24)
        self.last = nn.Conv2d(24, 24, 1)
        self.again = nn.Sequential(nn.Conv2d(24, 40, 1), nn.Conv2d(40, 40, 3, padding=1, groups=40), nn.Conv2d(40, 24, 1))

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.stem(x)))
        x = self.flat(self.deep(self.wide(x)))
        x = self.last(self.spread(x)) + x
        return torch.sigmoid(self.again(x)) * x


@pytest.fixture
def everywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """All blocks that are legal are made."""

    def joined(stages, numbers):
        found = with_blocks(stages, numbers)
        BLOCKS[:] = [(len(each.parts), each.windows.a.shape) for each in found if isinstance(each, RowBlock)]
        return found

    monkeypatch.setattr(network, "with_blocks", joined)
    monkeypatch.setattr(made, "tuned", all_legal)
    made._built.cache_clear()


@pytest.mark.usefixtures("everywhere")
@pytest.mark.filterwarnings("error")
def test_blocks_compute_what_their_operators_do():
    torch.manual_seed(0)
    model = Blocks().eval().requires_grad_(False)
    for norm in (model.wide[1], model.deep[1]):
        norm.running_mean.normal_()
        norm.running_var.uniform_(0.5, 2.0)
    x = torch.randn(1, 3, 61, 45)
    expected = copy.deepcopy(model).double()(x.double())
    fn = lowtide.optimize(model, (x,), exact=False)
    assert [parts for parts, _ in BLOCKS] == [3, 2, 2, 3]
    threads = torch.get_num_threads()
    try:
        for count in (1, 3, 2):
            torch.set_num_threads(count)
            with torch.no_grad():
                found = fn(x)
            assert (found - expected).abs().max() < 1e-5 * expected.abs().max()
        bad = x.clone()
        bad[0, 1, 30, 20] = float("nan")
        with torch.no_grad():
            assert torch.equal(fn(bad).isnan(), model(bad).isnan())
    finally:
        torch.set_num_threads(threads)
        made._built.cache_clear()


def test_a_plan_tells_which_operators_share_a_kernel_and_what_that_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(told, "measured_ns", lambda body, source: (2_000, 5_000))
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(8, 16, 1), nn.ReLU(), nn.Conv2d(16, 16, 3, padding=1, groups=16), nn.Conv2d(16, 4, 1)).eval()
    plan = lowtide.optimize(model, (torch.randn(1, 8, 40, 40),), exact=False).plan
    regions = [node for node in plan.graph.nodes if node.op == "fuse.region"]
    assert len(regions) == len(plan.generated) == 1
    region, said = plan.generated[0], dict(regions[0].kwargs)
    assert sorted(op for kernel in region.kernels for op in kernel.operators) == ["convolution"] * 3 + ["relu"]
    assert (region.arena_bytes, region.packed_bytes) == (said["arena_bytes"], said["packed_bytes"])
    assert (region.us, region.torch_us) == (2.0, 5.0)
    assert f"4 operators as {len(region.kernels)} kernels" in str(plan)
    assert f"{time_text(2.0)}, by torch {time_text(5.0)}" in str(plan)
    assert lowtide.Plan.from_json(plan.to_json()).generated == ()
