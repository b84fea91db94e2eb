"""PyTorch's caching allocator for CUDA, simulated: what a sequence of requests makes it count as allocated, and reserve from the device.

Modelled after `c10/cuda/CUDACachingAllocator.cpp` with the settings that PyTorch starts with: one stream, no rounding to powers of two, no
largest size that may be split. `tests/gpu/test_caching_on_cuda.py` holds it to the real one, request by request.

- A request is rounded up to 512 bytes. Up to 1 MiB it is served from the small pool, above from the large one.
- The smallest free block of the pool that suffices serves it; among blocks of one size, the one of the lowest address.
- Where none does, the device is asked for a segment: 2 MiB for the small pool; for the large one 20 MiB where the request is below
  10 MiB, else the request rounded up to 2 MiB.
- A block is split, and its front part given, where what remains is at least 512 bytes (small pool) or more than 1 MiB (large pool).
  A smaller remainder stays with the request.
- A freed block joins its free neighbours within the segment. Segments are kept.

With `expandable_segments:True` these hold but for the following:

- Each pool has one segment, of as much address space as it wants. It is mapped from its beginning, in pieces of 20 MiB, of 2 MiB for the
  small pool; only what is mapped is reserved.
- Where no free block suffices, pieces are mapped behind the last one; where the last block is free, only as many as it lacks.
- The last block serves a request only where no other can: it could grow.
- What remains of a block is split off from 512 bytes on, in the large pool, too.

The one assumption: the device gives each new segment a higher address than those before, which matters only among blocks of one size.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from dataclasses import dataclass

GRANULE_BYTES = 512
SMALL_BYTES = 2**20  # the largest request of the small pool
_SMALL_SEGMENT_BYTES = 2 * 2**20
_LARGE_SEGMENT_BYTES = 20 * 2**20
HUGE_BYTES = 10 * 2**20  # a request from here on gets a segment of its own size
_HUGE_GRANULE_BYTES = 2 * 2**20
_STARTS = (2**50, 0)  # of the large pool and the small one: where expandable segments begin, far apart


def rounded_bytes(nbytes: int) -> int:
    """What a request for `nbytes` takes at least."""
    return max(1, -(-nbytes // GRANULE_BYTES)) * GRANULE_BYTES


def segment_bytes(size_bytes: int) -> int:
    """What the device is asked for, to serve a rounded request that no free block can."""
    if size_bytes <= SMALL_BYTES:
        return _SMALL_SEGMENT_BYTES
    if size_bytes < HUGE_BYTES:
        return _LARGE_SEGMENT_BYTES
    return -(-size_bytes // _HUGE_GRANULE_BYTES) * _HUGE_GRANULE_BYTES


@dataclass(eq=False)
class DeviceBlock:
    """Bytes side by side within one segment."""

    address: int
    size_bytes: int
    small: bool  # of which pool
    rounded_bytes: int = 0  # of the request that it serves; 0 while it is free
    before: DeviceBlock | None = None  # its neighbours in the segment
    after: DeviceBlock | None = None

    @property
    def free(self) -> bool:
        return self.rounded_bytes == 0


class CachingAllocator:
    """The allocator's state; addresses are numbers."""

    def __init__(self) -> None:
        self.reserved_bytes = 0  # of all segments: `torch.cuda.memory_reserved`
        self.allocated_bytes = 0  # of the blocks that serve requests, remainders with them: `torch.cuda.memory_allocated`
        self.live_bytes = 0  # of the rounded requests themselves: the resident set
        self.peak = (0, 0)  # the most reserved, and the most alive while that much was
        self.most_allocated_bytes = 0
        self.blocks: dict[int, DeviceBlock] = {}  # by address
        self._free: tuple[list[tuple[int, int]], list[tuple[int, int]]] = ([], [])  # large pool, small pool: (size, address), ascending
        self._next_address = 0

    def malloc(self, nbytes: int) -> int:
        """Serves a request of at least one byte; the address of its block."""
        if nbytes < 1:
            raise ValueError(f"expected a request of at least one byte, got {nbytes}: PyTorch serves none below")
        size = rounded_bytes(nbytes)
        block = self._fitting(size) or self._segment(size)
        if self._splits(block, block.size_bytes - size):
            self._split(block, size)
        block.rounded_bytes = size
        self.allocated_bytes += block.size_bytes
        self.live_bytes += size
        self.peak = max(self.peak, (self.reserved_bytes, self.live_bytes))
        self.most_allocated_bytes = max(self.most_allocated_bytes, self.allocated_bytes)
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
        """Gives the device back the segments in which nothing lies, as `torch.cuda.empty_cache` does."""
        for block in [block for block in self.blocks.values() if block.free and block.before is None and block.after is None]:
            self._take(block)
            self.reserved_bytes -= self.blocks.pop(block.address).size_bytes

    def layout(self) -> tuple[tuple[int, int, int], ...]:
        """Every block as (address, size, rounded request or 0), by address: two equal layouts go on alike."""
        return tuple((block.address, block.size_bytes, block.rounded_bytes) for _, block in sorted(self.blocks.items()))

    def _splits(self, block: DeviceBlock, remaining: int) -> bool:
        """Whether what a request leaves of a block is split off."""
        return remaining >= GRANULE_BYTES if block.small else remaining > SMALL_BYTES

    def _fitting(self, size: int) -> DeviceBlock | None:
        pool = self._free[size <= SMALL_BYTES]
        position = bisect_left(pool, (size, 0))
        return self.blocks[pool.pop(position)[1]] if position < len(pool) else None

    def _segment(self, size: int) -> DeviceBlock:
        block = DeviceBlock(self._next_address, segment_bytes(size), size <= SMALL_BYTES)
        self.blocks[block.address] = block
        self.reserved_bytes += block.size_bytes
        self._next_address += block.size_bytes
        return block

    def _split(self, block: DeviceBlock, size: int) -> None:
        """Cuts off what is behind the first `size` bytes, which stays free."""
        rest = DeviceBlock(block.address + size, block.size_bytes - size, block.small, before=block, after=block.after)
        if block.after is not None:
            block.after.before = rest
        block.after, block.size_bytes = rest, size
        self.blocks[rest.address] = rest
        insort(self._free[rest.small], (rest.size_bytes, rest.address))

    def _take(self, block: DeviceBlock) -> None:
        pool = self._free[block.small]
        pool.pop(bisect_left(pool, (block.size_bytes, block.address)))

    def _join(self, front: DeviceBlock, back: DeviceBlock) -> DeviceBlock:
        del self.blocks[back.address]
        front.size_bytes += back.size_bytes
        front.after = back.after
        if back.after is not None:
            back.after.before = front
        return front


class ExpandableAllocator(CachingAllocator):
    def __init__(self) -> None:
        super().__init__()
        self._last: list[DeviceBlock | None] = [None, None]  # of what is mapped, by pool

    def _splits(self, block: DeviceBlock, remaining: int) -> bool:
        return remaining >= GRANULE_BYTES

    def _fitting(self, size: int) -> DeviceBlock | None:
        """The best fit, the last block after all others."""
        pool, last = self._free[size <= SMALL_BYTES], self._last[size <= SMALL_BYTES]
        position = bisect_left(pool, (size, 0))
        if position < len(pool) - 1 and self.blocks[pool[position][1]] is last:
            position += 1
        return self.blocks[pool.pop(position)[1]] if position < len(pool) else None

    def _segment(self, size: int) -> DeviceBlock:
        """More pieces, joined with the last block where that is free."""
        small = size <= SMALL_BYTES
        last = self._last[small]
        lacking = size - (last.size_bytes if last is not None and last.free else 0)
        piece = _SMALL_SEGMENT_BYTES if small else _LARGE_SEGMENT_BYTES
        end = _STARTS[small] if last is None else last.address + last.size_bytes
        more = self._last[small] = DeviceBlock(end, -(-lacking // piece) * piece, small, before=last)
        self.blocks[more.address] = more
        self.reserved_bytes += more.size_bytes
        if last is None:
            return more
        last.after = more
        if not last.free:
            return more
        self._take(last)
        return self._join(last, more)

    def _split(self, block: DeviceBlock, size: int) -> None:
        super()._split(block, size)
        if block is self._last[block.small]:
            self._last[block.small] = block.after

    def _join(self, front: DeviceBlock, back: DeviceBlock) -> DeviceBlock:
        if back is self._last[back.small]:
            self._last[back.small] = front
        return super()._join(front, back)
