"""Equality to the last bit."""

from __future__ import annotations

import torch
from torch import Tensor


def same_bits(one: Tensor, two: Tensor) -> bool:
    """Whether two tensors have the same type, shape and bytes: as numbers, 0.0 would equal -0.0, and nothing would equal nan."""
    return one.dtype == two.dtype and one.shape == two.shape and torch.equal(_bits(one), _bits(two))


def _bits(tensor: Tensor) -> Tensor:
    return tensor.detach().clone(memory_format=torch.contiguous_format).reshape(-1).view(torch.uint8)
