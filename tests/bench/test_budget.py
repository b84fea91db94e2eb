"""Trainings that take turns: ratios of adjacent turns, limits that share a worker, and failures that are told."""

import dataclasses

import pytest
import torch
from torch import nn

from bench import budget
from bench.budget_plans import Once
from bench.budget_plot import plot
from bench.budget_settings import Setting, checkpoint_blocks, held_bytes
from bench.budget_turns import Group, Ratio, Turn, Worker
from bench.in_values import in_values
from bench.models import Workload
from bench.models.workload import plain_sgd
from lowtide import Sweep, optimize
from lowtide.cost.presets import preset


def _turns(*seconds: float) -> list[Turn]:
    return [Turn(wall, 2 * wall, 0) for wall in seconds]


def test_ratios_are_of_adjacent_turns():
    """A machine that slows down fourfold half-way slows both."""
    ratio = Ratio.of(_turns(1.1, 1.2, 4.4, 4.0), _turns(1.0, 1.0, 4.0, 4.0), "wall_s")
    assert ratio.median == pytest.approx(1.1)
    assert 0 < ratio.spread < 0.1
    assert Ratio.of(_turns(3, 3, 3), _turns(1, 1, 1), "cpu_s") == Ratio(3.0, 0.0)


def test_limits_that_are_as_good_as_the_same_share_a_worker():
    class Plans:
        def plans(self, limits):
            return {limit: f"{limit}.json" for limit in limits}

    class Started:
        def start(self, settings):
            return settings

    found = budget._at_limits(Started(), "lowtide", [100_000, 100_100, 50_000, 100_000], Plans())
    assert {limit: setting.limit_bytes for limit, setting in found.items()} == {100_000: 100_000, 100_100: 100_000, 50_000: 50_000}
    assert found[50_000].plan == "50000.json"


def test_a_row_compares_bytes_and_seconds():
    def worker(kind, peak_bytes, *seconds, **told):
        made = Worker.__new__(Worker)
        made.setting, made.turns, made.failed, made.told = Setting(kind), _turns(*seconds), "", {"peak_bytes": peak_bytes, **told}
        return made

    eager, peer = worker("eager", 400, 1.0, 1.0, 1.0), worker("checkpoint", 200, 2.0, 2.0, 2.0)
    ours = worker("lowtide", 199, 1.5, 1.5, 1.5, promised_bytes=199, limit_bytes=200)
    row = budget._row("block-gpt", "lowtide at checkpoint", ours, eager, peer)
    assert (row["wall_to_eager"], row["wall_to_peer"], row["no_worse"], row["kept"], row["promise_off"]) == (1.5, 0.75, "yes", "yes", 0)
    slower = worker("lowtide", 150, 2.1, 2.1, 2.1, promised_bytes=100, limit_bytes=140)
    row = budget._row("block-gpt", "lowtide at checkpoint", slower, eager, peer)
    assert (row["no_worse"], row["kept"]) == ("no", "no")
    assert set(row) <= set(budget.COLUMNS)


def test_verdicts_name_what_does_not_hold():
    rows = [
        {"model": "m", "setting": "eager"},
        {"model": "m", "setting": "lowtide at eager", "kept": "yes", "no_worse": "no"},
        {"model": "m", "setting": "lowtide", "kept": "yes", "monotone": "yes", "no_worse": None},
        {"model": "m", "setting": "lowtide arena at eager", "no_worse": "yes"},
    ]
    assert budget.verdicts(rows) == [
        "lowtide, kept: 2 of 2", "lowtide, monotone: 1 of 1", "lowtide, no_worse: 0 of 1; not m lowtide at eager",
        "lowtide arena, no_worse: 1 of 1",
    ]  # fmt: skip


def test_failures_are_told_and_leave_the_others_alone():
    with Group("block-gpt", threads=1, patience_s=120) as group:
        eager, ours = group.start([Setting("eager"), Setting("lowtide", limit_bytes=5)])
        assert (eager.failed, ours.failed) == ("", "ValueError: no plan within 5 bytes")
        group.take_turns(3, seconds=0)
        assert len(eager.turns) == 3
        assert not ours.turns
        assert 100 * 2**20 < eager.told["peak_bytes"] < 200 * 2**20
        assert budget._row("block-gpt", "lowtide", ours, eager)["failed"] == ours.failed
    assert not eager._process.is_alive()


def test_one_checkpoint_around_each_of_a_list_of_layers():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Sequential(*[nn.Sequential(nn.Linear(4, 4), nn.Tanh()) for _ in range(3)]))
    x = torch.randn(2, 4)
    expected = model(x)
    assert checkpoint_blocks(model) == 3
    assert torch.equal(model(x), expected)
    assert checkpoint_blocks(nn.Linear(2, 2)) == 0


def test_a_search_that_keeps_its_answer_gives_the_same_plans():
    model, x = nn.Sequential(*[nn.Sequential(nn.Linear(32, 32), nn.GELU()) for _ in range(4)]), torch.randn(64, 32)
    machine = dataclasses.replace(preset("rtx3090"), granule_bytes=1)
    settings = {"loss": lambda model, x: model(x).square().mean(), "optimizer": plain_sgd(model), "simulate": machine}
    kept, anew = Once(levels=6, max_states=200), Sweep(levels=6, max_states=200)
    for share in ("90%", "80%"):
        one, two = (optimize(model, (x,), memory=share, **in_values(search=search, **settings)).plan for search in (kept, anew))
        assert one.to_json() == two.to_json()
    assert len(kept.kept) == 1
    assert one.resident_bytes == held_bytes(Workload(model, (x,), settings["loss"]))


def test_the_picture_shows_every_setting(tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    monkeypatch.setattr("bench.budget_plot.RESULTS", tmp_path)
    settings = ("eager", "checkpoint, gradients kept", "aot_eager 0.5", "lowtide at eager", "lowtide arena at eager", "lowtide")
    rows = [{"model": "m", "setting": name, "peak_bytes": 2**20, "wall_ms": 1.0, "wall_to_eager": 1.5} for name in settings]
    plot([*rows, {"model": "n", "setting": "inductor 1", "failed": "took more than 3 s"}], "picture")
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")
