"""What a program reaches that goes on by itself where it is used: iterators, generators of random numbers, files, queues, arrays."""

from __future__ import annotations

from typing import Any

import numpy
import torch

from lowtide.capture.care.contents import (
    DRAWN,
    checksum,
    is_iterator,
    is_moved,
    is_opaque,
    moves,
    position,
    size_in_bytes,
    stays,
    turn_back,
)
from lowtide.capture.care.writes import refuse
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError

_MOST_BYTES, _MOST_SUMMED = 1 << 26, 1 << 28  # of arrays that are copied, and of those that are looked at


class MovingObjects:
    """Where each of them was when it was found."""

    def __init__(self) -> None:
        self._found: list[tuple[Any, Any]] = []
        self._bytes = 0  # of arrays among them
        self._arrays: list[numpy.ndarray[Any, Any]] = []

    def add(self, item: Any, led_by: object) -> None:
        """`led_by` is the place that led to it, None where none did. Raises CaptureError for one of which nothing says where it is."""
        if is_opaque(item):
            where = f"at {users_line()}" if led_by is None else f"by way of {led_by}".rstrip(",")
            refuse(
                CaptureError(
                    f"the program reaches a {type(item).__name__} {where}, which goes on each time it is used, and nothing says where it "
                    "is, so that no step could do the same: take its next item before the step and pass it with the batch"
                )
            )
        self._arrays += [item] if isinstance(item, numpy.ndarray) else []
        self._bytes += size_in_bytes(item)
        state_of = position if self._bytes < _MOST_BYTES else checksum if self._bytes < _MOST_SUMMED else lambda _: None
        if moves(item) and (at := state_of(item)) is not None:
            self._found.append((item, at))

    def change(self) -> str:
        """What has moved, and what to do about it; "" where nothing has."""
        moved, at = next(((item, at) for item, at in self._found if is_moved(item, at)), (None, None))
        if moved is None:
            return ""
        what = "that it reaches has gone on, and Python cannot turn it back; take its next item before the step and pass it with the batch"
        if isinstance(moved, DRAWN):
            what = "is drawn from; draw with torch, or before the step and pass it with the batch"
        elif not is_iterator(moved):
            kept = "; what the capture has done to it stays" if stays(moved, at) else ""
            what = f"that it reaches is read or written{kept}; use it behind the step, with what the step returns"
        return f"a {type(moved).__name__} {what}"

    def turn_back(self) -> None:
        """What can be is where it was."""
        for item, at in self._found:
            if is_moved(item, at):
                turn_back(item, at)

    def lie_under(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on the memory of an array among them."""
        start, size = tensor.untyped_storage().data_ptr(), tensor.untyped_storage().nbytes()
        bounds = ((each.__array_interface__["data"][0], each.nbytes) for each in self._arrays)
        return any(first < start + size and start < first + length for first, length in bounds)
