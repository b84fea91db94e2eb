"""Sums of which each rank keeps its part: `reduce_scatter`, and over gloo an exchange of parts that their keepers add.

gloo has no `reduce_scatter` of its own: PyTorch sums all on every rank, in a copy, and cuts the part out, which moves each byte twice. An
exchange moves it once. Terms are added in the order of ranks, one by one: of two there is one order, so that sums are
DistributedDataParallel's; of more, it is an order among several.
"""

from __future__ import annotations

import torch
import torch.distributed._functional_collectives

import lowtide.capture.ranks.waits
import lowtide.kernels  # noqa: F401  (defines the operators of lowtide's own)
from lowtide.capture.ranks.ranks import Ranks
from lowtide.kernels.library import LIBRARY, define

_COLLECTIVES = torch.ops._c10d_functional


def reduced_parts(terms: torch.Tensor, ranks: Ranks) -> torch.Tensor:
    """[n] this rank's part of the sum of what all ranks have, [size * n] each, their parts one behind the other."""
    if terms.device.type != "cpu" or not ranks.over_gloo:
        begun = _COLLECTIVES.reduce_scatter_tensor(terms, "sum", ranks.size, ranks.group)
        part: torch.Tensor = torch.ops.lowtide.wait_for(begun, terms)
        return part
    received = torch.ops.lowtide.wait_for(torch.ops.lowtide.exchange(terms, ranks.size, ranks.group), terms)
    total: torch.Tensor = torch.ops.lowtide.sum_parts(received, ranks.size)
    return total


def exchange(sent: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    """[ranks * n] begins to collect what each rank of a group has for this one: of what it sends, its part of as many."""
    count = sent.numel() // ranks
    begun: torch.Tensor = _COLLECTIVES.all_to_all_single(sent, [count] * ranks, [count] * ranks, group)
    return begun


def _exchange(sent: torch.Tensor, ranks: int, group: str) -> torch.Tensor:
    return torch.empty_like(sent)


define("exchange(Tensor sent, int ranks, str group) -> Tensor", exchange)
torch.library.register_fake("lowtide::exchange", _exchange, lib=LIBRARY)
