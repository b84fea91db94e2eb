"""More effort is never worse, nothing is searched twice, and a plan says when its search was stopped."""

from dataclasses import replace
from itertools import pairwise

import pytest

from lowtide.plan.plan import Plan
from lowtide.planning.candidate import Candidate
from lowtide.planning.effort import Effort, sweeps_of
from lowtide.planning.planner import Planner, plan
from lowtide.planning.request import Budget
from lowtide.planning.searched import Searched
from lowtide.remat.sweep.search import Sweep
from tests.planning.networks import REQUEST, network

FEW, MORE = Sweep(levels=8, max_states=40), Sweep(levels=8, max_states=200)


def _candidate() -> Candidate:
    graph = network(layers=12)
    return Candidate(graph, (0,) * len(graph.nodes), tuple(1.0 + index % 5 for index in range(len(graph.nodes))))


def test_each_level_holds_the_one_before():
    levels = [level.sweeps for level in Effort]
    assert [len(sweeps) for sweeps in levels] == [1, 2, 3]
    assert all(more[: len(less)] == less for less, more in pairwise(levels))
    assert sweeps_of(None, None) == Effort.NORMAL.sweeps
    assert sweeps_of("thorough", None)[-1] == Sweep()
    assert sweeps_of(None, FEW) == (FEW,)
    with pytest.raises(ValueError, match="expected one of 'quick', 'normal', 'thorough', got 'much'"):
        sweeps_of("much", None)
    with pytest.raises(TypeError, match="expected one of them, got both"):
        sweeps_of("quick", FEW)


def test_more_effort_is_never_worse_and_repeats_nothing(monkeypatch):
    searched, explore = [], Sweep.explore
    monkeypatch.setattr(Sweep, "explore", lambda self, *args: searched.append(self) or explore(self, *args))
    quick = Searched.bare([_candidate()], REQUEST).by((FEW,))
    thorough = quick.by((FEW, MORE))
    assert searched == [FEW, MORE]
    assert thorough.archive.states > quick.archive.states
    for point in quick.archive.points:
        assert thorough.archive.within(point.peak_bytes).time_us <= point.time_us


def test_what_was_searched_with_more_effort_serves_every_later_question():
    candidate = _candidate()
    planner = Planner([[candidate]])
    top = planner.plans(REQUEST)[0]
    limits = range(top.peak_bytes, top.resident_bytes + (top.peak_bytes - top.resident_bytes) // 2, -64)

    def times(sweeps):
        return [planner.plans(replace(REQUEST, budget=Budget(limit), sweeps=sweeps))[0].cost_report.time_us for limit in limits]

    quick, thorough, again = times((FEW,)), times((FEW, MORE)), times((FEW,))
    assert quick == sorted(quick)
    assert all(more <= less for less, more in zip(quick, thorough, strict=True))
    assert again == thorough


def test_a_search_that_was_stopped_says_so_and_is_done_again():
    candidate = _candidate()
    top = plan([candidate], REQUEST)
    request = replace(REQUEST, budget=Budget(top.peak_bytes), sweeps=(replace(MORE, max_seconds=0.0),))
    found = plan([candidate], request)
    assert found.cost_report.stopped == "max_seconds"
    assert "the search was ended early (max_seconds)" in str(found)
    assert Plan.from_json(found.to_json()).cost_report.stopped == "max_seconds"
    assert not Searched.bare([candidate], request).by(request.sweeps).done
    whole = plan([candidate], replace(request, sweeps=(MORE,)))
    assert whole.cost_report.stopped == ""
    assert "stopped" not in whole.to_json()
