"""PyTorch's caching allocator for CUDA, simulated: what a sequence of requests makes it reserve from the device.

Modelled after `c10/cuda/CUDACachingAllocator.cpp` with the settings that PyTorch starts with, whose rules are the same from version 1.11,
which MODeL was measured on, to 2.13: one stream, no expandable segments, no rounding to powers of two, no largest size that may be split.

- A request is rounded up to 512 bytes. Up to 1 MiB it is served from the small pool, above from the large one.
- The smallest free block of the pool that suffices serves it; among blocks of one size, the one of the lowest address.
- Where none does, the device is asked for a segment: 2 MiB for the small pool; for the large one 20 MiB where the request is below
  10 MiB, else the request rounded up to 2 MiB.
- A block is split, and its front part given, where what remains is at least 512 bytes (small pool) or more than 1 MiB (large pool).
  A smaller remainder stays with the request.
- A freed block joins its free neighbours within the segment. Segments are kept: only `empty_cache`, or a device out of memory, returns
  those that are wholly free.

The one assumption: the device gives each new segment a higher address than those before, which matters only among blocks of one size.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lowtide.problems.placement import PlaceProblem

GRANULE_BYTES = 512
SMALL_BYTES = 2**20  # the largest request of the small pool
_SMALL_SEGMENT_BYTES = 2 * 2**20
_LARGE_SEGMENT_BYTES = 20 * 2**20
_HUGE_BYTES = 10 * 2**20  # a request from here on gets a segment of its own size
_HUGE_GRANULE_BYTES = 2 * 2**20


def rounded_bytes(nbytes: int) -> int:
    """What a request for `nbytes` takes at least."""
    return max(1, -(-nbytes // GRANULE_BYTES)) * GRANULE_BYTES


def segment_bytes(size_bytes: int) -> int:
    """What the device is asked for, to serve a rounded request that no free block can."""
    if size_bytes <= SMALL_BYTES:
        return _SMALL_SEGMENT_BYTES
    if size_bytes < _HUGE_BYTES:
        return _LARGE_SEGMENT_BYTES
    return -(-size_bytes // _HUGE_GRANULE_BYTES) * _HUGE_GRANULE_BYTES


@dataclass(eq=False)
class Block:
    """Bytes side by side within one segment."""

    address: int
    size_bytes: int
    small: bool  # of which pool
    rounded_bytes: int = 0  # of the request that it serves; 0 while it is free
    before: Block | None = None  # its neighbours in the segment
    after: Block | None = None

    @property
    def free(self) -> bool:
        """Whether it serves no request."""
        return self.rounded_bytes == 0


class CachingAllocator:
    """The allocator's state; addresses are numbers."""

    def __init__(self) -> None:
        self.reserved_bytes = 0  # of all segments: `torch.cuda.memory_reserved`
        self.allocated_bytes = 0  # of the blocks that serve requests, remainders with them: `torch.cuda.memory_allocated`
        self.live_bytes = 0  # of the rounded requests themselves: the resident set
        self.peak = (0, 0)  # the most reserved, and the most alive while that much was
        self.blocks: dict[int, Block] = {}  # by address
        self._free: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])  # large pool, small pool: (size, address), ascending
        self._next_address = 0

    def malloc(self, nbytes: int) -> int:
        """Serves a request of at least one byte; the address of its block."""
        if nbytes < 1:
            raise ValueError(f"expected a request of at least one byte, got {nbytes}: PyTorch serves none below")
        size = rounded_bytes(nbytes)
        block = self._fitting(size) or self._segment(size)
        remaining = block.size_bytes - size
        if self._splits(block, remaining):
            self._split(block, size)
        block.rounded_bytes = size
        self.allocated_bytes += block.size_bytes
        self.live_bytes += size
        self.peak = max(self.peak, (self.reserved_bytes, self.live_bytes))
        return block.address

    def free(self, address: int) -> None:
        """Takes back what `malloc` gave. Raises KeyError where it did not."""
        block = self.blocks[address]
        if block.free:
            raise KeyError(f"address {address}: expected a block in use, got one that is free already")
        self.allocated_bytes -= block.size_bytes
        self.live_bytes -= block.rounded_bytes
        block.rounded_bytes = 0
        if block.before is not None and block.before.free:
            self._take(block.before)
            block = self._join(block.before, block)
        if block.after is not None and block.after.free:
            self._take(block.after)
            block = self._join(block, block.after)
        insort(self._free[block.small], (block.size_bytes, block.address))

    def empty_cache(self) -> None:
        """Returns the segments that are wholly free to the device."""
        for block in [each for each in self.blocks.values() if each.free and each.before is None and each.after is None]:
            self._take(block)
            del self.blocks[block.address]
            self.reserved_bytes -= block.size_bytes

    def layout(self) -> tuple[tuple[int, int, int], ...]:
        """Every block as (address, size, rounded request or 0), by address: two equal layouts go on alike."""
        return tuple((block.address, block.size_bytes, block.rounded_bytes) for _, block in sorted(self.blocks.items()))

    def _splits(self, block: Block, remaining: int) -> bool:
        """Whether what a request leaves of a block is split off."""
        return remaining >= GRANULE_BYTES if block.small else remaining > SMALL_BYTES

    def _fitting(self, size: int) -> Block | None:
        """The best fit, no longer among the free ones."""
        pool = self._free[size <= SMALL_BYTES]
        position = bisect_left(pool, (size, 0))
        return self.blocks[pool.pop(position)[1]] if position < len(pool) else None

    def _segment(self, size: int) -> Block:
        """A new one, as one block."""
        block = Block(self._next_address, segment_bytes(size), size <= SMALL_BYTES)
        self.blocks[block.address] = block
        self.reserved_bytes += block.size_bytes
        self._next_address += block.size_bytes
        return block

    def _split(self, block: Block, size: int) -> None:
        """Cuts off what is behind the first `size` bytes, which stays free."""
        rest = Block(block.address + size, block.size_bytes - size, block.small, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size_bytes = rest, size
        self.blocks[rest.address] = rest
        insort(self._free[rest.small], (rest.size_bytes, rest.address))

    def _take(self, block: Block) -> None:
        """Out of its pool's free ones."""
        pool = self._free[block.small]
        pool.pop(bisect_left(pool, (block.size_bytes, block.address)))

    def _join(self, front: Block, back: Block) -> Block:
        """Two neighbours as one block, in no pool."""
        del self.blocks[back.address]
        front.size_bytes += back.size_bytes
        front.after = back.after
        if back.after is not None:
            back.after.before = front
        return front


@dataclass(frozen=True)
class First:
    """A step that runs once, before the others."""

    step: PlaceProblem
    staying: frozenset[int]  # of its buffers, those that live to its end and are never freed


@dataclass(frozen=True)
class Replay:
    """What a program that repeats one step made the allocator reserve."""

    reserved_bytes: int  # MR of MODeL's section 5.4, at its peak over all steps
    live_bytes: int  # RS: the most alive while that much was reserved
    reserved_by_step: tuple[int, ...]  # after each
    settled: bool  # whether the last step left the allocator as it had found it: then all further ones will

    @property
    def fragmentation(self) -> float:
        """(MR - RS) / MR."""
        return (self.reserved_bytes - self.live_bytes) / self.reserved_bytes if self.reserved_bytes else 0.0


class Allocator(Protocol):
    """What a replay asks of an allocator: the simulated one, or that of a GPU (`bench.cuda_device`)."""

    peak: tuple[int, int]

    @property
    def reserved_bytes(self) -> int: ...

    def malloc(self, nbytes: int) -> int: ...

    def free(self, address: int) -> None: ...

    def layout(self) -> tuple[tuple[int, int, int], ...]: ...


def replay(
    resident: Sequence[int], step: PlaceProblem, *, repeats: int = 8, first: First | None = None, allocator: Allocator | None = None
) -> Replay:
    """Requests the `resident` bytes, one after the other, and then runs the step `repeats` times, after `first` where there is one.

    At each step of the problem, buffers that start there are requested, in their order, and then those that end after it are freed.
    Buffers that live to the end (results, and gradients in eager PyTorch) are freed when the next repetition starts: `zero_grad` comes
    first in a step, and the caller holds the results until then.
    """
    allocator = CachingAllocator() if allocator is None else allocator
    there = [allocator.malloc(nbytes) for nbytes in resident if nbytes]
    if first is not None:
        there += _run(allocator, first.step, _events(first.step), first.staying)
    events, reserved = _events(step), []
    before, after = (), allocator.layout()
    for _ in range(repeats):
        _run(allocator, step, events)
        reserved.append(allocator.reserved_bytes)
        before, after = after, allocator.layout()
    for address in there:
        allocator.free(address)
    return Replay(*allocator.peak, tuple(reserved), before == after)


def _run(allocator: Allocator, step: PlaceProblem, events: Sequence[tuple[int, bool]], staying: Collection[int] = ()) -> list[int]:
    """One repetition, at whose end all is freed but what stays: the addresses of that."""
    held: dict[int, int] = {}
    for buffer, begins in events:
        if begins:
            held[buffer] = allocator.malloc(int(step.size_bytes[buffer]))
        else:
            allocator.free(held.pop(buffer))
    for buffer, address in held.items():  # now, which is the same as before the next repetition's first request
        if buffer not in staying:
            allocator.free(address)
    return [address for buffer, address in held.items() if buffer in staying]


def _events(step: PlaceProblem) -> list[tuple[int, bool]]:
    """Buffers in the order in which they are requested (True) and freed (False); those that live to the last step are never freed."""
    living = np.flatnonzero((step.size_bytes > 0) & (step.start < step.end)).tolist()
    last = int(step.end.max(initial=0))
    begins = [(int(step.start[each]), 0, each) for each in living]
    ends = [(int(step.end[each]) - 1, 1, each) for each in living if step.end[each] < last]
    return [(each, not after) for _, after, each in sorted(begins + ends)]
