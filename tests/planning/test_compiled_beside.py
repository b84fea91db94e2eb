"""The second process that compiles kernels where they were never compiled."""

from __future__ import annotations

import pytest

from lowtide.planning import warm_up
from lowtide.schedule import Auto


def test_calls_that_are_refused_start_no_more_than_one(monkeypatch: pytest.MonkeyPatch) -> None:
    beside = warm_up._Beside()
    begun: list[object] = []
    monkeypatch.setattr(warm_up, "_BESIDE", beside)
    monkeypatch.setattr(warm_up, "is_at_hand", lambda _: False)
    monkeypatch.setattr(warm_up, "can_be_cached", lambda: True)
    monkeypatch.setattr(warm_up, "processors", lambda: 2)
    monkeypatch.setattr(warm_up, "_CODE", "input()")
    start = beside.start
    monkeypatch.setattr(beside, "start", lambda limited: begun.append(limited) or start(limited))
    try:
        for _ in range(3):
            warm_up.compile_ahead(Auto(), limited=True)
        assert len(begun) == 1
        assert beside.is_running
    finally:
        beside.end()
    warm_up.compile_ahead(Auto(), limited=True)
    assert len(begun) == 2
    beside.end()


@pytest.mark.parametrize("processors", [1, 2])
def test_who_waits_hears_when_kernels_are_compiled(
    processors: int, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(warm_up, "_BESIDE", warm_up._Beside())
    monkeypatch.setattr(warm_up, "is_at_hand", lambda _: False)
    monkeypatch.setattr(warm_up, "can_be_cached", lambda: True)
    monkeypatch.setattr(warm_up, "processors", lambda: processors)
    monkeypatch.setattr(warm_up, "_CODE", "input()")
    warm_up.warm_up_planning(Auto(), limited=True)
    begun, ended = (record.getMessage() for record in caplog.records)
    assert "compiles its kernels" in begun
    assert "has compiled its kernels" in ended
    caplog.clear()
    monkeypatch.setattr(warm_up, "is_at_hand", lambda _: True)
    warm_up.warm_up_planning(Auto(), limited=True)
    assert not caplog.records


@pytest.mark.parametrize(("at_hand", "running"), [(True, False), (False, False), (True, True)])
def test_kernels_are_loaded_ahead_only_where_none_has_to_be_compiled(at_hand: bool, running: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    class Beside(warm_up._Beside):
        is_running = running

    loaded: list[object] = []
    monkeypatch.setattr(warm_up, "_BESIDE", Beside())
    monkeypatch.setattr(warm_up, "is_at_hand", lambda _: at_hand)
    monkeypatch.setattr(warm_up, "warm_up_planning", lambda solver, *, limited: loaded.append((solver, limited)))
    warm_up.load_ahead(Auto(), limited=True)
    assert loaded == ([(Auto(), True)] if at_hand and not running else [])
