"""What records launches and does them again: a CUDA device's graphs.

A capture runs on a stream of its own, as the default one has none. It forbids this thread alone what would wait for the device: loaders
and other steps go on. Python's collector stands still meanwhile, since what it lets go of may ask the device.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any
from weakref import WeakSet

import torch

from lowtide.runtime.arena.arena import have_workspaces

Around = Callable[[Callable[[], list[Any]]], list[Any]]


class CudaGraphs:
    """Those of a CUDA device. All share one pool of memory: what one of them needs while it runs, the others do as well."""

    align_bytes = 256  # kernels are chosen by how addresses are aligned, up to so much: those of cuBLAS

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._side: torch.cuda.Stream | None = None
        self._last: torch.cuda.Stream | None = None  # that runs were given to
        self._pool = torch.cuda.graph_pool_handle()
        self._alive = WeakSet[torch.cuda.CUDAGraph]()  # on that pool, which goes with the last of them

    def capturing(self) -> bool:
        """Whether somebody else captures what is launched now."""
        with torch.cuda.device(self._device):
            return torch.cuda.is_current_stream_capturing()

    def follow(self, memory: torch.Tensor | None) -> int:
        """Which stream the current one is; what it is given from here on comes after all that the one before was. Both use `memory`."""
        now = torch.cuda.current_stream(self._device)
        if self._last is not None and self._last != now:
            now.wait_stream(self._last)
            if memory is not None:
                memory.record_stream(now)
        self._last = now
        return int(now.cuda_stream)

    def capture(self, body: Callable[[], None], generators: Sequence[torch.Generator], around: Around) -> torch.cuda.CUDAGraph:
        """What `body` launches, which does not happen yet; `around` runs a call, on the stream that captures. Raises what they raise."""
        with torch.cuda.device(self._device):
            before = torch.cuda.current_stream()
            if self._side is None:
                self._side = torch.cuda.Stream()
            with torch.cuda.stream(self._side):
                have_workspaces()
            self.release()  # what earlier steps have left in PyTorch's own pools is of no use to a graph, nor is what set workspaces up
            if not self._alive:
                self._pool = torch.cuda.graph_pool_handle()
            graph = torch.cuda.CUDAGraph()
            for generator in generators:
                graph.register_generator_state(generator)
            collects = gc.isenabled()
            gc.disable()
            try:
                self._side.wait_stream(before)
                with torch.cuda.stream(self._side):
                    around(lambda: self._captured(graph, body))
                before.wait_stream(self._side)
                self._alive.add(graph)
            finally:
                if collects:
                    gc.enable()
        return graph

    def _captured(self, graph: torch.cuda.CUDAGraph, body: Callable[[], None]) -> list[Any]:
        try:
            graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
            body()
            graph.capture_end()
        except BaseException:
            self._abandon(graph)
            raise
        return []

    def _abandon(self, graph: torch.cuda.CUDAGraph) -> None:
        """End a capture that failed. What a forbidden call has ended cannot end well."""
        try:
            if torch.cuda.is_current_stream_capturing():
                graph.capture_end()
        except RuntimeError:
            with suppress(RuntimeError):  # before 2.14 PyTorch's allocator would go on to ask the graph which streams are its own
                torch._C._cuda_endAllocateToPool(self._device.index, self._pool)
            _FAILED.append(graph)  # as that of pinned memory may
        graph.reset()
        self._pool = torch.cuda.graph_pool_handle()

    def release(self) -> None:
        """Give the memory of graphs back that nobody refers to any more: later ones begin anew."""
        with torch.cuda.device(self._device):
            torch.cuda.synchronize()
            torch.cuda.empty_cache()


_FAILED: list[torch.cuda.CUDAGraph] = []
