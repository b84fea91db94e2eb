"""Strides of symbolic extents, as torch gives them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lowtide.capture.sizes.symbols import Extent, size_of
from lowtide.ir.result_specs import same_strides


def memory_order(tensor: torch.Tensor) -> list[int]:
    """The dimensions of a tensor of numbers, the innermost first."""
    return list(reversed(range(tensor.dim()))) if tensor.is_contiguous() else by_stride(tensor)


def by_stride(tensor: torch.Tensor) -> list[int]:
    """The same of one whose strides count along extents of 1, too."""
    return sorted(range(tensor.dim()), key=lambda dim: (tensor.stride(dim), tensor.shape[dim]))


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor of numbers lies in memory without gaps, in some order of its dimensions."""
    return same_strides(tensor.shape, dense_stride(tensor.shape, memory_order(tensor)), tensor.stride())


def dense_stride(shape: Sequence[Extent], order: Sequence[int]) -> list[Any]:
    """The strides of a dense tensor whose dimensions lie in this order, the innermost first."""
    stride: list[Any] = [1] * len(shape)
    step: Any = 1
    for dim in order:
        stride[dim], step = step, step * shape[dim]
    return stride


def strides_of_view(shape: Sequence[Extent], stride: Sequence[Extent], wanted: Sequence[Extent]) -> list[Any]:
    """The strides of a view of other extents, as ATen makes them (TensorUtils.cpp, computeStride): there is such a view, and no 0.

    Runs of dimensions that lie one within the other are cut anew, the innermost first.
    """
    found: list[Any] = [1] * len(wanted)
    at, step = len(wanted) - 1, stride[-1] if stride else 1
    given: Any = 1
    taken: Any = 1
    for dim in reversed(range(len(shape))):
        given = given * shape[dim]
        if dim and (size_of(shape[dim - 1]) == 1 or size_of(stride[dim - 1]) == size_of(given * step)):
            continue
        while at >= 0 and (size_of(taken) != size_of(given) or size_of(wanted[at]) == 1):
            found[at], taken, at = taken * step, taken * wanted[at], at - 1
        if dim:
            step, given, taken = stride[dim - 1], 1, 1
    return found
