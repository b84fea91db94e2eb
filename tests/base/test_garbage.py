"""The collector looks less often for a while, and then as the caller had it."""

import gc
import threading
from collections.abc import Iterator

import pytest

from lowtide.base.process import collected_seldom, look_at_all, set_aside

pytestmark = pytest.mark.usefixtures("all_is_looked_at")


@pytest.fixture(autouse=True)
def as_before() -> Iterator[None]:
    before = gc.get_threshold()
    yield
    gc.set_threshold(*before)


@pytest.mark.parametrize("mine", [(700, 10, 10), (0, 10, 10), (10**6, 5, 5)])
def test_it_is_as_before_afterwards_whatever_happens(mine: tuple[int, int, int]) -> None:
    def fails() -> None:
        with collected_seldom(), collected_seldom():
            assert gc.get_threshold()[0] in (0, max(mine[0], 100_000))
            raise RuntimeError("mine")

    gc.set_threshold(*mine)
    with pytest.raises(RuntimeError, match="mine"):
        fails()
    assert gc.get_threshold() == mine


def test_the_last_of_several_threads_puts_it_back() -> None:
    gc.set_threshold(700, 10, 10)
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with collected_seldom():
            inside.set()
            leave.wait(10)

    thread = threading.Thread(target=other)
    with collected_seldom():
        thread.start()
        assert inside.wait(10)
    assert gc.get_threshold()[0] > 700
    leave.set()
    thread.join()
    assert gc.get_threshold() == (700, 10, 10)


def test_it_looks_less_often() -> None:
    gc.set_threshold(700, 10, 10)
    looks = []
    gc.callbacks.append(lambda phase, _: looks.append(phase))
    try:
        with collected_seldom():
            kept = [[each] for each in range(50_000)]
        seldom = len(looks)
        kept += [[each] for each in range(50_000)]
    finally:
        gc.callbacks.pop()
    assert seldom < 10 < len(looks) - seldom


def interrupted(before: int) -> None:
    with set_aside():
        held: list[list[int]] = [[]]
        with set_aside():
            assert any(each is held for each in gc.get_objects())
        assert gc.get_freeze_count() > before
        raise KeyboardInterrupt


def test_what_is_set_aside_is_back_whatever_happens_and_one_within_another_changes_nothing() -> None:
    before = gc.get_freeze_count()
    with pytest.raises(KeyboardInterrupt):
        interrupted(before)
    assert gc.get_freeze_count() <= before
    with set_aside():
        look_at_all()
        assert gc.get_freeze_count() <= before


def test_what_is_let_go_between_programs_is_found_though_all_was_set_aside() -> None:
    """The collector counts nothing of what was set aside and back: by itself it would never look at that again."""
    gc.set_threshold(700, 10, 10)
    gc.collect()

    alive = 0

    class Circle:
        def __init__(self) -> None:
            nonlocal alive
            alive += 1
            self.own = self

        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    all_objects = len(gc.get_objects())
    for _ in range(40):
        kept = [Circle() for _ in range(all_objects // 10)]
        with set_aside():
            pass
        kept.clear()
    assert alive < 3 * all_objects


def test_a_collector_that_is_switched_off_is_not_asked() -> None:
    gc.disable()
    looks = []
    gc.callbacks.append(lambda phase, _: looks.append(phase))
    try:
        for _ in range(9):
            kept = [[each] for each in range(len(gc.get_objects()) // 2)]
            with set_aside():
                pass
    finally:
        gc.callbacks.pop()
        gc.enable()
    assert kept
    assert looks == []


def test_whether_the_caller_has_frozen_objects_is_asked_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    """Python counts all of them: that took a quarter of captures' time."""
    frozen, asked = [10**6], [0]

    def count() -> int:
        asked[0] += 1
        return frozen[0]

    def is_set_aside() -> bool:
        with monkeypatch.context() as patch:
            patch.setattr(gc, "get_freeze_count", count)
            before, freezes = asked[0], [False]
            patch.setattr(gc, "freeze", lambda: freezes.__setitem__(0, True))
            with set_aside():
                pass
        return freezes[0] and asked[0] > before

    assert not any(is_set_aside() for _ in range(50))
    assert asked == [1]
    frozen[0] = 0
    assert sum(is_set_aside() for _ in range(200)) > 50, "it is noticed that he has them back"
