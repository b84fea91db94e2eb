"""Collectives that work from one tensor into another: begun and ended. Meanwhile they read the first, which nobody may write or let go."""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives
from torch._C._distributed_c10d import _register_work, _resolve_process_group

from lowtide.kernels.library import LIBRARY, define

_COLLECTIVES = torch.ops._c10d_functional
_TAG = 16_909  # of messages between ranks: those of one tag come in the order in which they were sent


def all_gather(sent: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """[ranks * n] begins to gather what each rank of a group has sent, n elements each.

    On a CPU every rank sends its part to each other one, straight into its place of the whole there. gloo's own gather fills a second block
    as large, and copies that; two `all_gather_into_tensor` at a time have corrupted the heap (torch 2.13: once in some 20,000); and each
    of its collectives is carried out by a thread that has to be woken, which a message is not: a step has dozens of gathers.
    """
    if sent.device.type != "cpu":
        begun: torch.Tensor = _COLLECTIVES.all_gather_into_tensor(sent, ranks, group)
        return begun
    whole = sent.new_empty(ranks * sent.numel())
    places, peers = whole.view(ranks, -1).unbind(), _resolve_process_group(group)  # type: ignore[arg-type]
    rank = peers.rank()
    for distance in range(1, ranks):
        source = (rank - distance) % ranks
        _register_work(whole, peers.recv([places[source]], source, _TAG))
    for distance in range(1, ranks):
        _register_work(whole, peers.send([sent], (rank + distance) % ranks, _TAG))
    places[rank].copy_(sent)
    return whole


def _all_gather(sent: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    return sent.new_empty(ranks * sent.numel())


def load_parts(sent: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
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
