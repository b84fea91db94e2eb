"""The main job on a GPU: equal to eager bit for bit, and the promised peak is the allocator's."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import lowtide
from lowtide.cost.profiler import measure_memory

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine")


def _workload():
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3), nn.BatchNorm2d(32), nn.ReLU(inplace=True), nn.Dropout(0.1), nn.Flatten(), nn.Linear(32 * 900, 100)
    ).cuda()
    batch = torch.randn(8, 3, 32, 32, device="cuda"), torch.randint(0, 100, (8,), device="cuda")
    return model, batch, torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)


def _loss(model, x, y):
    return F.cross_entropy(model(x), y)


@pytest.fixture(autouse=True)
def _deterministic(monkeypatch):
    monkeypatch.setattr(torch.backends.cudnn, "deterministic", True)
    monkeypatch.setattr(torch.backends.cudnn, "benchmark", False)


@pytest.mark.computes
def test_three_steps_equal_eager():
    eager, batch, plain = _workload()
    model, _, optimizer = _workload()
    step = lowtide.optimize(model, batch, loss=_loss, optimizer=optimizer)
    for _ in range(3):
        torch.manual_seed(1)
        plain.zero_grad()
        expected = _loss(eager, *batch)
        expected.backward()
        plain.step()
        torch.manual_seed(1)
        assert torch.equal(step(*batch), expected.detach())
    for (name, want), got in zip(eager.state_dict().items(), model.state_dict().values(), strict=True):
        assert torch.equal(want, got), name


def test_promised_peak_is_the_allocators():
    model, batch, optimizer = _workload()
    step = lowtide.optimize(model, batch, loss=_loss, optimizer=optimizer)
    step(*batch)
    promised = step.plan.peak_bytes - step.plan.resident_bytes
    measured = measure_memory(lambda: step(*batch), "cuda").above_bytes
    assert abs(promised - measured) <= max(0.01 * measured, 2**20)
