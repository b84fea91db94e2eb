"""Trials for a GPU are in a process of their own where there is room for one; what spoils it is no one else's."""

import pytest

from lowtide.cost import trial, trial_process
from lowtide.cost.laboratory import Call, Laboratory
from lowtide.cost.trials import Trials
from lowtide.ir.graph import Kind, Node, Storage, Value

GPU = "cuda:0"
LEVEL = {"level_bytes": 7, "results": [], "ns": 5}


def value(name):
    return Value(name, Storage(name, 64, GPU, Kind.ACTIVATION), "float32", (4, 4), (4, 1))


CALL = Call(Node("aten.sin.default", (value("x"),), (value("y"),)))
RECIPE = {"values": [], "steps": [{"op": "aten.sin.default", "args": [], "kwargs": {}}]}


@pytest.fixture
def here(monkeypatch):
    """A machine that seems to have a GPU with room, which no other process can use: this torch's has none. What was tried in this one."""
    tried = []

    def take_level(recipe, device, gradients):
        tried.append(device)
        return dict(LEVEL)

    monkeypatch.delenv("LOWTIDE_TRIALS", raising=False)
    monkeypatch.setattr(trial, "circumstances", lambda device, gradients=True: ("a test", device))
    monkeypatch.setattr(trial, "free_bytes", lambda device: 2**40)
    monkeypatch.setattr(trial, "take_level", take_level)
    return tried


def test_where_no_other_process_can_use_the_gpu_this_one_does(here):
    trials = Trials(gradients=True)
    assert not trials.is_inside(GPU)
    for _ in range(2):
        assert "inside" in trials.level(RECIPE, GPU, ahead=True)
    assert here == []  # not beside whatever this process does meanwhile
    assert trials.level(RECIPE, GPU) == LEVEL
    assert trials.is_inside(GPU)
    assert not trials.is_inside("cpu")
    trials.close()


def test_what_was_begun_ahead_is_tried_here_when_it_is_wanted(here):
    with Laboratory(remember=False) as laboratory:
        assert laboratory.begin(CALL)
        assert laboratory.level_bytes(CALL) == 7
        assert here == [GPU]
        assert not laboratory.begin(Call(Node("aten.cos.default", (value("x"),), (value("z"),))))


@pytest.mark.parametrize(
    ("free_bytes", "wanted", "inside"), [(2**30, "", True), (2**40, "", False), (2**30, "apart", False), (2**40, "inside", True)]
)
def test_little_room_or_the_user_decides(here, monkeypatch, free_bytes, wanted, inside):
    monkeypatch.setattr(trial, "free_bytes", lambda device: free_bytes)
    monkeypatch.setenv("LOWTIDE_TRIALS", wanted)
    assert Trials(gradients=True).is_inside(GPU) == inside


def test_a_choice_that_there_is_not_is_told(monkeypatch):
    monkeypatch.setenv("LOWTIDE_TRIALS", "both")
    with pytest.raises(ValueError, match="LOWTIDE_TRIALS: expected apart or inside, got 'both'"):
        Trials(gradients=True).is_inside(GPU)


def test_a_gpu_that_is_spoilt_for_a_process_ends_it(here):
    class Spoilt:
        ended = False

        def ask(self, request, limit_s):
            return {"failure": "an illegal memory access was encountered", "spoilt": True}

        def end(self):
            self.ended = True

    trials, process = Trials(gradients=True), Spoilt()
    trials._apart = process
    assert trials.level(RECIPE, GPU) == {"failure": "an illegal memory access was encountered"}
    assert process.ended
    assert trials._apart is None
    assert not trials.is_inside(GPU)
    assert here == []


def test_the_process_notices_that_it_is_spoilt(monkeypatch):
    def finish(device):
        if moments.append(device) is None and len(moments) > 1:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    moments = []
    monkeypatch.setattr(trial, "finish", finish)
    reply = trial_process._on_gpu(trial.answer, lambda: dict(LEVEL), GPU)
    assert reply["spoilt"]
    assert "illegal memory access" in reply["failure"]
