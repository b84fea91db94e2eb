"""What follows from a candidate is derived once, whatever is asked of it."""

import importlib
from collections import Counter
from dataclasses import replace

import pytest

from lowtide.planning.candidate import Candidate
from lowtide.planning.request import Budget
from tests.planned import plan
from tests.planning.networks import REQUEST, network

USERS = {
    "order_problem": ("lowtide.planning.candidate", "lowtide.planning.archive", "lowtide.remat.problem"),
    "schedule_all": ("lowtide.planning.candidate",),
    "profile_of": ("lowtide.planning.candidate", "lowtide.planning.planner"),
}


@pytest.fixture
def calls(monkeypatch):
    """How often each was called."""
    counted = Counter()

    def counting(name, function):
        def count(*args, **settings):
            counted[name] += 1
            return function(*args, **settings)

        return count

    for name, modules in USERS.items():
        for module in map(importlib.import_module, modules):
            monkeypatch.setattr(module, name, counting(name, getattr(module, name)))
    return counted


def test_a_plan_under_a_limit_derives_everything_once(calls):
    graphs = [network(), network()]
    candidates = [Candidate(graph, (0,) * len(graph.nodes), (1.0,) * len(graph.nodes)) for graph in graphs]
    kept = plan(candidates, REQUEST)
    assert calls == {"order_problem": 3, "schedule_all": 1, "profile_of": 2}, "each candidate, and the program as it stands"
    calls.clear()
    least_bytes = kept.resident_bytes + (kept.peak_bytes - kept.resident_bytes) * 3 // 4
    assert plan(candidates, replace(REQUEST, budget=Budget(least_bytes))).cost_report.recomputed
    assert calls == {"order_problem": 1, "profile_of": 2}, "the graph that was written; the order was known"


def test_what_was_derived_of_other_needs_is_derived_anew():
    graph = network()
    candidate = Candidate(graph, (0,) * len(graph.nodes))
    peak_bytes = candidate.eager(1).peak_bytes
    needing = replace(candidate, workspace_bytes=(1000,) * len(graph.nodes))
    assert needing.eager(1).peak_bytes == peak_bytes + 1000
    assert candidate.eager(1).peak_bytes == peak_bytes
    timed = candidate.timed([1.0] * len(graph.nodes))
    assert timed.eager(1) is candidate.eager(1)
