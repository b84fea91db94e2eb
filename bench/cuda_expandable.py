"""The caching allocator with `expandable_segments:True`, simulated: what a sequence of requests makes it reserve from the device.

Modelled after the same file as `bench.cuda_caching`, whose rules hold but for these:

- Each pool has one segment, of as much address space as it wants. It is mapped from its beginning, in pieces of 20 MiB, of 2 MiB for the
  small pool; only what is mapped is reserved.
- Where no free block suffices, pieces are mapped behind the last one; where the last block is free, only as many as it lacks.
- The last block serves a request only where no other can: it could grow.
- What remains of a block is split off from 512 bytes on, in the large pool, too.
"""

from __future__ import annotations

from bisect import bisect_left

from bench.cuda_caching import GRANULE_BYTES, SMALL_BYTES, Block, CachingAllocator

_PIECES = (20 * 2**20, 2 * 2**20)  # of the large pool and the small one, in bytes
_STARTS = (2**50, 0)  # where their address spaces begin: far apart


class ExpandableAllocator(CachingAllocator):
    """The allocator's state. What `empty_cache` unmaps is not simulated."""

    def __init__(self) -> None:
        super().__init__()
        self._ends = list(_STARTS)  # of what is mapped, by pool

    def empty_cache(self) -> None:
        """Raises NotImplementedError."""
        raise NotImplementedError("empty_cache unmaps pieces within segments, which is not simulated with expandable segments")

    def _splits(self, block: Block, remaining: int) -> bool:
        return remaining >= GRANULE_BYTES

    def _fitting(self, size: int) -> Block | None:
        """The best fit, the last block after all others."""
        pool = self._free[size <= SMALL_BYTES]
        position = bisect_left(pool, (size, 0))
        if position < len(pool) - 1 and self._is_last(self.blocks[pool[position][1]]):
            position += 1
        return self.blocks[pool.pop(position)[1]] if position < len(pool) else None

    def _is_last(self, block: Block) -> bool:
        return block.address + block.size_bytes == self._ends[block.small]

    def _segment(self, size: int) -> Block:
        """More pieces, joined with the last block where that is free."""
        small = size <= SMALL_BYTES
        last = next((block for block in self.blocks.values() if block.small == small and self._is_last(block)), None)
        lacking = size - (last.size_bytes if last is not None and last.free else 0)
        piece, end = _PIECES[small], self._ends[small]
        more = Block(end, -(-lacking // piece) * piece, small, before=last)
        self.blocks[more.address] = more
        self.reserved_bytes += more.size_bytes
        self._ends[small] += more.size_bytes
        if last is None:
            return more
        last.after = more
        if not last.free:
            return more
        self._take(last)
        return self._join(last, more)
