"""The indices of max-pooling as the place in the window: a byte or two where torch holds eight.

An index is that of the greatest element in its plane. The place is how far that is from where the window begins within the plane, which is
less than a window's rows times the plane's width. The gradient is added up by a kernel that finds elements from that; of types that it
cannot compute with, and elsewhere than on a CPU, by torch's own, from indices that are found again for a few planes at a time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from lowtide.base.kernels import SWITCHED_OFF, kernel
from lowtide.kernels.library import define

_NUMBERS = (torch.float32, torch.float64)  # what kernels can compute with
_AT_ONCE = 2**16  # elements of indices, on a CPU
_AT_ONCE_ELSEWHERE = 2**24


def pool_places(indices: torch.Tensor, extents: list[int], stride: list[int], padding: list[int], dtype: torch.dtype) -> torch.Tensor:
    """What `indices` [..., spatial] of planes of these extents are behind the beginnings of their windows."""
    places = torch.empty_like(indices, dtype=dtype)
    begins = _begins(indices.shape[-len(extents) :], extents, stride, padding, indices.device)
    for chunk in _chunks(indices, len(extents)):
        given, chunk_places = _planes(indices, chunk, len(extents)), _planes(places, chunk, len(extents))
        if _by_kernels(indices):
            _shift(given.reshape(-1).numpy(), -begins.reshape(-1).numpy(), chunk_places.view(-1).numpy())
        else:
            chunk_places.copy_(given - begins)
    return places


def max_pool2d_backward(
    grad: torch.Tensor,
    places: torch.Tensor,
    extents: list[int],
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
) -> torch.Tensor:
    """The gradient of `aten::max_pool2d_with_indices`, of places in the place of indices. All lie in memory row by row."""
    begins = _begins(grad.shape[-2:], extents, stride, padding, grad.device)
    out = grad.new_empty((*grad.shape[:-2], *extents))
    if _by_kernels(grad) and grad.dtype in _NUMBERS:
        _add_up(grad.view(-1).numpy(), places.view(-1).numpy(), begins.reshape(-1).numpy(), out.view(-1).numpy())
        return out
    for chunk in _chunks(places, 2):
        gradient, chunk_out = _planes(grad, chunk, 2), _planes(out, chunk, 2)
        indices = _indices(_planes(places, chunk, 2), begins)
        like = grad.new_empty(()).expand(chunk_out.shape)  # only its shape is asked for
        torch.ops.aten.max_pool2d_with_indices_backward.grad_input(
            gradient, like, kernel_size, stride, padding, dilation, ceil_mode, indices, grad_input=chunk_out
        )
    return out


def _indices(places: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    """[planes, spatial] the indices of places."""
    if not _by_kernels(places):
        return places.to(torch.int64).add_(begins)
    indices = torch.empty(places.shape, dtype=torch.int64)
    _shift(places.view(-1).numpy(), begins.reshape(-1).numpy(), indices.view(-1).numpy())
    return indices


def _begins(counts: torch.Size, extents: list[int], stride: list[int], padding: list[int], device: torch.device) -> torch.Tensor:
    """[spatial] the index of the first element that each window may have."""
    begins = torch.zeros((), dtype=torch.int64, device=device)
    for count, extent, step, pad in zip(counts, extents, stride, padding, strict=True):
        first = torch.arange(count, device=device).mul_(step).sub_(pad).clamp_(min=0)
        begins = begins.unsqueeze(-1) * extent + first
    return begins


def _chunks(indices: torch.Tensor, spatial: int) -> Iterator[slice]:
    at_once = _AT_ONCE if indices.device.type == "cpu" else _AT_ONCE_ELSEWHERE
    each, count = indices.shape[-spatial:].numel(), indices.shape[:-spatial].numel()
    step = max(1, at_once // max(1, each))
    yield from (slice(begin, begin + step) for begin in range(0, count, step))


def _planes(x: torch.Tensor, chunk: slice, spatial: int) -> torch.Tensor:
    return x.view(-1, *x.shape[-spatial:])[chunk]


def _by_kernels(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and not SWITCHED_OFF


@kernel(nogil=True)
def _shift(numbers: Any, by: Any, shifted: Any) -> None:
    """The numbers of planes, one after another, each moved on by that of its window."""
    for first in range(0, len(numbers), len(by)):
        given, shifted_there = numbers[first : first + len(by)], shifted[first : first + len(by)]
        for at in range(len(by)):
            shifted_there[at] = given[at] + by[at]


@kernel(nogil=True)
def _add_up(gradients: Any, places: Any, begins: Any, out: Any) -> None:
    """Each gradient added to its element, plane after plane, in the order in which torch adds them."""
    count = len(begins)
    extent = len(out) * count // max(1, len(gradients))  # of a plane
    for plane in range(len(gradients) // count if count else 0):
        first = plane * count
        given, where, plane_out = (
            gradients[first : first + count],
            places[first : first + count],
            out[plane * extent : (plane + 1) * extent],
        )
        plane_out[:] = 0
        for at in range(count):
            plane_out[begins[at] + where[at]] += given[at]


define("pool_places(Tensor indices, int[] extents, int[] stride, int[] padding, ScalarType dtype) -> Tensor", pool_places)
define(
    "max_pool2d_backward(Tensor grad, Tensor places, int[] extents, int[] kernel_size, int[] stride, int[] padding, int[] dilation, "
    "bool ceil_mode) -> Tensor",
    max_pool2d_backward,
)
