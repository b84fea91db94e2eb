"""Products whose sizes are symbolic: up to torch 2.11 ATen decides in C++, of numbers alone, whether they are one of matrices.

torch's own account of that decision in Python takes sizes as they are.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload

from lowtide.capture.formulas.dispatch import formula


@formula(torch.ops.aten.matmul.default)
def _matmul(op: OpOverload, one: Tensor, other: Tensor) -> Tensor:
    fewer, more = sorted((one.dim(), other.dim()))
    if fewer > 2 or more < 3 or not any(isinstance(extent, torch.SymInt) for extent in (*one.shape, *other.shape)):
        return op(one, other)  # type: ignore[no-any-return]
    with enable_python_dispatcher():
        return op(one, other)  # type: ignore[no-any-return]
