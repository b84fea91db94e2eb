"""What a sweep tries: an architecture, built small with random weights, and a batch for it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Kwargs = dict[str, Any]


@dataclass(frozen=True)
class Subject:
    """One architecture. `build` gives the model in training mode and the keyword arguments, or positional ones, of a call.

    `train` is for what trains in a way of its own: what that leaves, by lowtide or eagerly.
    """

    name: str  # "transformers/bert/masked": library, architecture, task
    build: Callable[[], tuple[nn.Module, tuple[Any, ...] | Kwargs]]
    train: Callable[[bool], dict[str, torch.Tensor]] | None = None

    @property
    def library(self) -> str:
        """The package that it comes from."""
        return self.name.split("/")[0]


def scalar_loss(model: nn.Module, *args: Any, **kwargs: Any) -> torch.Tensor:
    """The loss that the model computes by itself, or else the mean square of all numbers that come out."""
    result = model(*args, **kwargs)
    own = getattr(result, "loss", None)
    return own if isinstance(own, torch.Tensor) else mean_square(result)


def mean_square(result: Any) -> torch.Tensor:
    """The mean square of every tensor of floating point in a result, summed."""
    made = [tensor for tensor in tensors_of(result) if tensor.dtype.is_floating_point and tensor.requires_grad]
    return torch.stack([tensor.float().square().mean() for tensor in made]).sum()


def tensors_of(result: Any) -> list[torch.Tensor]:
    """All tensors within a result: in tuples, lists, mappings, and in what objects hold as attributes."""
    if isinstance(result, torch.Tensor):
        return [result]
    if isinstance(result, (tuple, list)):
        return [tensor for item in result for tensor in tensors_of(item)]
    if hasattr(result, "items"):
        return [tensor for _, item in result.items() for tensor in tensors_of(item)]
    if hasattr(result, "__dict__") and not isinstance(result, (nn.Module, type)) and not callable(result):
        return [tensor for item in vars(result).values() for tensor in tensors_of(item)]
    return []
