"""What was searched is kept on disk: another process answers without a search, and no file can make a plan wrong."""

import json
import os
from dataclasses import replace

import pytest

from lowtide.errors import BudgetError
from lowtide.planning import candidate as candidates
from lowtide.planning import search_cache as remembered
from lowtide.planning.candidate import Candidate
from lowtide.planning.planner import Planner
from lowtide.planning.request import Budget
from lowtide.remat.sweep import Sweep
from lowtide.schedule import AUTO, Auto, Exact, ProgramOrder
from tests.planning.networks import REQUEST, network

FEW, MORE = Sweep(levels=8, max_states=60), Sweep(levels=8, max_states=300)


@pytest.fixture
def folder(tmp_path, monkeypatch):
    """Where searches are kept."""
    monkeypatch.setattr(remembered, "directory", lambda: tmp_path)
    return tmp_path / "searched"


@pytest.fixture
def work(monkeypatch):
    """The searches and orders that were not known."""
    done, explore, schedule = [], Sweep.explore, candidates.schedule_all
    monkeypatch.setattr(Sweep, "explore", lambda self, *args: done.append(self) or explore(self, *args))
    monkeypatch.setattr(candidates, "schedule_all", lambda *args: done.append("order") or schedule(*args))
    return done


def _planned(share, sweeps=(FEW,), layers=8, us=1.0, solver=AUTO):
    """A plan in a planner of its own, as another process would make it."""
    graph = network(layers)
    made = Candidate(graph, (0,) * len(graph.nodes), (us,) * len(graph.nodes))
    top_bytes = made.eager(1).peak_bytes
    return Planner([[made]]).plans(replace(REQUEST, budget=Budget(int(share * top_bytes)), sweeps=sweeps, solver=solver))[-1]


def test_another_process_answers_every_limit_without_a_search(folder, work):
    first = _planned(0.8)
    assert work == ["order", FEW]
    work.clear()
    assert _planned(0.8).to_json() == first.to_json()
    assert _planned(0.7).cost_report.time_us >= first.cost_report.time_us
    assert not work
    assert len(list(folder.glob("*.json"))) == 1


def test_another_program_is_searched_anew(folder, work):
    _planned(0.8), _planned(0.8, layers=9), _planned(0.8, us=2.0)
    assert work == ["order", FEW] * 3


def test_more_effort_is_added_to_what_is_kept_and_never_lost(folder, work):
    quick = _planned(0.7)
    work.clear()
    thorough = _planned(0.7, (FEW, MORE))
    assert work == [MORE]
    assert thorough.cost_report.time_us <= quick.cost_report.time_us
    assert _planned(0.7).to_json() == thorough.to_json()
    assert work == [MORE]


def test_a_search_that_was_stopped_is_not_kept(folder):
    cut = (replace(FEW, max_seconds=0.0),)
    assert _planned(1.0, cut).cost_report.stopped
    with pytest.raises(BudgetError, match=r"the search was ended early \(max_seconds\)"):
        _planned(0.8, cut)
    assert not folder.exists()


def _edited(text, **changes):
    data = json.loads(text) | changes
    data.pop("checksum")
    return json.dumps(data | {"checksum": remembered.checksum(data)})


@pytest.mark.parametrize(
    "damage",
    [
        lambda text: "",
        lambda text: text[: len(text) // 2],
        lambda text: text.replace('"states": ', '"states": 1'),
        lambda text: _edited(text, key="0" * 64),
        lambda text: _edited(text, points=[[7, length] for _, length in json.loads(text)["points"]]),
        lambda text: _edited(text, points=[[0, 2**40]]),
        lambda text: _edited(text, points=[7]),
        lambda text: _edited(text, points=[[None, 1]]),
        lambda text: _edited(text, points=[[float("inf"), 1]]),
        lambda text: _edited(text, orders=[[{**json.loads(text)["orders"][0][0], "order": [10**30] * 16}]]),
        lambda text: _edited(text, points=[[0, 1]]),
        lambda text: _edited(text, sequences="AAAA"),
        lambda text: _edited(text, sequences=json.loads(text)["sequences"][:40]),
        lambda text: _edited(text, done=[["all", 1, 1]]),
        lambda text: _edited(text, orders=[[{"order": [0], "lower_bound_bytes": 1, "solver": "x"}]]),
        lambda text: _edited(text, orders=[[{**json.loads(text)["orders"][0][0], "lower_bound_bytes": 10**9}]]),
        lambda text: _edited(text, orders=[]),
        lambda text: "[" * 10**5,
    ],
)
def test_a_file_that_does_not_read_is_as_good_as_none(folder, work, damage):
    first = _planned(0.8)
    (path,) = folder.glob("*.json")
    path.write_text(damage(path.read_text()))
    work.clear()
    assert _planned(0.8).to_json() == first.to_json()
    assert work[-1] == FEW
    work.clear()
    assert _planned(0.8).to_json() == first.to_json()
    assert not work, "the file was made anew"


def test_what_was_used_longest_ago_goes(folder, work, monkeypatch):
    _planned(0.8)
    (old,) = folder.glob("*.json")
    monkeypatch.setattr(remembered, "_MOST_ALL_BYTES", old.stat().st_size * 5 // 2)
    _planned(0.8, us=2.0)
    for path in folder.glob("*.json"):
        os.utime(path, ns=(0, 1 if path == old else 0))
    _planned(0.8)  # used again
    _planned(0.8, us=3.0)
    assert old.exists()
    assert len(list(folder.glob("*.json"))) == 2


def test_a_search_of_the_callers_own_kind_is_asked_each_time(folder):
    class Own(Sweep):
        pass

    _planned(0.8, (Own(levels=8, max_states=60),))
    assert not folder.exists()


def test_a_folder_that_cannot_be_made_is_one_warning(tmp_path, monkeypatch):
    monkeypatch.setattr(remembered, "directory", lambda: tmp_path / "file")
    monkeypatch.setattr("lowtide.base.files._warned", set())
    (tmp_path / "file").write_text("")
    with pytest.warns(RuntimeWarning, match="cannot keep what it measures"):
        assert _planned(0.8).cost_report


def test_a_solver_of_the_callers_own_kind_or_with_a_clock_is_asked_each_time(folder, work):
    class Own(ProgramOrder):
        pass

    for solver in (Own(), Exact(first=ProgramOrder()), Auto(max_seconds=1.0)):
        _planned(0.8, solver=solver), _planned(0.8, solver=solver)
    assert work == ["order", FEW] * 6
    assert not folder.exists()
