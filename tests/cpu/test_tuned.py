"""Kernels that the model cannot tell apart are measured, once; what was found is kept, shared, and in the saved plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from lowtide.cost.cache import Cache
from lowtide.cpu import networks as made
from lowtide.cpu import trial as tuned
from lowtide.cpu.trial import Choices
from lowtide.ir.bodies import Region, is_region

Times = Callable[[str, int, Sequence[int]], list[int]]


@pytest.fixture
def model(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[tuple[nn.Module, torch.Tensor]]:
    """A network with one window that three blocks can be made around, and nothing measured yet."""
    mine = Cache("kernel_times", (str(tmp_path),), 1, 10**12)
    monkeypatch.setattr(tuned, "_cache", lambda: mine)
    monkeypatch.setattr(tuned, "_known", {})
    monkeypatch.setattr(made, "tuned", tuned.tuned)
    monkeypatch.setattr(Choices, "is_close", lambda self, block: True)
    torch.manual_seed(0)
    middle = nn.Conv2d(24, 24, 3, padding=1, groups=24)
    yield nn.Sequential(nn.Conv2d(8, 24, 1), nn.ReLU(), middle, nn.Conv2d(24, 8, 1)).eval(), torch.randn(1, 8, 12, 12)
    if mine.path is not None:
        mine.path.unlink(missing_ok=True)


def joined(step: lowtide.Step) -> tuple[int, ...]:
    (region,) = (Region.of(node) for node in step.plan.graph.nodes if is_region(node))
    return region.joined


def never(*_: object) -> list[int]:
    raise AssertionError("it was measured before")


def test_what_was_measured_stays(model, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = model
    first = joined(lowtide.optimize(net, (x,), exact=False))
    monkeypatch.setattr(tuned, "times_ns", never)
    monkeypatch.setattr(tuned, "_known", {})  # as in another process
    step = lowtide.optimize(net, (x,), exact=False)
    assert joined(step) == first
    assert torch.allclose(step(x), net(x), atol=1e-5)


@pytest.mark.parametrize("fastest", [0, 3])
def test_the_fastest_runs_wherever_it_is_met(model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, fastest: int) -> None:
    net, x = model
    monkeypatch.setattr(tuned, "times_ns", lambda source, count, elements: [100 if at == fastest else 200 for at in range(count)])
    step = lowtide.optimize(net, (x,), exact=False)
    assert joined(step) == (fastest,)
    assert torch.allclose(step(x), net(x), atol=1e-5)
    step.plan.save(tmp_path / "plan.json")
    monkeypatch.setattr(tuned, "times_ns", never)
    wider = lowtide.optimize(nn.Sequential(nn.Conv2d(3, 8, 1), *net).eval(), (torch.randn(1, 3, 12, 12),), exact=False)
    assert joined(wider) == (fastest,)
    monkeypatch.setattr(made, "tuned", never)
    assert joined(lowtide.optimize(net, (x,), exact=False, plan=tmp_path / "plan.json")) == (fastest,)


def test_what_is_hardly_faster_is_no_reason(model, monkeypatch: pytest.MonkeyPatch) -> None:
    net, x = model
    monkeypatch.setattr(tuned, "times_ns", lambda source, count, elements: [100 + at for at in range(count)])
    modelled = joined(lowtide.optimize(net, (x,), exact=False))
    monkeypatch.setattr(tuned, "_known", {})
    monkeypatch.setattr(tuned, "times_ns", never)
    assert joined(lowtide.optimize(net, (x,), exact=False, planning=lowtide.Planning(effort="quick"))) == modelled
