"""Several threads run a network while that is faster than the caller alone, each on a processor of its own."""

from __future__ import annotations

import contextlib
import ctypes
import os
import threading
from collections.abc import Callable, Iterator

import pytest

from lowtide.cpu.network import Experience, Team, team

Taken = Callable[[int], float]  # seconds, by how many threads run
Clock = ctypes.CFUNCTYPE(ctypes.c_long)


class Run(ctypes.Structure):
    """As kernels.hpp has it."""

    _fields_ = (("team", ctypes.c_void_p), ("id", ctypes.c_int), ("count", ctypes.c_int), ("at", ctypes.c_void_p))


def ran(calls: int, threads: int, taken: Taken, its: Experience | None = None) -> tuple[Experience, list[int]]:
    """What a network that takes so long makes of some calls, by a clock that stands while nothing runs, and how many threads ran each."""
    its, counts, now_ns = its or Experience(), list[int](), [2**40]

    def network(run: ctypes._Pointer[Run]) -> None:
        if run.contents.id == 0:
            counts.append(run.contents.count)
            now_ns[0] += round(1e9 * taken(run.contents.count))

    clock = Clock(lambda: now_ns[0])
    function = ctypes.CFUNCTYPE(None, ctypes.POINTER(Run))(network)
    mine: Team = team()
    mine.library.lowtide_clock(clock)
    try:
        for _ in range(calls):
            mine.run(ctypes.cast(function, ctypes.c_void_p), None, threads, 200, ctypes.addressof(its))
    finally:
        mine.library.lowtide_clock(None)
    return its, counts


@pytest.fixture
def processors() -> Iterator[set[int]]:
    """Those of this thread, afterwards as before."""
    before = os.sched_getaffinity(0)
    yield before
    os.sched_setaffinity(0, before)


@pytest.fixture
def several(processors: set[int]) -> None:
    if len(processors) < 2:
        pytest.skip("one processor")


def test_threads_that_save_time_run(several: None) -> None:
    _, counts = ran(40, 2, lambda count: 0.02 / count**2)
    assert counts[0] == 2  # what the caller takes alone is seen once that costs little beside what was spent
    assert 1 <= counts.count(1) <= 3


def test_threads_that_lose_time_rest_longer_each_time(several: None) -> None:
    its, counts = ran(200, 2, lambda count: 0.0005 if count == 1 else 0.004)
    assert 1 <= counts.count(2) <= 25  # some before the caller was alone, then pauses of 10 ms, 20, 40 ..
    assert its.pause_ns >= 20_000_000


def test_threads_that_lost_come_back(several: None) -> None:
    busy = True
    its, _ = ran(30, 2, lambda count: 0.001 * (count**3 if busy else 1 / count**2))
    busy = False
    its, counts = ran(400, 2, lambda count: 0.001 * (count**3 if busy else 1 / count**2), its)
    assert counts[-100:].count(2) == 100


def test_one_slow_run_is_not_held_against_threads_that_saved_more(several: None) -> None:
    slow = iter([False] * 40 + [True] + [False] * 1000)
    _, counts = ran(60, 2, lambda count: 0.012 / count**2 + 0.006 * next(slow))
    assert counts.count(2) >= 55


def test_another_count_of_threads_is_judged_anew(several: None) -> None:
    its, _ = ran(10, 2, lambda count: 0.001)
    ran(1, 1, lambda count: 0.001, its)
    assert (its.count, its.alone, its.together) == (1, 0, 0)


def test_no_more_threads_than_processors(processors: set[int]) -> None:
    os.sched_setaffinity(0, {min(processors)})
    its, counts = ran(20, 2, lambda count: 0.0001)
    assert its.count == 1
    assert set(counts) == {1}


def _processor(thread: int) -> int:
    with open(f"/proc/self/task/{thread}/stat", encoding="ascii") as stat:
        return int(stat.read().rsplit(")", 1)[1].split()[36])


def test_threads_do_not_stay_on_one_processor(several: None, processors: set[int]) -> None:
    """All are put on one; a run later they are on two, and may still be moved by the system."""
    where = dict[int, int]()  # of each thread, while it ran last

    def network(run: ctypes._Pointer[Run]) -> None:
        where[threading.get_native_id()] = _processor(threading.get_native_id())

    function = ctypes.CFUNCTYPE(None, ctypes.POINTER(Run))(network)

    def run() -> set[int]:
        team().run(ctypes.cast(function, ctypes.c_void_p), None, 2, 200, None)
        return set(where.values())

    run()
    for allowed in ({min(processors)}, processors):
        for each in where:
            os.sched_setaffinity(each, allowed)
    assert len(where) == 2
    assert any(len(run()) == 2 for _ in range(50))
    assert all(os.sched_getaffinity(each) == processors for each in where)


def test_its_threads_are_named(several: None) -> None:
    """As top and debuggers show them."""
    ran(1, 2, lambda count: 0.0)
    names = []
    for each in os.listdir("/proc/self/task"):
        with contextlib.suppress(OSError), open(f"/proc/self/task/{each}/comm", encoding="ascii") as comm:
            names.append(comm.read().strip())
    assert "lowtide" in names
