"""More effort is never worse, nothing is searched twice, and a plan says when its search was stopped."""

from dataclasses import replace
from itertools import pairwise
from random import Random

import pytest

from lowtide.ir.graph import Graph, Kind, Storage
from lowtide.plan.plan import Plan
from lowtide.planning.archive import CandidateArchive
from lowtide.planning.candidate import Candidate
from lowtide.planning.planner import Planner
from lowtide.planning.request import Budget, Effort, sweeps_of
from lowtide.planning.search_cache import SearchCache
from lowtide.remat.sweep import Sweep, _SweepSearch
from tests.chains import equal_blocks, in_order
from tests.graphs import array, compute
from tests.planned import plan
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


@pytest.mark.parametrize(("blocks", "inner_bytes", "states"), [(24, 8, 100), (48, 64, 600), (96, 8, 100)])
def test_little_effort_goes_down_as_far_as_much(blocks, inner_bytes, states):
    """Though it tries few limits: the last of even steps would be an eighth of the way above what is resident."""
    problem = equal_blocks(blocks, inner_bytes)
    little, much = (Sweep(max_states=each).explore([problem], [[in_order(problem)]]).points for each in (states, 6600))
    assert little[0].peak_bytes == much[0].peak_bytes < much[-1].peak_bytes / 16


@pytest.mark.parametrize(("nodes", "rounds"), [(300, 3), (1_100, 2), (20_000, 2)])
def test_what_small_problems_leave_of_the_work_is_another_round_of_theirs(nodes, rounds, usual_search, monkeypatch):
    """A round of a large one takes somewhat more than it may, which is no reason not to begin the next."""
    begun, chain = [], equal_blocks(4, 8)

    def done(self):
        begun.append(self.round.states)
        self.runs = min(self.round.end_states * nodes, self.round.end_runs + nodes)
        return self.archive

    monkeypatch.setattr(_SweepSearch, "done", done)
    Effort.NORMAL.sweeps[-1].explore([chain], [[in_order(chain)]])
    assert begun == [600, 6000, 9000][:rounds]
    begun.clear()
    Sweep().explore([chain], [[in_order(chain)]])
    assert begun == [600, 6000, 9000, 14_400]


def test_more_effort_is_never_worse_and_repeats_nothing(monkeypatch):
    searched, explore = [], Sweep.explore
    monkeypatch.setattr(Sweep, "explore", lambda self, *args: searched.append(self) or explore(self, *args))
    quick = CandidateArchive.bare([_candidate()], REQUEST).by((FEW,))
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
    assert not CandidateArchive.bare([candidate], request).by(request.sweeps).done
    whole = plan([candidate], replace(request, sweeps=(MORE,)))
    assert whole.cost_report.stopped == ""
    assert "stopped" not in whole.to_json()


def test_what_stops_a_search_stops_it_once_for_all_programs(monkeypatch):
    searched, explore = [], Sweep.explore
    monkeypatch.setattr(Sweep, "explore", lambda self, *args: searched.append(self) or explore(self, *args))
    monkeypatch.setattr(SearchCache, "of", lambda *_: None)
    request = replace(REQUEST, budget=Budget(10**6), sweeps=(replace(MORE, max_seconds=0.0),))
    assert [plan.cost_report.stopped for plan in Planner([[_candidate()], [_candidate()]]).plans(request)] == ["max_seconds"] * 2
    assert len(searched) == 1


def test_a_search_that_was_interrupted_is_done_when_it_is_asked_for_again(monkeypatch):
    monkeypatch.setattr(SearchCache, "of", lambda *_: None)
    planner, request = Planner([[_candidate()]]), replace(REQUEST, budget=Budget(10**6))

    def stopped(sweeps):
        return planner.plans(replace(request, sweeps=sweeps))[-1].cost_report.stopped

    def interrupt(self):
        raise KeyboardInterrupt

    assert stopped((FEW,)) == ""
    with monkeypatch.context() as patch:
        patch.setattr(_SweepSearch, "over", interrupt)
        with pytest.warns(UserWarning, match="search interrupted"):
            assert stopped((FEW, MORE)) == "interrupted"
    assert stopped((FEW,)) == "", "that was searched to its end"
    assert stopped((FEW, MORE)) == ""


@pytest.mark.parametrize("seed", range(6))
def test_sums_in_another_order_do_not_make_a_program_faster(seed):
    x = array(Storage("x", 64, "cpu", Kind.INPUT))
    wide = [compute(f"w{branch}", x, nbytes=640) for branch in range(8)]
    small = [compute(f"s{branch}", each.results[0], nbytes=64) for branch, each in enumerate(wide)]
    end = compute("end", *(each.results[0] for each in small), nbytes=64)
    graph, draws = Graph((x,), (*wide, *small, end), (end.results[0],)), Random(seed)
    candidate = Candidate(graph, (0,) * 17, tuple(1 + 100 * draws.random() for _ in graph.nodes))
    planner = Planner([[candidate]])
    by_order = planner.plans(REQUEST)[-1].peak_bytes
    for budget in (Budget(latency=1.0), Budget(2 * candidate.eager(1).peak_bytes)):
        found = planner.plans(replace(REQUEST, budget=budget, sweeps=(FEW,)))[-1]
        assert found.peak_bytes == by_order
        assert found.cost_report.frontier[-1] == (by_order, found.cost_report.time_us)
