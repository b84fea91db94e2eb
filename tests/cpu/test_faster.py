"""Regions are generated where they were measured to win; that is decided once, kept on disk, and in the saved plan."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

import lowtide
from lowtide.cost.cache import Cache
from lowtide.cpu import comparison as faster
from lowtide.cpu import networks as made
from lowtide.ir.bodies import is_region

Measures = Callable[..., tuple[int, int]]


@pytest.fixture
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The file of measurements of this test alone, and the choice as users have it."""
    monkeypatch.setattr(made, "is_faster", faster.is_faster)
    mine = Cache("generated_times", (str(tmp_path),), 1, faster._MOST_NS)
    monkeypatch.setattr(faster, "_cache", lambda: mine)
    assert mine.path is not None
    mine.path.parent.mkdir(parents=True, exist_ok=True)
    yield mine.path
    mine.path.unlink(missing_ok=True)


def regions(step: lowtide.Step) -> int:
    return sum(map(is_region, step.plan.graph.nodes))


def made_step(model: nn.Module, x: torch.Tensor, plan: Path | None = None) -> lowtide.Step:
    return lowtide.optimize(model, (x,), exact=False, plan=plan)


def never(*_: object) -> tuple[int, int]:
    raise AssertionError("it was measured before")


@pytest.fixture
def model() -> tuple[nn.Module, torch.Tensor]:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(7, 9), nn.ReLU(), nn.Linear(9, 4)).eval(), torch.randn(3, 7)


@pytest.mark.parametrize(("times", "wanted"), [((100, 101), 1), ((101, 100), 1), ((110, 100), 0)])
def test_the_faster_one_runs_and_is_kept(cache, model, monkeypatch: pytest.MonkeyPatch, times: tuple[int, int], wanted: int) -> None:
    monkeypatch.setattr(faster, "_times_ns", lambda *_: times)
    step = made_step(*model)
    assert regions(step) == wanted
    assert torch.allclose(step(model[1]), model[0](model[1]), atol=1e-5)
    monkeypatch.setattr(faster, "_times_ns", never)
    assert regions(made_step(*model)) == wanted


def test_a_damaged_file_is_measured_anew(cache: Path, model, monkeypatch: pytest.MonkeyPatch) -> None:
    cache.write_text('{"format": 1, "entries": {"a": "b"}}', encoding="utf-8")
    monkeypatch.setattr(faster, "_times_ns", lambda *_: (2, 1))
    with pytest.warns(RuntimeWarning, match="measurements will be taken again"):
        assert regions(made_step(*model)) == 0
    monkeypatch.setattr(faster, "_times_ns", never)
    assert regions(made_step(*model)) == 0


def test_a_saved_plan_carries_the_choice(cache: Path, model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(faster, "_times_ns", lambda *_: (1, 2))
    step = made_step(*model)
    step.plan.save(tmp_path / "plan.json")
    cache.unlink()
    monkeypatch.setattr(faster, "_times_ns", never)
    again = made_step(*model, plan=tmp_path / "plan.json")
    assert regions(again) == 1
    assert torch.equal(again(model[1]), step(model[1]))


def test_both_are_measured_and_the_callers_random_numbers_stay(cache: Path, model) -> None:
    state = torch.random.get_rng_state()
    made_step(*model)
    assert torch.equal(torch.random.get_rng_state(), state)
    known = faster._cache().load()
    assert sorted(name.split()[1] for name in known) == ["generated", "torch"]
    assert all(1 <= nanoseconds < 10**9 for nanoseconds in known.values())


@pytest.mark.parametrize(("turns", "wanted"), [([(9, 8), (5, 8)], (5, 8)), ([(9, 8), (9, 7), (9, 8)], (9, 7)), ([(8, 8)], (8, 8))])
def test_what_lost_is_measured_again_before_that_is_kept(
    monkeypatch: pytest.MonkeyPatch, turns: list[tuple[int, int]], wanted: tuple[int, int]
) -> None:
    monkeypatch.setattr(faster, "_AGAIN_S", (0.0, 0.0))
    left = iter(turns)
    monkeypatch.setattr(faster, "_in_turns", lambda *_: next(left))
    assert faster._times_ns(lambda _: None, lambda _: None, []) == wanted
    assert next(left, None) is None


def test_an_input_whose_elements_share_memory_is_measured_too(cache: Path, model) -> None:
    x = torch.randn(3, 1).expand(3, 7)
    step = made_step(model[0], x)
    assert torch.allclose(step(x), model[0](x), atol=1e-5)


def test_made_up_rows_differ_where_draws_come_again(monkeypatch: pytest.MonkeyPatch) -> None:
    body = made_step(nn.Linear(4, 4), torch.randn(64, 4)).plan.graph
    monkeypatch.setattr(faster, "_PERIOD", 13)
    x = next(each for each in faster.made_up(body) if each.shape == (64, 4))
    assert torch.equal(x.flatten()[:13], x.flatten()[13:26])
    assert len({tuple(row) for row in x.tolist()}) == 13
