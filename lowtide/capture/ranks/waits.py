"""Collectives that work from one tensor into another: begun and ended. Meanwhile they read the first, which nobody may write or let go."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.distributed._functional_collectives
from torch._C._distributed_c10d import _register_work, _resolve_process_group

from lowtide.kernels.library import LIBRARY, define

_COLLECTIVES = torch.ops._c10d_functional
_TAG = 16_909  # of messages between ranks: those of one tag come in the order in which they were sent


def all_gather(sent: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """[ranks * n] begins to gather what each rank of a group has sent, n elements each.

    On a CPU these are messages (`swap`): gloo's own gather fills a second block as large, and copies that; and two `all_gather_into_tensor`
    at a time have corrupted the heap (torch 2.13: once in some 20,000).
    """
    if sent.device.type != "cpu":
        begun: torch.Tensor = _COLLECTIVES.all_gather_into_tensor(sent, ranks, group)
        return begun
    return swap([sent] * ranks, sent.new_empty(ranks * sent.numel()), group)


def swap(parts: Sequence[torch.Tensor], whole: torch.Tensor, group: str) -> torch.Tensor:
    """Begins to send each rank its part, and to collect those for this one in `whole`, which it gives back: one behind the other.

    Each comes straight into its place, by the order in which all ranks call this. A collective of gloo's is carried out by a thread, which
    has to be woken, and holds on to its tensors until it is scheduled again; a message is not.
    """
    peers = _resolve_process_group(group)  # type: ignore[arg-type]
    rank, ranks, places = peers.rank(), len(parts), whole.view(len(parts), -1).unbind()
    for distance in range(1, ranks):
        source = (rank - distance) % ranks
        _register_work(whole, peers.recv([places[source]], source, _TAG))
    for distance in range(1, ranks):
        to = (rank + distance) % ranks
        _register_work(whole, peers.send([parts[to]], to, _TAG))
    places[rank].copy_(parts[rank])
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
