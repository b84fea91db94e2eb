"""Products of many matrices: ATen decides in C++ as which product of matrices it computes them.

It spreads one matrix over the many where that one has no gradient, and folds the many into one where it has; under a dispatch mode it
folds always. And up to torch 2.11 it decides of numbers alone, so that symbolic sizes get torch's own account of the decision in Python.
That ends a product of many by many in another kind of view than ATen does: such a product stands here, but under autocast, which
casts before ATen decides.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload

from lowtide.capture.formulas.dispatch import formula

_ATEN = torch.ops.aten


@formula(_ATEN.matmul.default)
def _matmul(op: OpOverload, one: Tensor, other: Tensor) -> Tensor:
    if one.dim() == other.dim() == 3 and (single := _single(one, other)) is not None and not _has_gradient(single):
        return _spread(one, other, single)
    if max(one.dim(), other.dim()) < 3 or not any(isinstance(extent, torch.SymInt) for extent in (*one.shape, *other.shape)):
        return op(one, other)  # type: ignore[no-any-return]
    if one.shape[:-2] == other.shape[:-2] and one.dim() > 2 and not torch.is_autocast_enabled(one.device.type):
        return _many_by_many(one, other)
    with enable_python_dispatcher():
        return op(one, other)  # type: ignore[no-any-return]


def _single(one: Tensor, other: Tensor) -> Tensor | None:
    """Of the two the one that stands alone before many."""
    singles = [each for each in (one, other) if isinstance(each.shape[0], int) and each.shape[0] == 1]
    return singles[0] if len(singles) == 1 else None


def _has_gradient(single: Tensor) -> bool:
    """Whether ATen finds that it requires one, which looks at what autocast made of it."""
    return single.requires_grad and (torch.is_grad_enabled() or _cast(single) is None)


def _cast(single: Tensor) -> torch.dtype | None:
    """What autocast makes of it; None where it leaves it."""
    kind, listed = single.device.type, single.is_floating_point() and single.dtype is not torch.float64
    cast = torch.get_autocast_dtype(kind) if listed and torch.is_autocast_enabled(kind) else single.dtype
    return None if cast is single.dtype else cast


def _spread(one: Tensor, other: Tensor, single: Tensor) -> Tensor:
    """The one matrix as many views of it. Autocast casts before ATen spreads; what has a gradient it casts in `bmm`, as ever."""
    count = (other if single is one else one).shape[0]
    if (cast := _cast(single)) is not None:
        one, other = (each.to(cast) if each is single else each for each in (one, other))
    left, right = (each.expand(count, *each.shape[1:]).reshape(count, *each.shape[1:]) for each in (one, other))
    result: Tensor = _ATEN._unsafe_view.default(left.bmm(right), (count, one.shape[1], other.shape[2]))
    return result


def _many_by_many(one: Tensor, other: Tensor) -> Tensor:
    batch = one.shape[:-2]
    left, right = (each.expand(each.shape).reshape(math.prod(batch), *each.shape[-2:]) for each in (one, other))
    result: Tensor = _ATEN._unsafe_view.default(left.bmm(right), (*batch, one.shape[-2], other.shape[-1]))
    return result
