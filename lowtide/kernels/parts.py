"""The part of a tensor that this process keeps, of as many as there are processes: one operator on all ranks, each gets its own."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from lowtide.kernels.library import LIBRARY, define


@dataclass(frozen=True)
class WholeLayout:
    """How a tensor lies where it is whole, of which each process of a group keeps a part."""

    shape: torch.Size
    stride: tuple[int, ...]
    group: str  # its name


RANK_OF: dict[str, int] = {}  # of this process, by the name of the group; in a trial there is none, and the first part stands for all
WHOLE_OF: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # by parameter that is a part now: the Whole that it is of


def own_part(whole: torch.Tensor, parts: int, group: str) -> torch.Tensor:
    """[ceil(n / parts)] the elements of this rank, counted as they are indexed; behind the last one, zeros."""
    count = -(-whole.numel() // parts)
    begin = RANK_OF.get(group, 0) * count
    mine = whole.new_zeros(count) if whole.numel() % parts else whole.new_empty(count)
    found = whole.reshape(-1)[begin : begin + count]
    mine[: len(found)] = found
    return mine


def _own_part(whole: torch.Tensor, parts: int, group: str) -> torch.Tensor:
    return whole.new_empty((whole.numel() + parts - 1) // parts)


def sum_parts(parts: torch.Tensor, ranks: int) -> torch.Tensor:
    """[n] the sum of parts that lie one behind the other, n elements each: the first two, and each further one added to that."""
    first, *others = parts.view(ranks, -1).unbind()
    if not others:
        return first.clone()
    total = first + others[0]
    for part in others[1:]:
        total += part
    return total


def _sum_parts(parts: torch.Tensor, ranks: int) -> torch.Tensor:
    return parts.new_empty(parts.numel() // ranks)


define("own_part(Tensor whole, int parts, str group) -> Tensor", own_part)
define("sum_parts(Tensor parts, int ranks) -> Tensor", sum_parts)
torch.library.register_fake("lowtide::own_part", _own_part, lib=LIBRARY)
torch.library.register_fake("lowtide::sum_parts", _sum_parts, lib=LIBRARY)
