"""Stores, drops and loads as a lowered program calls them.

with memory.transfers() as host:
    x_host = host.store(x)      begins to copy the whole storage of x to the host
    host.drop(x, x_host)        waits until that is done: x may be let go from here on
    x_back = host.load(x_host)  makes a tensor like x and begins to fill it
    host.arrived(x_back)        waits until that is done: x_back may be read, or let go, from here on

What the caller lends is the caller's block all along, and there again when the run is over, also where it fails:

    host.empty(p, p_host)       drop, and the caller's storage has no memory from here on
    p = host.refill(p, p_host)  gives it memory again, and begins to fill it: the same tensor
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Protocol

import torch


class Transfers(Protocol):
    """What a program calls while it runs once."""

    def store(self, tensor: torch.Tensor) -> Any:
        """Begin to copy the tensor's whole storage; what `drop` and `load` want to be given."""

    def drop(self, tensor: torch.Tensor, copy: Any) -> None:
        """Wait until a copy is whole, so that the tensor's memory may be let go."""

    def load(self, copy: Any) -> torch.Tensor:
        """A new tensor like the one that was stored, which begins to be filled."""

    def arrived(self, tensor: torch.Tensor) -> None:
        """Wait until a loaded tensor is filled."""

    def empty(self, tensor: torch.Tensor, copy: Any) -> None:
        """Wait until a copy is whole, and let the memory of the caller's tensor go."""

    def refill(self, tensor: torch.Tensor, copy: Any) -> torch.Tensor:
        """Give the caller's tensor memory again, which begins to be filled; the same tensor."""


class HostMemory(Protocol):
    """Where a program's copies go, kept between its runs."""

    def transfers(self) -> AbstractContextManager[Transfers]:
        """For one run."""


@dataclass(frozen=True)
class TensorLayout:
    """How a tensor lies on its storage."""

    dtype: torch.dtype
    size: torch.Size
    stride: tuple[int, ...]
    offset: int  # elements
    nbytes: int  # of the storage
    device: torch.device
    conjugate: bool
    negative: bool

    @classmethod
    def of(cls, tensor: torch.Tensor) -> TensorLayout:
        return cls(
            tensor.dtype, tensor.size(), tensor.stride(), int(tensor.storage_offset()), tensor.untyped_storage().nbytes(), tensor.device,
            tensor.is_conj(), tensor.is_neg(),
        )  # fmt: skip

    def on(self, storage: torch.UntypedStorage) -> torch.Tensor:
        tensor = torch.empty(0, dtype=self.dtype, device=self.device).set_(storage, self.offset, self.size, self.stride)
        tensor = tensor.conj() if self.conjugate else tensor
        return torch._neg_view(tensor) if self.negative else tensor
