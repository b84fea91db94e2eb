"""The simulated caching allocator: each rule by hand, and what always holds."""

from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench.cuda_caching import First, replay
from bench.cuda_device import DeviceAllocator
from lowtide.cuda.forecast import simulated_allocator
from lowtide.cuda.segments import CachingAllocator, ExpandableAllocator, rounded_bytes, segment_bytes
from lowtide.problems.placement import PlaceProblem
from tests.placements import problems

KIB, MIB = 2**10, 2**20
SIZES = st.one_of(st.integers(1, 4 * KIB), st.integers(1, 3 * MIB), st.integers(8 * MIB, 12 * MIB), st.integers(1, 50 * MIB))


@pytest.mark.parametrize(
    ("settings", "kind"),
    [
        ("", CachingAllocator), ("expandable_segments: True", ExpandableAllocator), (" pinned_num_register_threads:2,", CachingAllocator),
        ("expandable_segments:True,expandable_segments:False", CachingAllocator), ("max_split_size_mb:64", None),
        ("expandable_segments:True, backend:cudaMallocAsync", None), ("roundup_power2_divisions:[256:1,512:2]", None),
    ],
)  # fmt: skip
def test_settings_are_read_as_torch_reads_them(monkeypatch: pytest.MonkeyPatch, settings: str, kind: type | None):
    monkeypatch.setenv("PYTORCH_ALLOC_CONF", settings)
    monkeypatch.setenv("PYTORCH_CUDA_ALLOC_CONF", "max_split_size_mb:32")  # the older name, which the other one goes before
    simulated = simulated_allocator()
    assert simulated is None if kind is None else type(simulated) is kind


@pytest.mark.parametrize(("nbytes", "taken"), [(1, 512), (512, 512), (513, 1024), (MIB, MIB), (MIB + 1, MIB + 512)])
def test_requests_are_rounded_up_to_512_bytes(nbytes: int, taken: int):
    assert rounded_bytes(nbytes) == taken


@pytest.mark.parametrize(
    ("size", "segment"),
    [
        (512, 2 * MIB),
        (MIB, 2 * MIB),
        (MIB + 512, 20 * MIB),
        (10 * MIB - 512, 20 * MIB),
        (10 * MIB, 10 * MIB),
        (10 * MIB + 512, 12 * MIB),
        (21 * MIB, 22 * MIB),
    ],
)
def test_segments_are_of_2_mib_of_20_mib_or_of_the_request_rounded_to_2_mib(size: int, segment: int):
    allocator = CachingAllocator()
    allocator.malloc(size)
    assert segment_bytes(size) == allocator.reserved_bytes == segment


def test_small_requests_share_a_segment():
    allocator = CachingAllocator()
    assert [allocator.malloc(MIB), allocator.malloc(MIB - 512), allocator.malloc(1)] == [0, MIB, 2 * MIB - 512]
    assert allocator.reserved_bytes == 2 * MIB
    assert allocator.malloc(1) == 2 * MIB
    assert allocator.reserved_bytes == 4 * MIB


def test_small_and_large_requests_have_pools_of_their_own():
    allocator = CachingAllocator()
    allocator.free(allocator.malloc(4 * MIB))  # leaves 20 MiB free
    allocator.malloc(512)
    assert allocator.reserved_bytes == 22 * MIB
    allocator.malloc(MIB + 1)
    assert allocator.reserved_bytes == 22 * MIB


def test_a_large_block_is_split_only_where_more_than_1_mib_remains():
    allocator = CachingAllocator()
    whole = allocator.malloc(19 * MIB)  # a segment of 20 MiB, and a remainder of 1 MiB: not split
    assert allocator.allocated_bytes == allocator.reserved_bytes == 20 * MIB
    assert allocator.live_bytes == 19 * MIB
    allocator.free(whole)
    front = allocator.malloc(19 * MIB - 512)
    assert allocator.allocated_bytes == 19 * MIB - 512
    assert allocator.malloc(MIB + 512) == front + 19 * MIB - 512
    assert allocator.reserved_bytes == 20 * MIB


def test_a_small_block_is_split_where_512_bytes_remain():
    allocator = CachingAllocator()
    first, _, _ = allocator.malloc(1024), allocator.malloc(MIB), allocator.malloc(MIB - 1024)
    allocator.free(first)
    assert allocator.malloc(512) == first
    assert allocator.allocated_bytes == 2 * MIB - 512
    assert allocator.malloc(512) == first + 512


def test_the_smallest_block_that_suffices_is_taken_and_of_equal_ones_the_lowest():
    allocator = CachingAllocator()
    large, _, small, _, twin = (allocator.malloc(size * KIB) for size in (8, 1, 4, 1, 4))
    allocator.malloc(1 * KIB)
    for each in (large, twin, small):
        allocator.free(each)
    assert [allocator.malloc(4 * KIB) for _ in range(4)] == [small, twin, large, large + 4 * KIB]


def test_freed_neighbours_join_within_their_segment_only():
    allocator = CachingAllocator()
    parts = [allocator.malloc(MIB) for _ in range(4)]  # two segments, side by side
    for each in (parts[1], parts[2], parts[0], parts[3]):
        allocator.free(each)
    assert allocator.layout() == ((0, 2 * MIB, 0), (2 * MIB, 2 * MIB, 0))


def test_what_is_not_in_use_is_not_taken_back():
    allocator = CachingAllocator()
    block = allocator.malloc(1)
    allocator.free(block)
    with pytest.raises(KeyError, match="free already"):
        allocator.free(block)
    with pytest.raises(ValueError, match="at least one byte"):
        allocator.malloc(0)


@given(st.lists(st.tuples(st.booleans(), SIZES, st.integers(0, 10**6)), max_size=60))
def test_blocks_tile_their_segments_whatever_is_asked(requests: list[tuple[bool, int, int]]):
    allocator, held = CachingAllocator(), {}
    for frees, nbytes, pick in requests:
        if frees and held:
            allocator.free(sorted(held)[pick % len(held)])
            del held[sorted(held)[pick % len(held)]]
        else:
            address = allocator.malloc(nbytes)
            assert address not in held
            held[address] = nbytes
        check(allocator, held)
    for address in held:
        allocator.free(address)
    assert all(rounded == 0 for _, _, rounded in allocator.layout())
    assert (allocator.allocated_bytes, allocator.live_bytes) == (0, 0)


def check(allocator: CachingAllocator, held: dict[int, int]) -> None:
    """Blocks follow one another without gap or overlap, no two free ones of a segment side by side, and every sum is right."""
    layout = allocator.layout()
    assert all(this[0] + this[1] <= following[0] for this, following in pairwise(layout))
    assert {address: rounded_bytes(nbytes) for address, nbytes in held.items()} == {at: used for at, _, used in layout if used}
    assert sum(size for _, size, _ in layout) == allocator.reserved_bytes
    assert sum(size for _, size, used in layout if used) == allocator.allocated_bytes
    assert sum(used for _, _, used in layout) == allocator.live_bytes
    for block in allocator.blocks.values():
        assert block.after is None or (block.after.before is block and block.after.address == block.address + block.size_bytes)
        assert not (block.free and block.after is not None and block.after.free)
        assert block.size_bytes - block.rounded_bytes <= MIB or block.free


def test_a_replay_measures_what_is_reserved_and_the_most_alive_meanwhile():
    step = PlaceProblem.of([4 * MIB, 4 * MIB, 12 * MIB, 30 * MIB], [0, 1, 2, 0], [1, 3, 3, 0])  # the last never lives
    found = replay([5 * MIB], step, repeats=3)
    # 5 + 4 + 4 MiB lie in one segment of 20; when the second is freed, no 12 MiB are left side by side.
    assert found.reserved_by_step == (32 * MIB, 32 * MIB, 32 * MIB)
    assert found.live_bytes == 21 * MIB
    assert found.fragmentation == 11 / 32
    assert found.settled


def test_what_stays_of_the_first_step_is_there_in_all_others():
    step = PlaceProblem.of([12 * MIB], [0], [1])
    kept = replay([], step, first=First(PlaceProblem.of([12 * MIB, 14 * MIB], [0, 0], [1, 1]), frozenset({1})))
    assert (kept.reserved_bytes, kept.live_bytes) == (26 * MIB, 26 * MIB)
    again = replay([], step, first=First(step, frozenset({0})))
    assert (again.reserved_bytes, replay([], step).reserved_bytes) == (24 * MIB, 12 * MIB)


@given(problems(aligned=False, fixed=False))
def test_a_replay_reserves_no_less_than_is_alive_and_gives_all_back(step: PlaceProblem):
    found = replay([], step, repeats=2)
    rounded = PlaceProblem.of([rounded_bytes(size) if size else 0 for size in step.size_bytes.tolist()], step.start, step.end)
    assert found.live_bytes == rounded.live_bytes[1].max(initial=0)
    assert found.reserved_bytes >= found.live_bytes
    assert found.settled


def test_the_allocator_of_a_gpu_is_asked_as_the_simulated_one_is(monkeypatch: pytest.MonkeyPatch):
    """With PyTorch's functions stood in for by the simulation: that what is asked and counted is the same."""
    stand_in = CachingAllocator()
    segments = [{"stream": 7, "address": 0, "total_size": 1, "allocated_size": 1}]
    for name, function in {
        "empty_cache": lambda: None,
        "memory_reserved": lambda: stand_in.reserved_bytes,
        "memory_allocated": lambda: stand_in.allocated_bytes,
        "caching_allocator_alloc": lambda nbytes, stream: stand_in.malloc(nbytes),
        "caching_allocator_delete": stand_in.free,
        "memory_snapshot": lambda: segments,
        "Stream": lambda: SimpleNamespace(cuda_stream=7),
    }.items():
        monkeypatch.setattr(torch.cuda, name, function)
    step = PlaceProblem.of([4 * MIB, 4 * MIB, 12 * MIB], [0, 1, 2], [1, 3, 3])
    assert replay([5 * MIB], step, allocator=DeviceAllocator()) == replay([5 * MIB], step)
    assert stand_in.live_bytes == 0
