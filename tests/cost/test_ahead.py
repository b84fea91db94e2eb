"""Trials that are begun ahead tell what they would have told, and end with whoever no longer wants to know."""

import subprocess
import sys

import pytest
import torch

import tests.untrusted  # noqa: F401  (defines operators)
from lowtide.cost import timings, trials
from lowtide.cost.laboratory import Call, Laboratory
from lowtide.cost.presets import preset
from lowtide.cost.timings import measure_timings
from lowtide.cost.trials import Trials
from lowtide.cost.workspaces import measure_workspaces
from lowtide.ir.graph import Kind, Node, Storage, Value

MINE = "lowtide_tests.{}.default"


@pytest.fixture(autouse=True)
def _cache(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWTIDE_CACHE", str(tmp_path))


def node(op, *shape):
    stride, count = torch.empty(shape, device="meta").stride(), torch.Size(shape).numel()
    values = [Value(name, Storage(name, 4 * count, "cpu", Kind.ACTIVATION), "float32", shape, stride) for name in "vw"]
    return Node(op, (values[0],), (values[1],))


def test_what_is_tried_ahead_is_what_would_have_been_told():
    calls = [Call(node("aten.relu.default", 8, 8)), Call(node("aten.neg.default", 5))]
    with Laboratory(remember=False) as laboratory:
        for call in calls:
            assert laboratory.begin(call)
            assert laboratory.begin(call)  # on its way
        ahead = [(laboratory.level_bytes(call), laboratory.results(call)) for call in calls]
        assert laboratory.tried == 2
        assert not any(map(laboratory.begin, calls))
    with Laboratory(remember=False) as other:
        assert ahead == [(other.level_bytes(call), other.results(call)) for call in calls]


def test_what_fails_ahead_is_told_once_and_not_begun_again():
    bad, fine = Call(node(MINE.format("crash"), 3)), Call(node("aten.neg.default", 5))
    laboratory = Laboratory(remember=False)
    assert laboratory.begin(bad)
    assert laboratory.begin(fine)
    assert laboratory.results(fine) is not None
    assert laboratory.results(bad) is None
    assert not laboratory.begin(bad)
    with pytest.warns(RuntimeWarning, match="cannot measure") as told:
        laboratory.__exit__()
    assert len(told) == 1


def test_nothing_is_begun_where_nothing_is_tried():
    with Laboratory(remember=False, tries=False) as laboratory:
        assert not laboratory.begin(Call(node("aten.neg.default", 5)))


def test_the_process_is_started_at_once_where_nothing_is_known(monkeypatch):
    begun = []
    real = Trials.begin
    monkeypatch.setattr(Trials, "begin", lambda self: begun.append(self) or real(self))
    call = Call(node("aten.neg.default", 5))
    for _ in range(2):
        with Laboratory() as laboratory:
            laboratory.expect("cuda:0")
            laboratory.expect("cpu")
            assert laboratory.results(call) is not None
    assert len(begun) == 1


def test_a_process_that_cannot_be_started_is_told_by_whoever_asks(monkeypatch):
    def refused():
        raise trials.WorkerExitedError("it cannot be started")

    trials.trial_process.end()
    monkeypatch.setattr(trials.trial_process, "_started", refused)
    laboratory = Laboratory(remember=False)
    laboratory.expect("cpu")
    assert laboratory.results(Call(node("aten.neg.default", 5))) is None
    with pytest.warns(RuntimeWarning, match="it cannot be started"):
        laboratory.__exit__()


def test_processes_that_try_operators_start_without_what_takes_long():
    """Whoever waits for the first of them waits as much less: sympy and numba take a third of a second each."""
    code = "import sys, lowtide.cost.trial; sys.exit(str(sorted({'numba', 'sympy', 'transformers'}.intersection(sys.modules))))"
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert ended.stderr.strip() == "[]"


def test_whoever_leaves_with_an_error_waits_for_no_trial(monkeypatch):
    monkeypatch.setattr(trials, "LIMIT_S", 1000)  # beyond that of a test
    measure_workspaces([node("aten.relu.default", 5)], remember=False)  # so that the process is there
    laboratory = Laboratory(remember=False)
    laboratory.begin(Call(node(MINE.format("hang"), 3)))
    laboratory.begin(Call(node("aten.neg.default", 7)))
    laboratory.__exit__(KeyError, KeyError(), None)
    assert measure_workspaces([node("aten.neg.default", 7)], remember=False).unknown == ()


def test_short_calls_are_run_together_and_long_ones_as_often_as_pays(monkeypatch):
    asked = []
    real = Trials.times

    def heard(self, recipes, device, warm_up):
        asked.append(len(recipes))
        return real(self, recipes, device, warm_up)

    monkeypatch.setattr(Trials, "times", heard)
    monkeypatch.setattr(timings, "_AGAIN", 0)  # of what takes too long for so little
    nodes = [node("aten.neg.default", size) for size in (5, 6, 7)] + [node("aten.tanh.default", 9)]
    with Laboratory(remember=False) as laboratory:
        measure_workspaces(nodes, laboratory=laboratory)
        laboratory.rough_ns[Call(nodes[3]).text] = 10**9
        times = measure_timings(nodes, lambda: preset("rtx3090"), laboratory=laboratory)
    assert asked == [3, 3]
    assert times.us[3] == 10**6
