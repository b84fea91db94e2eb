"""Resizing pictures whose sizes are symbolic: ATen computes the size of the result in C++, of numbers alone.

Eager's own operator is called with the size that ATen would have computed. A factor that is no whole number rounds down what it gives,
which has no form among sizes: there ATen is asked, and says that the dimension is fixed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from lowtide.capture.formulas.dispatch import formula

_ATEN = torch.ops.aten
_NEAREST = [getattr(_ATEN, f"{stem}{dims}d").vec for stem in ("upsample_nearest", "_upsample_nearest_exact") for dims in (1, 2, 3)]
_SMOOTH = [
    getattr(_ATEN, name).vec
    for name in (
        "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
        "upsample_trilinear3d",
    )
]  # fmt: skip


@formula(*_NEAREST)
def _nearest(op: OpOverload, given: Tensor, size: Sequence[Any] | None, factors: Sequence[float] | None) -> Tensor:
    return _resized(op, given, size, factors, (), (size, factors))


@formula(*_SMOOTH)
def _smooth(op: OpOverload, given: Tensor, size: Sequence[Any] | None, align_corners: bool, factors: Sequence[float] | None) -> Tensor:
    return _resized(op, given, size, factors, (align_corners,), (size, align_corners, factors))


def _resized(
    op: OpOverload, given: Tensor, size: Sequence[Any] | None, factors: Sequence[float] | None, settings: tuple[Any, ...], asked: Any
) -> Tensor:
    """`settings` stand between size and factors; `asked` are the arguments of the call itself."""
    extents = given.shape[2:] if size is None else size
    whole = size is not None or all(float(factor).is_integer() for factor in factors or ())
    if not any(isinstance(extent, torch.SymInt) for extent in extents) or not whole:
        return op(given, *asked)  # type: ignore[no-any-return]
    result = size if size is not None else [extent * int(factor) for extent, factor in zip(extents, factors or (), strict=True)]
    plain = op._overloadpacket.default
    scales: Sequence[float | None] = factors or [None] * len(extents)
    return plain(given, result, *settings, *scales)  # type: ignore[no-any-return]
