"""The planned allocator, driven directly: what it records, what it serves, and that no two tensors ever share a byte."""

from __future__ import annotations

import gc
import sys

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.runtime.arena.allocator import OUTLIVES, Allocator, ArenaMemory, BusyError, Recorded, Script
from tests.arenas import Schedule, Tensors, deviations, empty, mapped, planned, recorded, schedules, script_of

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the planned allocator is for Linux")


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
    assert (counts.requests, counts.request_bytes, counts.served, counts.served_bytes, counts.outliving) == (4, 530, 3, 480, 1)
    assert not counts.deviates
    assert region.live == 0


def test_every_block_is_aligned(allocator: Allocator):
    with pytest.raises(ValueError, match="a multiple of 64"):
        Script(allocator, np.array([10]), np.array([32]))
    for nbytes in (1, 2**20, 5 * 2**20):
        assert ArenaMemory(allocator, nbytes).base % 64 == 0


@settings(max_examples=100)
@given(data=st.data())
def test_no_two_tensors_share_a_byte_whatever_is_asked_for(data: st.DataObject, allocator: Allocator):
    """The schedule is recorded, then run with deviations; some tensors live on from run to run."""
    schedule = data.draw(schedules)
    script, region = planned(allocator, recorded(allocator, schedule, Tensors()))
    tensors = Tensors()
    for _ in range(3):
        deviating = data.draw(deviations(schedule))
        _, counts = allocator.serve(region, script, lambda deviating=deviating: (tensors.run(deviating), tensors.check()))
        assert counts.requests == counts.served + counts.outliving + counts.unexpected + counts.occupied
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
    assert (counts.requests, counts.elsewhere) == (1, 1)  # what is recorded belongs to somebody
    assert found.size_bytes.tolist() == [60]
