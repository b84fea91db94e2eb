"""Whether a call's tensors look as those that a program was made for, seen in some microseconds."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch._C import _dispatch_keys

from lowtide.ir.result_specs import same_strides
from lowtide.runtime.plain import BESIDE_AUTOGRAD, dispatched, is_differentiated


class TensorSpecs:
    """Of tensors on a CPU, each an argument by itself."""

    def __init__(self, each: Iterable[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]) -> None:
        """Of tensors with these shapes, strides and dtypes."""
        self._each = [(shape, stride, dtype, _plain_keys(dtype), reach(shape, stride)) for shape, stride, dtype in each]

    def hold(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether these are arguments like them; False may also be said of what only looks alike to a longer look."""
        if kwargs or len(args) != len(self._each):
            return False
        for arg, (shape, stride, dtype, keys, least) in zip(args, self._each, strict=True):
            # what `dispatched` asks, without a call of it: this is a third of what a small frozen function takes
            if type(arg) is not torch.Tensor or _dispatch_keys(arg).raw_repr() & BESIDE_AUTOGRAD != keys:
                return False
            if arg.shape != shape or arg.dtype is not dtype:
                return False
            if arg.stride() != stride and not same_strides(shape, arg.stride(), stride):
                return False
            if arg.untyped_storage().nbytes() < (arg.storage_offset() + least) * arg.itemsize:  # its memory was let go
                return False
        return not is_differentiated(args)


def _plain_keys(dtype: torch.dtype) -> int:
    return dispatched(torch.empty(0, dtype=dtype, device="cpu"))


def reach(shape: tuple[int, ...], stride: tuple[int, ...]) -> int:
    """Elements from a tensor's first to its last, both included."""
    return 0 if 0 in shape else 1 + sum((size - 1) * step for size, step in zip(shape, stride, strict=True))
