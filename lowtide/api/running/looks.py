"""Whether a call's tensors look as those of the call that a program was made for, seen in some microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lowtide.ir.made import same_strides
from lowtide.runtime.plain import dispatched, is_differentiated


class Looks:
    """Of tensors on a CPU, each an argument by itself. Where one is no tensor, no call looks like it."""

    def __init__(self, batch: Sequence[Any]) -> None:
        plain = all(isinstance(leaf, torch.Tensor) for leaf in batch)
        self._each = [(leaf.shape, leaf.stride(), leaf.dtype, dispatched(leaf)) for leaf in batch] if plain else None

    def hold(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether these are arguments like them; False may also be said of what only looks alike to a longer look."""
        if kwargs or self._each is None or len(args) != len(self._each):
            return False
        for arg, (shape, stride, dtype, keys) in zip(args, self._each, strict=True):
            if type(arg) is not torch.Tensor or dispatched(arg) != keys or arg.shape != shape or arg.dtype is not dtype:
                return False
            if (arg.stride() != stride and not same_strides(shape, arg.stride(), stride)) or not (arg.data_ptr() or not arg.numel()):
                return False
        return not is_differentiated(args)
