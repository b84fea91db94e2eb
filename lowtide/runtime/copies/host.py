"""The host's memory, where a step on a device puts what it will want later.

On CUDA, copies run beside the operators (`streamed`). On a device without streams they are done at once, and there is nothing to wait for.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from weakref import WeakValueDictionary

import torch

from lowtide.runtime.copies.streams import CudaStreams, StreamedMemory
from lowtide.runtime.copies.transfers import HostMemory, TensorLayout

_known: WeakValueDictionary[str, StreamedMemory] = WeakValueDictionary()


def host_memory(device: str) -> HostMemory:
    """The host's memory for programs on a device. On CUDA they share it, and it is let go of with the last of them."""
    if torch.device(device).type != "cuda":
        return DirectMemory()
    known = _known.get(device)
    if known is None:
        known = _known[device] = StreamedMemory(CudaStreams(torch.device(device)))
    return known


@dataclass(frozen=True)
class _DirectCopy:
    look: TensorLayout
    storage: torch.UntypedStorage


class DirectMemory:
    """For a device without streams: the host's memory is its own, and copies are done when they are asked for."""

    @contextmanager
    def transfers(self) -> Iterator[DirectTransfers]:
        """For one run."""
        run = DirectTransfers()
        try:
            yield run
        finally:
            for tensor, copy in list(run.empty_now.values()):
                run.refill(tensor, copy)


class DirectTransfers:
    """One run's copies."""

    def __init__(self) -> None:
        self.empty_now: dict[int, tuple[torch.Tensor, _DirectCopy]] = {}  # by identity: what the caller is owed

    def store(self, tensor: torch.Tensor) -> _DirectCopy:
        return _DirectCopy(TensorLayout.of(tensor), tensor.untyped_storage().clone())

    def drop(self, tensor: torch.Tensor, copy: _DirectCopy) -> None:
        """Nothing: the copy is whole."""

    def load(self, copy: _DirectCopy) -> torch.Tensor:
        """A tensor on a copy of the copy, which may be wanted again."""
        return copy.look.on(copy.storage.clone())

    def arrived(self, tensor: torch.Tensor) -> None:
        """Nothing: it is filled."""

    def empty(self, tensor: torch.Tensor, copy: _DirectCopy) -> None:
        """Let its memory go."""
        tensor.untyped_storage().resize_(0)
        self.empty_now[id(tensor)] = tensor, copy

    def refill(self, tensor: torch.Tensor, copy: _DirectCopy) -> torch.Tensor:
        storage = tensor.untyped_storage()
        storage.resize_(copy.look.nbytes)
        storage.copy_(copy.storage)
        del self.empty_now[id(tensor)]
        return tensor
