"""What a batch must look like, and the messages for one that does not."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from lowtide.errors import BatchError
from lowtide.ir import tree
from lowtide.runtime.caller import describe


@dataclass(frozen=True)
class BatchSpec:
    """The leaves of a batch as captured: for a tensor its shape, strides, dtype and device, for anything else the value itself."""

    leaves: tuple[tuple[str, Any], ...]

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device) -> BatchSpec:
        """The specification of this batch; tensors on the meta device are taken to lie on `device`."""
        leaves, _ = tree.flatten((args, kwargs))
        return cls(tuple((_name(leaf.where), _look(leaf.value, device)) for leaf in leaves))

    def leaves_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        """The leaves of another batch like it. Raises BatchError that says which argument is unlike, what was expected and what came."""
        leaves, _ = tree.flatten((args, kwargs))
        found = [_name(leaf.where) for leaf in leaves]
        expected = [where for where, _ in self.leaves]
        if found != expected:
            raise BatchError(f"expected a batch of {', '.join(expected) or 'nothing'}; got {', '.join(found) or 'nothing'}")
        for (where, wanted), leaf in zip(self.leaves, leaves, strict=True):
            _check(where, wanted, leaf.value)
        return [leaf.value for leaf in leaves]


@dataclass(frozen=True)
class _TensorLook:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def __str__(self) -> str:
        return describe(self.shape, self.stride, self.dtype, self.device)


def _look(item: Any, device: torch.device) -> Any:
    if not isinstance(item, torch.Tensor):
        return item
    return _TensorLook(tuple(item.shape), item.stride(), item.dtype, device if item.device.type == "meta" else item.device)


def _check(where: str, wanted: Any, got: Any) -> None:
    if not isinstance(wanted, _TensorLook):
        if isinstance(got, torch.Tensor) or type(got) is not type(wanted) or not _equal(got, wanted):
            raise BatchError(
                f"batch {where}: the step was captured with {wanted!r}, got {got!r}; values that are not tensors are fixed at capture"
            )
        return
    if not isinstance(got, torch.Tensor):
        raise BatchError(f"batch {where}: expected {wanted}, got a {type(got).__name__}")
    look = _TensorLook(tuple(got.shape), got.stride(), got.dtype, got.device)
    if look != wanted:
        raise BatchError(f"batch {where}: expected {wanted}, got {look}{_advice(look, wanted)}")


def _equal(one: Any, two: Any) -> bool:
    """Whether two values are one; arrays compare element by element."""
    return one is two or bool(np.array_equal(one, two) if isinstance(one, np.ndarray) else one == two)


def _advice(look: _TensorLook, wanted: _TensorLook) -> str:
    """What helps against the usual differences."""
    if look.device != wanted.device:
        return f"; move it with .to({str(wanted.device)!r})"
    if look.dtype != wanted.dtype:
        return f"; convert it with .to({wanted.dtype})"
    if look.shape == wanted.shape:
        return "; copy it with .contiguous()" if wanted.stride == torch.empty(wanted.shape, device="meta").stride() else ""
    if look.shape[1:] == wanted.shape[1:]:
        return "; a loader with drop_last=True gives batches of one size"
    return ""


def _name(where: str) -> str:
    """ "[0][1]['x']" is the path within (args, kwargs): argument 1, its item 'x'. "[1]['x']" is the keyword argument x."""
    return where.removeprefix("[0]") if where.startswith("[0]") else where.removeprefix("[1]")
