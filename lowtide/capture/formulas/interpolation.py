"""Resizing pictures whose sizes are symbolic: ATen computes the size of the result in C++, of numbers alone.

Eager's own operator is called with the size that ATen would have computed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

from lowtide.capture.formulas.dispatch import formula
from lowtide.capture.sizes.symbols import multiplied

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
    if not any(isinstance(extent, torch.SymInt) for extent in (*given.shape, *(size or ()))):
        return op(given, *asked)  # type: ignore[no-any-return]
    pairs = zip(given.shape[2:], factors or (), strict=True)
    result = size if size is not None else [multiplied(extent, float(factor)) for extent, factor in pairs]
    plain = op._overloadpacket.default
    scales: Sequence[float | None] = factors or [None] * len(result)
    return plain(given, result, *settings, *scales)  # type: ignore[no-any-return]
