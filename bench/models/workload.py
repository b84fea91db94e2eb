"""A model of the list, and what it becomes when built: something to train."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, ...]
Loss = Callable[..., Tensor]  # loss(model, *batch) -> scalar


@dataclass(frozen=True)
class Workload:
    """What one training step works on: `loss(model, *batch)` is the scalar to minimise."""

    model: nn.Module
    batch: Batch
    loss: Loss


@dataclass(frozen=True)
class Entry:
    """A model of the list: how to make it, its batch of random data, and its loss."""

    name: str
    make_model: Callable[[], nn.Module]  # on the default device
    make_batch: Callable[[int], Batch]  # of a batch size, on the default device
    loss: Loss
    note: str  # which model exactly, and on what sizes
    batch_size: int = 8  # for quick runs; tables state theirs

    def build(self, batch_size: int | None = None, device: str = "cpu", seed: int = 0) -> Workload:
        """The model in training mode with random weights, and a random batch: the same for the same seed.

        The caller's random state is left alone. On the device "meta" nothing takes memory: sizes and types are there, numbers are not.
        """
        if batch_size is not None and batch_size < 1:
            raise ValueError(f"expected a batch size of at least 1 for {self.name}, got {batch_size}")
        with torch.random.fork_rng(), torch.device(device):
            torch.manual_seed(seed)
            model, batch = self.make_model(), self.make_batch(self.batch_size if batch_size is None else batch_size)
        return Workload(model.train(), batch, self.loss)


def plain_sgd(model: nn.Module) -> torch.optim.Optimizer:
    """The optimizer where none is named: SGD without state, as in MODeL's experiments."""
    return torch.optim.SGD(model.parameters(), lr=1e-3)


def images(*shape: int) -> Tensor:
    """Random pixels, as good as normalised."""
    return torch.randn(shape)


def labels(count: int, *shape: int) -> Tensor:
    """Random whole numbers in [0, count)."""
    return torch.randint(0, count, shape)


def keyword_loss(*names: str, **fixed: Any) -> Loss:
    """The loss of a model that computes it itself: it takes the batch by these names and answers an object with `.loss`."""

    def loss(model: nn.Module, *batch: Tensor) -> Tensor:
        result: Tensor = model(**dict(zip(names, batch, strict=True)), **fixed).loss
        return result

    return loss
