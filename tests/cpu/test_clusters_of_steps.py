"""Clusters of simple operators as regions: a step that runs them, by torch's own operators, is eager's to the last bit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import lowtide
from bench.in_values import in_values
from lowtide.api import variant
from lowtide.errors import CheckError, FormatError
from lowtide.ir.bodies import is_by_inductor
from lowtide.ir.check.graph_check import check_graph
from lowtide.ir.graph import Graph
from lowtide.planning.machine import Machine
from lowtide.regions import clusters as clusters_module
from lowtide.regions import compilation as compiled
from lowtide.regions.clusters import Compiled, clusters, with_compiled
from tests import training
from tests.api.networks import cross_entropy
from tests.compiled_by_torch import runners

FUSED = {"exact": False, "kernels": "compiled", "workspaces": True}


@pytest.fixture(autouse=True)
def by_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every cluster is a region, whatever its size, and torch's operators are its body; nothing else rounds otherwise than eager."""
    monkeypatch.setattr(Machine, "rewritings", lambda *_, **__: iter(()))
    monkeypatch.setattr(clusters_module, "_LEAST_ELEMENTS", 1)
    monkeypatch.setattr(compiled, "_tried", lambda bodies, say: dict.fromkeys(bodies, 0))
    monkeypatch.setattr(variant, "compiled_runners", runners)


class Net(nn.Module):
    """Norms of both kinds, views between them, a weight that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.batch, self.layer = nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.LayerNorm(16)
        self.first, self.last = nn.Linear(16, 16), nn.Linear(64, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = functional.hardtanh(self.batch(self.conv(x))).flatten(2)
        y = functional.gelu(self.first(self.layer(x)) + x)
        y = y + functional.silu(self.first(y)) * (y > 0)
        return self.last(y.flatten(1))


def made(optimizer: Callable[..., torch.optim.Optimizer], **settings: Any) -> training.Make:
    def make():
        model = Net()
        return model, (torch.randn(4, 3, 6, 6), torch.randint(0, 3, (4,))), cross_entropy, optimizer(model.parameters(), **settings)

    return make


def clip(model: nn.Module) -> None:
    nn.utils.clip_grad_norm_(model.parameters(), 0.1)


@pytest.mark.parametrize(
    ("make", "more"),
    [
        (made(torch.optim.AdamW), {}),
        (made(torch.optim.SGD, lr=0.1, momentum=0.9, weight_decay=0.01), {"accumulate": 2}),
        (made(torch.optim.Adam, amsgrad=True), {"after_backward": clip}),
    ],
)
def test_a_step_of_regions_is_eagers(make: training.Make, more: dict[str, Any]):
    step = training.check(make, options=FUSED, **more)
    assert sum(map(is_by_inductor, step.plan.graph.nodes)) > 5
    assert "compiled by inductor: " in str(step.plan)


def test_a_step_within_a_limit_is_saved_with_its_regions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(compiled, "times_ns", lambda body: (1, 2))
    model, batch = nn.Sequential(nn.Linear(8, 32), nn.GELU(), nn.Linear(32, 3)), (torch.randn(64, 8), torch.randint(0, 3, (64,)))
    loss, optimizer = cross_entropy, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1)
    step = lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, memory="85%", **in_values(effort="quick", **FUSED))
    assert step.plan.peak_bytes <= 0.85 * step.plan.eager_peak_bytes
    regions = sum(map(is_by_inductor, step.plan.graph.nodes))
    assert regions > 0
    step.plan.save(tmp_path / "plan.json")
    again = lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, plan=tmp_path / "plan.json", **in_values(**FUSED))
    assert sum(map(is_by_inductor, again.plan.graph.nodes)) == regions
    again(*batch)
    with pytest.raises((FormatError, ValueError), match="exact=False"):
        lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, plan=tmp_path / "plan.json")


def test_what_is_too_long_is_cut(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(clusters_module, "_MOST_NODES", 3)
    step = training.check(made(torch.optim.AdamW), options=FUSED)
    sizes = [len(node.body.nodes) for node in step.plan.graph.nodes if is_by_inductor(node) and node.body is not None]
    assert max(sizes) <= 3


def test_weights_that_are_written_are_seen_in_one_way():
    """A weight's decay beside a view of the same weight is no cluster: what sees the weight in two ways stays with torch."""
    graph = _captured()
    for each in clusters(graph):
        node = Compiled.of(each).region(0)
        for before, _ in node.writes:
            assert sum(value.storage is before.storage for value in node.inputs) == 1


def test_a_region_that_says_too_little_is_refused():
    graph = _captured()
    found = [(Compiled.of(each), 0) for each in clusters(graph)]
    right = with_compiled(graph, found)
    assert right is not None
    check_graph(right)
    at = next(at for at, node in enumerate(right.nodes) if is_by_inductor(node) and node.writes)
    wrong = replace(right.nodes[at], writes=right.nodes[at].writes[1:])
    with pytest.raises(CheckError):
        check_graph(replace(right, nodes=(*right.nodes[:at], wrong, *right.nodes[at + 1 :])))


def _captured() -> Graph:
    model, batch, loss, optimizer = made(torch.optim.AdamW)()
    return lowtide.optimize(model, batch, loss=loss, optimizer=optimizer).plan.graph


@pytest.mark.parametrize(
    ("said", "message"),
    [
        ({"kernels": "compiled"}, "say exact=False too"),
        ({"kernels": "triton", "exact": False}, "expected one of 'auto', 'eager', 'compiled'"),
        ({"kernels": "compiled", "exact": False, "dynamic": "auto"}, "leave out `dynamic`"),
    ],
)
def test_what_cannot_be_meant_is_refused(said: dict[str, Any], message: str):
    model, batch, loss, optimizer = made(torch.optim.AdamW)()
    with pytest.raises(ValueError, match=message):
        lowtide.optimize(model, batch, loss=loss, optimizer=optimizer, **in_values(**said))
