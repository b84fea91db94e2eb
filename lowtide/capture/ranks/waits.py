"""The end of a collective that works from one tensor into another: until then it reads the first, which nobody may write or let go."""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives

from lowtide.kernels.library import LIBRARY, define


def wait_for(begun: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
    """What was begun, once it is whole: the same memory. `sent` is what it was made of."""
    whole: torch.Tensor = torch.ops._c10d_functional.wait_tensor(begun)
    return whole


def _wait_for(begun: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(begun)


define("wait_for(Tensor begun, Tensor sent) -> Tensor", wait_for)
torch.library.register_fake("lowtide::wait_for", _wait_for, lib=LIBRARY)
