"""Collectives that work from one tensor into another: begun and ended. Meanwhile they read the first, which nobody may write or let go."""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives

from lowtide.kernels.library import LIBRARY, define
from lowtide.kernels.parts import RANK_OF

_COLLECTIVES = torch.ops._c10d_functional


def all_gather(sent: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """[ranks * n] begins to gather what each rank of a group has sent, n elements each.

    On a CPU every rank broadcasts its part into its place of the whole. gloo's own gather fills a second block as large, and copies that;
    and two `all_gather_into_tensor` at a time have corrupted the heap (torch 2.13: once in some 20,000).
    """
    if sent.device.type != "cpu":
        begun: torch.Tensor = _COLLECTIVES.all_gather_into_tensor(sent, ranks, group)
        return begun
    whole = sent.new_empty(ranks * sent.numel())
    places = whole.view(ranks, -1).unbind()
    places[RANK_OF[group]].copy_(sent)
    for rank, place in enumerate(places):
        _COLLECTIVES.broadcast_(place, rank, group)
    return whole


def _all_gather(sent: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    return sent.new_empty(ranks * sent.numel())


def load_parts(sent: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """The same, begun and ended."""
    return wait_for(all_gather(sent, ranks, group), sent)


def wait_for(begun: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
    """What was begun, once it is whole: the same memory. `sent` is what it was made of."""
    whole: torch.Tensor = _COLLECTIVES.wait_tensor(begun)
    return whole


def _wait_for(begun: torch.Tensor, sent: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(begun)


define("all_gather(Tensor sent, int ranks, str group) -> Tensor", all_gather)
define("load_parts(Tensor sent, int ranks, str group) -> Tensor", load_parts)
define("wait_for(Tensor begun, Tensor sent) -> Tensor", wait_for)
torch.library.register_fake("lowtide::all_gather", _all_gather, lib=LIBRARY)
torch.library.register_fake("lowtide::load_parts", _all_gather, lib=LIBRARY)
torch.library.register_fake("lowtide::wait_for", _wait_for, lib=LIBRARY)
