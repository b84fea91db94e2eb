"""The simulated caching allocator with expandable segments: each rule by hand, and what always holds."""

from hypothesis import given
from hypothesis import strategies as st

from lowtide.cuda.segments import ExpandableAllocator, rounded_bytes

KIB, MIB = 2**10, 2**20


def _reserved(*requests: int) -> list[int]:
    """What is reserved after each request, in MiB; a negative one frees the request of that number, counted from 1."""
    allocator, given_out, found = ExpandableAllocator(), [0], []
    for request in requests:
        if request > 0:
            given_out.append(allocator.malloc(request))
        else:
            allocator.free(given_out[-request])
        found.append(allocator.reserved_bytes // MIB)
    return found


def test_pieces_are_mapped_as_they_are_wanted():
    assert _reserved(MIB, MIB, 1) == [2, 2, 4]
    assert _reserved(12 * MIB, 12 * MIB, 60 * MIB) == [20, 40, 100]


def test_what_the_last_block_lacks_is_mapped_behind_it():
    # 24 of 40 MiB are used: 16 are free at the end, 4 more make 20, in one piece.
    assert _reserved(24 * MIB, 20 * MIB) == [40, 60]
    assert _reserved(24 * MIB, 16 * MIB) == [40, 40]


def test_a_request_may_lie_across_what_were_segments_elsewhere():
    # 30 and 30 freed are one block of 60: 50 fit into it, as they do not where segments are apart.
    assert _reserved(30 * MIB, 30 * MIB, -1, -2, 50 * MIB) == [40, 60, 60, 60, 60]


def test_the_last_block_serves_what_no_other_can():
    allocator = ExpandableAllocator()
    hole, _ = allocator.malloc(12 * MIB), allocator.malloc(3 * MIB)  # the last block is of 5 MiB, a better fit
    allocator.free(hole)
    assert allocator.malloc(4 * MIB) == hole


def test_a_remainder_of_512_bytes_is_split_off_in_the_large_pool():
    allocator = ExpandableAllocator()
    hole, _ = allocator.malloc(4 * MIB), allocator.malloc(16 * MIB)
    allocator.free(hole)
    assert allocator.malloc(4 * MIB - 512) == hole
    assert allocator.allocated_bytes == 20 * MIB - 512


@given(st.lists(st.one_of(st.integers(1, 4 * KIB), st.integers(1, 50 * MIB), st.integers(-30, -1)), max_size=60))
def test_blocks_fill_what_is_mapped_and_never_meet(requests: list[int]):
    allocator, held = ExpandableAllocator(), list[tuple[int, int]]()
    for request in requests:
        if request > 0:
            held.append((allocator.malloc(request), rounded_bytes(request)))
        elif held:
            allocator.free(held.pop(request % len(held))[0])
    assert allocator.allocated_bytes == allocator.live_bytes == sum(size for _, size in held)
    assert allocator.reserved_bytes == sum(size for _, size, _ in allocator.layout())
    ends = [address + size for address, size, _ in allocator.layout()]
    starts = [address for address, _, _ in allocator.layout()]
    assert all(end == start or start == 2**50 for end, start in zip(ends, starts[1:], strict=False))
