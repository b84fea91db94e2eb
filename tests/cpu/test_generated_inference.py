"""Inference by generated kernels: right, noticed where something changes, and never in the way where it cannot be."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from lowtide.cpu import networks as made
from lowtide.ir.bodies import is_region
from lowtide.runtime.libraries import NativeError

TOLERANCE = 1e-5  # of the largest value, against double precision


class Block(nn.Module):
    """An inverted residual with a gate, as small networks have it."""

    def __init__(self, channels: int, wide: int, act: type[nn.Module]) -> None:
        super().__init__()
        self.expand = nn.Sequential(nn.Conv2d(channels, wide, 1, bias=False), nn.BatchNorm2d(wide), act())
        self.depth = nn.Sequential(nn.Conv2d(wide, wide, 3, 1, 1, groups=wide, bias=False), nn.BatchNorm2d(wide), act())
        self.gate = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Conv2d(wide, 8, 1), nn.SiLU(), nn.Conv2d(8, wide, 1), nn.Sigmoid())
        self.project = nn.Sequential(nn.Conv2d(wide, channels, 1, bias=False), nn.BatchNorm2d(channels))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.depth(self.expand(x))
        return x + self.project(y * self.gate(y))


class Net(nn.Module):
    """Odd channel counts, strides, pools, a concatenation, a shuffle, and an operator that nothing is generated for."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 20, 3, 2, 1, bias=False), nn.BatchNorm2d(20), nn.ReLU6())
        self.block = Block(20, 58, nn.Hardswish)
        self.down = nn.Conv2d(20, 36, 5, stride=2, padding=2, groups=4)
        self.pool, self.mean = nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2, 1, 0)
        self.norm, self.head = nn.LayerNorm(56), nn.Linear(56, 13)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.block(self.stem(x))
        x = torch.cat([self.pool(x), self.down(x)], 1)
        x = torch.cumsum(x, 3)  # torch's
        n, c, h, w = x.shape
        x = x.view(n, 2, c // 2, h, w).transpose(1, 2).reshape(n, c, h, w)
        x = self.mean(torch.tanh(x)).mean([2, 3])
        return self.head(nn.functional.gelu(self.norm(x)))


def settled(model: nn.Module) -> nn.Module:
    """With statistics as training leaves them."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            module.running_mean.normal_(0, 0.1)
            module.running_var.uniform_(0.5, 2.0)
            nn.init.uniform_(module.weight, 0.5, 1.5)
    return model.eval()


@pytest.fixture(scope="module")
def net() -> tuple[nn.Module, torch.Tensor, lowtide.Step]:
    torch.manual_seed(0)
    model, x = settled(Net()), torch.randn(1, 3, 29, 30)
    return model, x, lowtide.optimize(model, (x,), exact=False)


def assert_right(model: nn.Module, x: torch.Tensor, got: torch.Tensor) -> None:
    with torch.no_grad():
        want = model.double()(x.double())
        model.float()
    assert got.dtype == torch.float32
    assert got.shape == want.shape
    assert got.stride() == want.stride()
    assert (got.double() - want).abs().max() <= TOLERANCE * want.abs().max()


def test_a_network_is_right_with_torch_between_its_regions(net):
    model, x, step = net
    assert sum(map(is_region, step.plan.graph.nodes)) == 2
    assert any("cumsum" in node.op for node in step.plan.graph.nodes)
    assert_right(model, x, step(x))
    other = torch.randn_like(x)
    first, second = step(other), step(x)
    assert_right(model, other, first)
    assert_right(model, x, second)


def test_threads_change_no_bit(net):
    _, x, step = net
    one, before = step(x), torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert torch.equal(step(x), one)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("how", ["in place", "behind torch's back", "another tensor", "a state"])
def test_changed_weights_are_noticed(net, how: str):
    model, x, step = net
    step(x), step(x)
    weight = model.block.expand[0].weight
    with torch.no_grad():
        if how == "in place":
            weight.mul_(0.5)
        elif how == "behind torch's back":
            weight.data.mul_(0.5)  # each number differs: seen by the next call
        elif how == "another tensor":
            model.block.expand[0].weight = nn.Parameter(weight * 0.5)
        else:
            model.load_state_dict(
                {name: tensor * 0.9 for name, tensor in model.state_dict().items() if tensor.is_floating_point()}, strict=False
            )
    assert_right(model, x, step(x))
    assert_right(model, x, step(x))


LIES: dict[str, Callable[[], torch.Tensor]] = {
    "densely": lambda: torch.randn(64, 128),
    "in columns": lambda: torch.randn(128, 64).T,
    "in part": lambda: torch.randn(64, 257)[:, :128],
    "apart": lambda: torch.randn(64, 256)[:, ::2],
}


@pytest.mark.parametrize("lies", LIES)
@pytest.mark.parametrize("at", [(0, 0), (3, 5), (-1, -1)])
def test_one_number_that_torch_does_not_count_is_found_and_told(at: tuple[int, int], lies: str):
    model = nn.Sequential(nn.Linear(64, 128), nn.Linear(128, 64)).eval().requires_grad_(False)
    model[1].weight = nn.Parameter(LIES[lies](), requires_grad=False)
    x = torch.ones(4, 64)
    step = lowtide.optimize(model, (x,), exact=False)
    step(x), step(x)
    model[1].weight.data[at] += 1.0
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for _ in range(9):  # 16,576 numbers, 2,048 a call
            step(x)
        torch.testing.assert_close(step(x), model(x))
    assert ["used its old numbers" in str(each.message) for each in told] == [True]


def test_a_changed_module_is_noticed(net):
    model, x, step = net
    step(x), step(x)
    act = model.stem[2]
    model.stem[2] = nn.ReLU()
    try:
        assert_right(model, 4 * x, step(4 * x))
    finally:
        model.stem[2] = act


def test_what_is_not_a_number_passes_through(net):
    model, x, step = net
    for value in (float("nan"), float("inf")):
        bad = x.clone()
        bad[0, 1, 5, 5] = value
        with torch.no_grad():
            assert torch.equal(step(bad).isnan(), model(bad).isnan())


def test_a_batch_of_another_kind(net):
    _, x, step = net
    with pytest.raises(lowtide.BatchError):
        step(x.double())
    with pytest.raises(lowtide.BatchError):
        step(x, x)
    assert torch.allclose(step(x.to(memory_format=torch.channels_last)), step(x), atol=1e-4)


def test_a_plan_is_saved_and_used(net, tmp_path: Path):
    model, x, step = net
    step.plan.save(tmp_path / "plan.json")
    again = lowtide.optimize(model, (x,), exact=False, plan=tmp_path / "plan.json")
    assert torch.equal(again(x), step(x))
    with pytest.raises(lowtide.FormatError, match="rounds otherwise"):
        lowtide.optimize(model, (x,), plan=tmp_path / "plan.json")


def test_memory_is_as_promised(net):
    """What networks hold is promised, and is there from the first call on."""
    _, x, step = net
    step(x)
    assert step.measure(x).above_bytes <= step.plan.peak_bytes - step.plan.resident_bytes
    for node in filter(is_region, step.plan.graph.nodes):
        held = sum(said for name, said in node.kwargs if name in ("arena_bytes", "packed_bytes"))
        assert held <= step.plan.workspace_bytes[step.plan.graph.nodes.index(node)]


class Pools(nn.Module):
    """Windows that go beyond the padding, count it or do not, and have a stride of their own or none."""

    def __init__(self) -> None:
        super().__init__()
        self.first, mean = nn.Conv2d(3, 5, 1), nn.functional.avg_pool2d
        self.pools = (
            partial(mean, kernel_size=3, stride=2, padding=1, ceil_mode=True),
            partial(mean, kernel_size=3, stride=2, ceil_mode=True),
            partial(mean, kernel_size=3, stride=2, padding=1, ceil_mode=True, count_include_pad=False),
            partial(mean, kernel_size=3, stride=2, padding=1, ceil_mode=True, divisor_override=5),
            partial(mean, kernel_size=2),
            partial(nn.functional.max_pool2d, kernel_size=3, stride=2, dilation=2, ceil_mode=True),
        )

    def forward(self, x: torch.Tensor) -> list[torch.Tensor]:
        x = self.first(x)
        return [pool(x) for pool in self.pools]


def test_pools_of_all_kinds():
    torch.manual_seed(0)
    model, x = Pools().eval(), torch.randn(1, 3, 12, 11)
    for found, wanted in zip(lowtide.optimize(model, (x,), exact=False)(x), model(x), strict=True):
        assert torch.allclose(found, wanted, rtol=1e-5, atol=1e-6)


class Words(nn.Module):
    """Tables looked up, torch's operators between products, and a sum over one of them."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.places = nn.Embedding(50, 24), nn.Embedding(9, 24)
        self.one, self.two, self.three = nn.Linear(24, 40), nn.Linear(40, 40), nn.Linear(40, 7)
        self.norm = nn.LayerNorm(40)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = torch.relu(self.one(self.words(x) + self.places(torch.arange(9))))
        return self.three(self.norm(held + self.two(torch.softmax(torch.sort(held, 1)[0], 2).cumsum(1))))


def test_what_reads_a_region_over_torchs_operators():
    torch.manual_seed(0)
    model, x = Words().eval(), torch.randint(0, 50, (3, 9))
    step = lowtide.optimize(model, (x,), exact=False)
    assert sum(map(is_region, step.plan.graph.nodes)) == 2
    with torch.no_grad():
        want = model.double()(x)
        model.float()
    assert (step(x).double() - want).abs().max() <= TOLERANCE * want.abs().max()


def test_exact_means_eagers_bits(net):
    model, x, _ = net
    step = lowtide.optimize(model, (x,))
    assert not any(map(is_region, step.plan.graph.nodes))
    with torch.no_grad():
        assert torch.equal(step(x), model(x))


def test_without_a_compiler_torch_runs(monkeypatch: pytest.MonkeyPatch):
    def none() -> None:
        raise NativeError("no compiler is here")

    monkeypatch.setattr("lowtide.base.files._warned", set())
    monkeypatch.setattr(made, "team", none)
    model, x = nn.Linear(5, 3), torch.randn(2, 5)
    with pytest.warns(RuntimeWarning, match="torch's operators run: no compiler is here"):
        step = lowtide.optimize(model, (x,), exact=False)
    assert torch.equal(step(x), model(x).detach())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lowtide.optimize(model, (x,), exact=False)


class Cells(nn.Module):
    """torch's operators see a region's result in another way: an LSTM cell's gates, and a part of a padded row."""

    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.LSTMCell(8, 16), nn.Linear(16, 32)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = memory = x.new_zeros(x.shape[0], 16)
        for place in range(x.shape[1]):
            hidden, memory = self.cell(x[:, place], (hidden, memory))
        wide = self.head(hidden)
        return torch.cumsum(wide.as_strided((x.shape[0], 16), (32, 2), 1), 1) + wide[:, 16:]


class Packs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer, self.head = nn.LSTM(8, 16, batch_first=True), nn.Linear(16, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        packed = nn.utils.rnn.pack_padded_sequence(x, torch.tensor([5, 3, 2]), batch_first=True)
        return self.head(nn.utils.rnn.pad_packed_sequence(self.layer(packed)[0], batch_first=True)[0])


@pytest.mark.parametrize("make", [Cells, Packs])
def test_what_sees_a_regions_result_in_another_way_sees_the_regions(make: type[nn.Module]):
    torch.manual_seed(0)
    model, x = make().eval(), torch.randn(3, 5, 8)
    step = lowtide.optimize(model, (x,), exact=False)
    assert any(map(is_region, step.plan.graph.nodes))
    with torch.no_grad():
        torch.testing.assert_close(step(x), model(x))


def test_products_over_one_element():
    """Rows of one number each lie side by side, as the channels of one row would."""
    torch.manual_seed(0)
    weight, x, y = torch.randn(1, 8), torch.randn(5, 1), torch.randn(5, 8)

    class Outer(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(weight)

        def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
            return (y * (x @ self.weight)).exp()

    model = Outer().eval()
    step = lowtide.optimize(model, (x, y), exact=False)
    assert torch.allclose(step(x, y), model(x, y), atol=1e-6)
    assert any(is_region(node) for node in step.plan.graph.nodes)
