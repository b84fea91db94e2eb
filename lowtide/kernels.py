"""Operators of lowtide's own: what eager computes with shapes that depend on data, as one operator whose results have fixed shapes.

Whoever resolves the names of operators imports this module, so that torch knows `lowtide::...`.
"""

from __future__ import annotations

import torch

_LIBRARY = torch.library.Library("lowtide", "DEF")
_LIBRARY.define("masked_sum(Tensor values, Tensor mask) -> Tensor")
_LIBRARY.define("divided(Tensor self, Tensor other) -> Tensor")


@torch.library.impl("lowtide::masked_sum", "CompositeExplicitAutograd", lib=_LIBRARY)
def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The sum of the values where a mask holds, added up in the order in which eager adds what it has selected."""
    return values.masked_select(mask).sum()


@torch.library.register_fake("lowtide::masked_sum", lib=_LIBRARY)
def _masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    exact = values.dtype.is_floating_point or values.dtype.is_complex
    return values.new_empty((), dtype=None if exact else torch.int64)


@torch.library.impl("lowtide::divided", "CompositeExplicitAutograd", lib=_LIBRARY)
def divided(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """What `self.div_(other)` leaves in `self`: a complex division rounds otherwise in place, as its loop cannot be vectorised there."""
    return self.clone().div_(other)


@torch.library.register_fake("lowtide::divided", lib=_LIBRARY)
def _divided(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return self.clone()
