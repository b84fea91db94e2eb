"""What copies want of a device: streams, moments to wait for, and memory of the host that it reaches by itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol, cast

import torch

Wait = Callable[[], object]
NOTHING: Wait = bool


class Stream(Protocol):
    """Work that is done in its order, beside that of other streams. `torch.cuda.Stream` is one."""

    def record_event(self) -> Any:
        """The moment at which all work given to the stream so far is done."""

    def wait_event(self, event: Any) -> None:
        """Do work given from now on only after that moment."""


class Streams(Protocol):
    """What `StreamedMemory` wants of a device."""

    def computing(self) -> Stream:
        """The stream that the program's operators run on now."""

    def copying(self) -> Stream:
        """A new stream."""

    def copy(self, stream: Stream, target: torch.Tensor, source: torch.Tensor) -> None:
        """Give a stream the work of copying bytes; returns at once."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """So many bytes of the host's memory that the device can reach by itself."""

    def wait(self, stream: Stream) -> Wait:
        """What has the host itself wait for all work given to a stream by then. A function of C; nothing where a graph is captured."""

    def capturing(self) -> bool:
        """Whether what is given to the computing stream now becomes a CUDA graph, which is run later."""

    def let_go(self) -> None:
        """Give back to the system what was pinned and nobody refers to any more."""


@dataclass(frozen=True)
class CudaStreams:
    """A CUDA device's."""

    device: torch.device

    def computing(self) -> Stream:
        return torch.cuda.current_stream(self.device)

    def copying(self) -> Stream:
        """A stream that waits for nobody unless told to."""
        return torch.cuda.Stream(self.device)

    def copy(self, stream: Any, target: torch.Tensor, source: torch.Tensor) -> None:
        """An asynchronous copy: one end is pinned."""
        with torch.cuda.stream(stream):
            target.copy_(source, non_blocking=True)

    def pinned(self, nbytes: int) -> torch.Tensor:
        """Page-locked memory; the first request for it makes the device wait, so it is kept."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)

    def wait(self, stream: Any) -> Wait:
        return NOTHING if self.capturing() else super(torch.cuda.Stream, cast(torch.cuda.Stream, stream)).synchronize  # its own is Python's

    def capturing(self) -> bool:
        return torch.cuda.is_current_stream_capturing()

    def let_go(self) -> None:
        """PyTorch's allocator keeps such memory, until copies that still read it are done and it is told to let it go."""
        torch.cuda.synchronize(self.device)
        torch.accelerator.empty_host_cache()
