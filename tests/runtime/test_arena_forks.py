"""The planned allocator among threads and forked processes."""

from __future__ import annotations

import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable

import pytest
import torch

from lowtide.runtime.arena.allocator import Allocator, ArenaMemory, BusyError, Script
from tests.arenas import Schedule, Tensors, empty, planned, recorded, script_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the planned allocator is for Linux")


def test_threads_that_let_go_and_ask_while_a_step_runs_disturb_nobody(allocator: Allocator):
    """A step fills and checks its tensors, another thread lets half of them go and asks for its own."""
    schedule: Schedule = [("make", 64 * (1 + number % 7)) for number in range(200)]
    tensors = Tensors()
    _, found = allocator.record(lambda: (tensors.run(schedule), tensors.clear()))
    script, region = planned(allocator, found)
    for _ in range(20):
        mine, others = Tensors(), Tensors()

        def meanwhile(mine: Tensors = mine, others: Tensors = others) -> None:
            for _ in range(100):
                others.run([("make", 128)])
                mine.run([("drop", 0)])

        def call(mine: Tensors = mine, meanwhile: Callable[[], None] = meanwhile) -> None:
            mine.run(schedule[:100])
            thread = threading.Thread(target=meanwhile)
            thread.start()
            for each in schedule[100:]:
                mine.run([each])
            thread.join()
            mine.clear()

        _, counts = allocator.serve(region, script, call)
        others.clear()
        assert (counts.requests, counts.elsewhere, counts.elsewhere_bytes) == (200, 100, 12800)
        assert counts.served + counts.occupied == 200
        assert region.live == 0


def test_another_thread_has_its_own_steps(allocator: Allocator):
    script, region = script_of(allocator, (100, 0))
    other_script, other_region = script_of(allocator, (100, 0))
    found = []

    def step() -> None:
        allocator.serve(other_region, other_script, lambda: found.append(empty(100).data_ptr() - other_region.base))

    def call() -> None:
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
        found.append(empty(100).data_ptr() - region.base)

    _, counts = allocator.serve(region, script, call)
    assert found == [0, 0]
    assert counts.elsewhere == 0


def test_a_forked_process_is_not_served_and_does_not_hang(allocator: Allocator):
    script, region = script_of(allocator, (100, 0), (100, 128))

    def call() -> torch.Tensor:
        kept = empty(100).fill_(5)
        child = fork()
        if not child:  # anything that goes wrong here has to show as an exit status
            try:
                served = region.holds(empty(100).data_ptr())
                right = bool((kept.numpy() == 5).all())
                del kept
                with pytest.raises(BusyError, match="in a forked process"):
                    allocator.record(lambda: 1 // 0)
                os._exit(0 if right and not served else 1)
            finally:
                os._exit(2)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert region.holds(empty(100).data_ptr())
        return kept

    kept, _ = allocator.serve(region, script, call)
    assert (kept == 5).all()


@pytest.mark.parametrize("kind", ["recorded", "served"])
def test_a_child_that_is_forked_in_a_step_goes_on_without_an_arena(allocator: Allocator, kind: str):
    script, region = script_of(allocator, (100, 0), (100, 128))
    if child := _in_a_step(allocator, script, region, kind):
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        return
    try:
        with pytest.raises(BusyError, match="in a forked process"):
            allocator.serve(region, script, lambda: 1 // 0)
        outside = allocator.aside(lambda: empty(100).data_ptr())
        os._exit(int(region.holds(outside)))
    finally:
        os._exit(1)


def _in_a_step(allocator: Allocator, script: Script, region: ArenaMemory, kind: str) -> int:
    """Forks within a step, which ends in both processes: the child's number, or 0 in the child."""
    return (allocator.record(fork) if kind == "recorded" else allocator.serve(region, script, fork))[0]


def fork() -> int:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on, as torch has threads
        return os.fork()


def test_forks_while_other_threads_hold_the_allocators_locks(allocator: Allocator):
    """A child that waited for a lock which its parent's thread had closed would be ended by its alarm."""
    schedule: Schedule = [("make", 100), ("make", 300), ("drop", 0), ("make", 100), ("drop", 0), ("drop", 0)] * 50
    script, region = planned(allocator, recorded(allocator, schedule, Tensors()))
    done = threading.Event()

    def steps() -> None:
        while not done.is_set():
            allocator.serve(region, script, lambda: Tensors().run(schedule))

    def call() -> None:
        kept = empty(100)
        child = fork()
        if not child:
            signal.alarm(20)
            del kept
            empty(100)
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    thread = threading.Thread(target=steps)
    thread.start()
    try:
        for _ in range(20):
            allocator.serve(region, script, call)
    finally:
        done.set()
        thread.join()
