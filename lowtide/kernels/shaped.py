"""What eager computes with shapes that depend on data, as one operator whose results have fixed shapes; and what rounds as in place."""

from __future__ import annotations

import torch

from lowtide.kernels.library import LIBRARY, define


def masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """The sum of the values where a mask holds, added up in the order in which eager adds what it has selected."""
    return values.masked_select(mask).sum()


def _masked_sum(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    exact = values.dtype.is_floating_point or values.dtype.is_complex
    return values.new_empty((), dtype=None if exact else torch.int64)


def divided(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """What `self.div_(other)` leaves in `self`: a complex division rounds otherwise in place, as its loop cannot be vectorised there."""
    return self.clone().div_(other)


def _divided(self: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    return self.clone()


define("masked_sum(Tensor values, Tensor mask) -> Tensor", masked_sum)
define("divided(Tensor self, Tensor other) -> Tensor", divided)
torch.library.register_fake("lowtide::masked_sum", _masked_sum, lib=LIBRARY)
torch.library.register_fake("lowtide::divided", _divided, lib=LIBRARY)
