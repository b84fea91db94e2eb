"""An arena: which runs are recorded, which are served, what it grows to, and what goes without."""

from __future__ import annotations

import sys

import pytest
import torch

from lowtide.cost.profiler import measure_memory
from lowtide.runtime.arena.allocator import Allocator, ArenaMemory
from lowtide.runtime.arena.arena import Arena
from tests.arenas import FirstFit, empty, mapped, planned, resident_bytes, script_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the planned allocator is for Linux")


def test_the_profiler_sees_the_arenas_tensors(allocator: Allocator):
    def call() -> None:
        first, second = empty(1000), empty(5000)
        del first
        third = empty(3000)
        del second, third

    plain = measure_memory(call)
    _, found = allocator.record(call)
    script, region = planned(allocator, found)
    served = []

    def in_the_arena() -> None:
        served.append(allocator.serve(region, script, call)[1].served)

    assert measure_memory(in_the_arena, warmup=1) == plain
    assert served == [3, 3]


def test_what_is_held_keeps_its_own_pages_alone(allocator: Allocator):
    """The arena's owner goes while something lies in it."""
    large, kept = 64 * 2**20, []
    script, region = script_of(allocator, (large, 0), (10_000, large), (large, large + 64 * 200))

    def call() -> None:
        first, second, third = empty(large).fill_(1), empty(10_000).fill_(2), empty(large).fill_(3)
        kept.append(second)
        del first, third

    allocator.serve(region, script, call)
    base = region.base
    assert resident_bytes(base) >= large
    del region
    assert (kept[0] == 2).all()
    assert resident_bytes(kept[0].data_ptr()) < 2**20
    kept.clear()
    assert not mapped(base)


class TestArena:
    def test_an_arena_that_was_emptied_is_taken_anew_and_not_recorded_again(self, allocator: Allocator):
        arena = Arena(allocator, FirstFit.of)

        def turn() -> int:
            (result,) = arena.run("program", lambda: [empty(100).fill_(1) + empty(100).fill_(2)])
            assert (result == 3).all()
            return arena.nbytes

        arena.empty()
        assert [turn(), turn()] == [0, 256]
        base = arena._region.base
        arena.empty(), arena.empty()
        assert arena.nbytes == 0
        assert not mapped(base)
        assert [turn(), turn()] == [256, 256]
        assert (arena.recorded_runs, arena.served_runs) == (1, 3)

    def test_an_arena_is_let_go_while_another_program_is_recorded(self, allocator: Allocator):
        arena = Arena(allocator, FirstFit.of)
        found = []

        def call(size):
            made = empty(size).fill_(7)
            found.append(arena.nbytes)
            return [bool((made.numpy() == 7).all())]

        for size in (100, 100, 70, 100, 70):
            assert arena.run(size, lambda size=size: call(size)) == [True]
        assert found == [0, 128, 0, 128, 128]

    def test_nothing_is_emptied_within_a_run(self, allocator: Allocator):
        arena = Arena(allocator, FirstFit.of)
        found = []

        def call():
            made = empty(100).fill_(1)
            arena.empty()
            found.append(arena.nbytes)
            return [bool((made.numpy() == 1).all())]

        assert [arena.run("program", call) for _ in range(3)] == [[True]] * 3
        assert found == [0, 128, 128]

    def test_the_first_run_is_recorded_and_later_ones_are_served(self, allocator: Allocator):
        arena = Arena(allocator, FirstFit.of)
        for _ in range(4):
            (result,) = arena.run("program", lambda: [empty(100).fill_(1) + empty(100).fill_(2)])
            assert (result == 3).all()
        assert (arena.recorded_runs, arena.served_runs, arena.nbytes, arena.lower_bound_bytes) == (1, 3, 256, 256)
        assert (arena.counts.requests, arena.counts.served, arena.counts.outliving, arena.live_tensors) == (3, 2, 1, 0)

    def test_programs_share_the_arena_which_grows(self, allocator: Allocator):
        arena = Arena(allocator, FirstFit.of)
        found = []
        for size in (100, 10_000) * 3:
            arena.run(size, lambda size=size: [empty(size) is None])
            found.append((arena.nbytes, arena.planned_bytes))
        assert found == [(0, 0), (0, 0), (128, 128), (10_048, 10_048), (10_048, 128), (10_048, 10_048)]

    def test_one_placement_serves_all_shapes_below_those_that_were_recorded(self, allocator: Allocator):
        arena = Arena(allocator, FirstFit.of)

        def call(rows, length):
            first, second = empty(100 * rows), empty(100 * length)
            first.fill_(rows), second.fill_(length)
            right = bool((first == rows).all() and (second == length).all())
            del first
            third = empty(100 * rows * length)
            return [right and third is not second]

        found = []
        for shape in ((4, 8), (2, 3), (4, 8), (8, 4), (5, 3), (2, 8), (8, 8)):
            assert arena.run("program", lambda shape=shape: call(*shape), shape) == [True]
            found.append((arena.recorded_runs, arena.served_runs))
        assert found == [(1, 0), (1, 1), (1, 2), (2, 2), (2, 3), (2, 4), (3, 4)]
        assert not arena.counts.deviates

    def test_a_shape_that_asks_for_memory_in_another_pattern_is_recorded_on_its_own(self, allocator: Allocator):
        arena = Arena(allocator, FirstFit.of)

        def call(rows):
            return [len([empty(100 * rows) for _ in range(3 if rows % 2 else 2)])]

        for _ in range(3):
            for rows in (8, 6, 7, 9):
                arena.run("program", lambda rows=rows: call(rows), (rows,))
        # 8 for all; 7 is covered, goes another way once, and then has its own; 9 is larger, and of another pattern
        assert (arena.recorded_runs, arena.served_runs) == (3, 9)
        assert not arena.counts.deviates

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
            assert not arena.live_tensors
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
        assert (arena.counts.requests, arena.counts.served, arena.counts.elsewhere) == (1, 1, 2)

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

    def test_memory_that_others_gave_back_is_asked_for_again_after_ever_more_runs(
        self, allocator: Allocator, monkeypatch: pytest.MonkeyPatch
    ):
        refused = [True, True]

        def asked(allocator: Allocator, nbytes: int) -> ArenaMemory:
            if refused:
                refused.pop()
                raise MemoryError("others have it")
            return ArenaMemory(allocator, nbytes)

        monkeypatch.setattr("lowtide.runtime.arena.arena.ArenaMemory", asked)
        arena, served = Arena(allocator, FirstFit.of), []
        for _ in range(8):
            arena.run("program", lambda: [empty(100).numel()])
            served.append(arena.served_runs)
        assert served == [0, 0, 0, 0, 0, 0, 1, 2]  # recorded; asked for in the second, fourth and seventh run
