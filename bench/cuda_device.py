"""PyTorch's caching allocator for CUDA, the real one, asked for bytes as the simulated one is: no tensors, no kernels."""

from __future__ import annotations

import torch

from lowtide.cuda.segments import rounded_bytes


class DeviceAllocator:
    """The allocator of the current GPU, empty at first: its cache is given back to the device, and what is left is not counted.

    Asked on a stream of its own: no request is served from what others leave free in segments that are in use.
    """

    def __init__(self) -> None:
        torch.cuda.empty_cache()
        self.peak = (0, 0)  # the most reserved, and the most alive while that much was
        self.live_bytes = 0  # of the rounded requests
        self._before_bytes = torch.cuda.memory_reserved()
        self._before_allocated_bytes = torch.cuda.memory_allocated()
        self._stream = torch.cuda.Stream()
        self._sizes: dict[int, int] = {}  # by address

    @property
    def reserved_bytes(self) -> int:
        """Of all segments."""
        return torch.cuda.memory_reserved() - self._before_bytes

    @property
    def allocated_bytes(self) -> int:
        """Of the blocks that serve requests."""
        return torch.cuda.memory_allocated() - self._before_allocated_bytes

    def malloc(self, nbytes: int) -> int:
        """Serves a request; its address."""
        address = int(torch.cuda.caching_allocator_alloc(nbytes, stream=self._stream))
        self._sizes[address] = rounded_bytes(nbytes)
        self.live_bytes += self._sizes[address]
        self.peak = max(self.peak, (self.reserved_bytes, self.live_bytes))
        return address

    def free(self, address: int) -> None:
        """Takes back what `malloc` gave."""
        self.live_bytes -= self._sizes.pop(address)
        torch.cuda.caching_allocator_delete(address)

    def layout(self) -> tuple[tuple[int, int, int], ...]:
        """Every segment as (address, size, bytes in use)."""
        return tuple(
            (each["address"], each["total_size"], each["allocated_size"])
            for each in torch.cuda.memory_snapshot()
            if each["stream"] == self._stream.cuda_stream
        )
