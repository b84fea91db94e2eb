"""Products whose sizes are symbolic: up to torch 2.11 ATen decides in C++, of numbers alone, as which product of matrices it computes them.

torch's own account of that decision in Python takes sizes as they are. It ends a product of many by many in another kind of view than ATen
does, so that one stands here, but under autocast, which casts before ATen decides.
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
    if max(one.dim(), other.dim()) < 3 or not any(isinstance(extent, torch.SymInt) for extent in (*one.shape, *other.shape)):
        return op(one, other)  # type: ignore[no-any-return]
    if one.shape[:-2] == other.shape[:-2] and one.dim() > 2 and not torch.is_autocast_enabled(one.device.type):
        return _many_by_many(one, other)
    with enable_python_dispatcher():
        return op(one, other)  # type: ignore[no-any-return]


def _many_by_many(one: Tensor, other: Tensor) -> Tensor:
    batch = one.shape[:-2]
    left, right = (each.expand(each.shape).reshape(math.prod(batch), *each.shape[-2:]) for each in (one, other))
    result: Tensor = _ATEN._unsafe_view.default(left.bmm(right), (*batch, one.shape[-2], other.shape[-1]))
    return result
