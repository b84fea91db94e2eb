"""The planned allocator, driven directly: what it records, what it serves, and that no two tensors ever share a byte."""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
import warnings
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.cost.profiler import peak_bytes
from lowtide.runtime.arena import native
from lowtide.runtime.arena.allocator import OUTLIVES, Allocator, BusyError, Recorded, Region, Script
from lowtide.runtime.arena.arena import Arena
from tests.arenas import FirstFit, Schedule, Tensors, deviations, mapped, planned, recorded, schedules

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the planned allocator is for Linux")


@pytest.fixture(scope="session")
def allocator(tmp_path_factory: pytest.TempPathFactory) -> Allocator:
    try:
        return Allocator(native.load(tmp_path_factory.mktemp("native")))
    except native.NativeError as why:
        pytest.skip(str(why))


def empty(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def script_of(allocator: Allocator, *requests: tuple[int, int]) -> tuple[Script, Region]:
    """(bytes, offset) of each request."""
    sizes, offsets = (np.array(each, np.int64) for each in zip(*requests, strict=True))
    script = Script(allocator, sizes, offsets)
    return script, Region(allocator, script.arena_bytes)


def test_requests_and_releases_are_recorded_in_their_order(allocator: Allocator):
    def call() -> torch.Tensor:
        first = empty(100)
        second = empty(300)
        del first
        third = empty(50)
        empty(0)
        del second
        return third

    third, found = allocator.record(call)
    del third
    assert [each.tolist() for each in vars(found).values()] == [[100, 300, 50], [0, 1, 3], [2, 4, -1]]


def test_the_same_requests_lie_at_their_offsets(allocator: Allocator):
    script, region = script_of(allocator, (100, 0), (300, 128), (50, OUTLIVES), (80, 0))

    def call() -> list[int]:
        first, second, third = empty(100), empty(300), empty(50)
        where = [each.data_ptr() - region.base for each in (first, second)]
        del first
        where.append(empty(80).data_ptr() - region.base)
        assert not region.holds(third.data_ptr())
        return where

    where, counts = allocator.serve(region, script, call)
    assert where == [0, 128, 0]
    assert (counts.asked, counts.asked_bytes, counts.served, counts.served_bytes, counts.outliving) == (4, 530, 3, 480, 1)
    assert not counts.deviates
    assert region.live == 0


def test_every_block_is_aligned(allocator: Allocator):
    with pytest.raises(ValueError, match="a multiple of 64"):
        Script(allocator, np.array([10]), np.array([32]))
    for nbytes in (1, 2**20, 5 * 2**20):
        assert Region(allocator, nbytes).base % 64 == 0


@settings(max_examples=300)
@given(data=st.data())
def test_no_two_tensors_share_a_byte_whatever_is_asked_for(data: st.DataObject, allocator: Allocator):
    """The schedule is recorded, then run with deviations; some tensors live on from run to run."""
    schedule = data.draw(schedules)
    script, region = planned(allocator, recorded(allocator, schedule, Tensors()))
    tensors = Tensors()
    for _ in range(3):
        deviating = data.draw(deviations(schedule))
        _, counts = allocator.serve(region, script, lambda deviating=deviating: (tensors.run(deviating), tensors.check()))
        assert counts.asked == counts.served + counts.outliving + counts.unexpected + counts.occupied
        tensors.alive = tensors.alive[: data.draw(st.integers(0, 3))]
    assert region.live <= len(tensors.alive)
    tensors.clear()
    assert region.live == 0


@settings(max_examples=100)
@given(schedule=schedules)
def test_the_recorded_schedule_is_served_whole(allocator: Allocator, schedule: Schedule):
    script, region = planned(allocator, found := recorded(allocator, schedule, Tensors()))
    for _ in range(2):
        tensors = Tensors()
        _, counts = allocator.serve(region, script, lambda tensors=tensors: tensors.run(schedule))
        tensors.clear()
        assert not counts.deviates
        assert (counts.served, counts.outliving) == (int((found.died >= 0).sum()), int((found.died < 0).sum()))


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
        assert (counts.asked, counts.elsewhere, counts.elsewhere_bytes) == (200, 100, 12800)
        assert counts.served + counts.occupied == 200
        assert region.live == 0


def test_a_request_that_is_left_out_replaced_or_new_costs_no_other_its_place(allocator: Allocator):
    requests = [(100 + number, 128 * number) for number in range(20)]
    script, region = script_of(allocator, *requests)
    sizes = [size for size, _ in requests]
    cases = {
        "left out": (sizes[:5] + sizes[9:], 16, 0),
        "replaced": ([*sizes[:5], 7, *sizes[6:]], 19, 1),
        "new": ([*sizes[:5], 7, *sizes[5:]], 20, 1),
    }
    for what, (asked, served, unexpected) in cases.items():
        _, counts = allocator.serve(region, script, lambda asked=asked: len([empty(size) for size in asked]))
        assert counts.deviates, what
        assert served - 2 <= counts.served <= served, what
        assert unexpected <= counts.unexpected <= unexpected + 2, what


def test_what_is_still_alive_is_not_overwritten_and_the_rest_is_served(allocator: Allocator):
    script, region = script_of(allocator, (100, 0), (100, 128), (200, 0))
    kept, _ = allocator.serve(region, script, lambda: (empty(100).fill_(7), empty(100))[0])
    (first, second), counts = allocator.serve(region, script, lambda: (empty(100).fill_(1), empty(100).fill_(2)))
    assert (kept == 7).all()
    assert (counts.occupied, counts.served, region.live) == (1, 1, 2)
    assert not region.holds(first.data_ptr())
    assert region.holds(second.data_ptr())


def test_an_arena_goes_with_its_last_tensor(allocator: Allocator):
    script, region = script_of(allocator, (10 * 2**20, 0))
    tensor, _ = allocator.serve(region, script, lambda: empty(10 * 2**20).fill_(9))
    base = region.base
    del region
    gc.collect()
    assert (tensor == 9).all()
    assert mapped(base)
    del tensor
    assert not mapped(base)


def test_an_error_ends_the_block(allocator: Allocator):
    script, region = script_of(allocator, (100, 0), (100, 128))
    with pytest.raises(ZeroDivisionError):
        allocator.serve(region, script, lambda: empty(100)[1 // 0])
    assert not region.holds(empty(100).data_ptr())
    with pytest.raises(KeyError):
        allocator.record(lambda: {}[0])
    assert allocator.record(lambda: 5)[0] == 5


def test_a_block_within_a_block_is_refused_and_can_be_taken_aside(allocator: Allocator):
    script, region = script_of(allocator, (100, 0), (100, 128))

    def aside() -> Recorded | None:
        assert not region.holds(empty(100).data_ptr())
        return allocator.record(lambda: empty(60) is None)[1]

    def call() -> Recorded | None:
        with pytest.raises(BusyError, match="within another step"):
            allocator.record(lambda: 1 // 0)
        found = allocator.aside(aside)
        assert empty(100).data_ptr() == region.base
        return found

    found, counts = allocator.serve(region, script, call)
    assert (counts.asked, counts.elsewhere) == (1, 1)  # what is recorded belongs to somebody
    assert found.size_bytes.tolist() == [60]


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


def _in_a_step(allocator: Allocator, script: Script, region: Region, kind: str) -> int:
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


def test_the_profiler_sees_the_arenas_tensors(allocator: Allocator):
    def call() -> None:
        first, second = empty(1000), empty(5000)
        del first
        third = empty(3000)
        del second, third

    plain = peak_bytes(call)
    _, found = allocator.record(call)
    script, region = planned(allocator, found)
    served = []

    def in_the_arena() -> None:
        served.append(allocator.serve(region, script, call)[1].served)

    assert peak_bytes(in_the_arena, warmup=1) == plain
    assert served == [3, 3]


class TestArena:
    def test_the_first_run_is_recorded_and_later_ones_are_served(self, allocator: Allocator):
        arena = Arena(allocator, FirstFit.of)
        for _ in range(4):
            (result,) = arena.run("program", lambda: [empty(100).fill_(1) + empty(100).fill_(2)])
            assert (result == 3).all()
        assert (arena.recorded_runs, arena.served_runs, arena.nbytes, arena.lower_bound_bytes) == (1, 3, 256, 256)
        assert (arena.counts.asked, arena.counts.served, arena.counts.outliving, arena.held) == (3, 2, 1, 0)

    def test_programs_share_the_arena_which_grows(self, allocator: Allocator):
        arena = Arena(allocator, FirstFit.of)
        found = []
        for size in (100, 10_000) * 3:
            arena.run(size, lambda size=size: [empty(size) is None])
            found.append((arena.nbytes, arena.planned_bytes))
        assert found == [(0, 0), (0, 0), (128, 128), (10_048, 10_048), (10_048, 128), (10_048, 10_048)]

    def test_results_never_lie_in_the_arena(self, allocator: Allocator):
        """A program that hands out at its second run what it let go at its first; both results share their memory."""
        arena = Arena(allocator, FirstFit.of)
        runs = []

        def call():
            runs.append(None)
            made = empty(128).fill_(len(runs)).view(torch.complex64)
            return [made.conj(), made[4:], 3] if len(runs) > 1 else [None]

        arena.run("program", call)
        for number in (2, 3):
            whole, part, three = arena.run("program", call)
            assert not arena.held
            assert three == 3
            assert whole.is_conj()
            assert whole.untyped_storage().data_ptr() == part.untyped_storage().data_ptr()
            assert (part.clone().view(torch.uint8) == number).all()
            assert torch.equal(whole[4:], part.conj())

    def test_what_deviates_is_recorded_again_after_ever_longer(self, allocator: Allocator):
        arena = Arena(allocator, FirstFit.of)
        recorded_at = []
        for turn in range(1, 16):
            before = arena.recorded_runs
            arena.run("program", lambda turn=turn: [empty(1000 * turn) is None])
            if arena.recorded_runs > before:
                recorded_at.append(turn)
        assert recorded_at == [1, 3, 6, 11]

    def test_what_changes_once_is_served_again(self, allocator: Allocator):
        arena = Arena(allocator, FirstFit.of)
        shares = []
        for size in (100, 100, 5000, 5000, 5000, 5000):
            arena.run("program", lambda size=size: [empty(size) is None])
            shares.append(arena.counts.served)
        assert shares == [0, 1, 0, 0, 1, 1]

    def test_a_run_within_a_run_goes_without(self, allocator: Allocator):
        arena, other = Arena(allocator, FirstFit.of), Arena(allocator, FirstFit.of)

        def call():
            return [empty(100) is None, arena.run("program", lambda: [empty(70)]), other.run("program", lambda: [empty(80)])]

        for _ in range(3):
            arena.run("program", call)
        assert dict(arena.runs_without) == {"the same step was running": 3}
        assert dict(other.runs_without) == {"within another step": 3}
        assert (arena.counts.asked, arena.counts.served, arena.counts.elsewhere) == (1, 1, 2)

    def test_a_run_that_fails_is_no_recording_and_no_deviation(self, allocator: Allocator):
        arena = Arena(allocator, FirstFit.of)

        def fail():
            empty(30)
            raise KeyError

        for call in (fail, lambda: [empty(100) is None], fail, lambda: [empty(100) is None], fail):
            if call is fail:
                with pytest.raises(KeyError):
                    arena.run("program", call)
            else:
                arena.run("program", call)
        assert (arena.recorded_runs, arena.served_runs, arena.counts.served) == (1, 1, 1)

    def test_memory_that_the_system_does_not_give_is_done_without(self, allocator: Allocator):
        arena = Arena(allocator, lambda problem: FirstFit(FirstFit.of(problem).offsets, 2**60, 0))
        for _ in range(3):
            assert arena.run("program", lambda: [empty(100).numel()]) == [100]
        assert dict(arena.runs_without) == {f"the system gives no {2**60} bytes for an arena": 2}
