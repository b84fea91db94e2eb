"""Whether a call's tensors look as those of the call that a program was made for, seen in some microseconds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from lowtide.ir.made import same_strides


class Looks:
    """Of tensors on a CPU, each an argument by itself."""

    def __init__(self, batch: Sequence[Any]) -> None:
        self._each = [(leaf.shape, leaf.stride(), leaf.dtype) for leaf in batch]

    def hold(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether these are arguments like them; False may also be said of what only looks alike to a longer look."""
        if kwargs or len(args) != len(self._each):
            return False
        for arg, (shape, stride, dtype) in zip(args, self._each, strict=True):
            if type(arg) is not torch.Tensor or arg.shape != shape or arg.dtype is not dtype or arg.layout is not torch.strided:
                return False
            if (arg.stride() != stride and not same_strides(shape, arg.stride(), stride)) or arg.device.type != "cpu" or _is_lazy(arg):
                return False
        return True


def _is_lazy(tensor: torch.Tensor) -> bool:
    return tensor.is_neg() or tensor.is_conj()
