"""A search tells how far it has come and what it has found, and finds the same whether somebody listens or not."""

from dataclasses import replace
from itertools import pairwise

import pytest

from lowtide.cost.presets import preset
from lowtide.planning.candidate import Candidate
from lowtide.planning.planner import Planner
from lowtide.planning.request import Budget, Progress
from lowtide.remat.sweep import Sweep
from tests.planning.networks import REQUEST, network

SWEEPS = (Sweep(levels=8, max_states=300), Sweep(levels=16, max_states=700))


def _plan(heard=None, **asked):
    graph = network(layers=30)
    candidate = Candidate(graph, (0,) * len(graph.nodes), tuple(1.0 + index % 5 for index in range(len(graph.nodes))))
    request = replace(REQUEST, sweeps=SWEEPS, watcher=None if heard is None else heard.append, **asked)
    return Planner([[candidate]]).plans(request)[-1]


@pytest.fixture(autouse=True)
def nothing_remembered(monkeypatch, tmp_path):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))


@pytest.fixture(params=["memory", "latency"])
def budget(request):
    return Budget(memory_bytes=_plan().peak_bytes * 3 // 4) if request.param == "memory" else Budget(latency=1.2)


@pytest.mark.parametrize("links", [None, preset("rtx3090")])
def test_what_is_heard_ends_in_the_plan_and_changes_nothing(budget, links, monkeypatch, tmp_path):
    heard = []
    plan = _plan(heard, budget=budget, links=links)
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path / "another"))
    assert _plan(budget=budget, links=links).to_json() == plan.to_json()
    assert len(heard) > 3
    assert all(0 < progress.share <= 1 for progress in heard)
    slower = plan.cost_report.time_us / plan.cost_report.order_us - 1
    if budget.memory_bytes is not None:
        assert all(progress.peak_bytes <= budget.memory_bytes for progress in heard[-3:])
        assert slower <= heard[-1].slower + 1e-9  # the last states may have found better still
    else:
        assert plan.peak_bytes <= heard[-1].peak_bytes
        assert all(progress.slower <= 0.2 + 1e-9 for progress in heard)


def test_it_only_gets_better(budget):
    heard = []
    _plan(heard, budget=budget)
    assert [progress.share for progress in heard] == sorted(progress.share for progress in heard)
    for before, after in pairwise(heard):
        if budget.memory_bytes is not None and before.peak_bytes <= budget.memory_bytes:
            assert after.slower <= before.slower
        else:
            assert after.peak_bytes <= before.peak_bytes


@pytest.mark.parametrize(
    ("progress", "text"),
    [
        (Progress(0.37, 2**20, 0.082, 2**21), "37% done, best so far 1.00 MiB and time +8.2%, limit 2.00 MiB"),
        (Progress(0.0, 2**20, 0.5, 2**19), "0% done, best so far 1.00 MiB and time +50.0%, limit 512.00 KiB not met yet"),
        (Progress(1.0, 2**20, 0.0, latency=1.1), "100% done, best so far 1.00 MiB and time +0.0%, limit time +10.0%"),
    ],
)
def test_it_is_one_line(progress, text):
    assert str(progress) == text
