"""Parts of tensors that lie on several processes: the part that this process keeps, and rows added to a part of a table.

The first is one operator on all ranks: each gets its own part, of as many as there are processes.
"""

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
    part = whole.reshape(-1)[begin : begin + count]
    mine[: len(part)] = part
    return mine


def sum_parts(parts: torch.Tensor, ranks: int) -> torch.Tensor:
    """[n] the sum of parts that lie one behind the other, n elements each: the first two, and each further one added to that."""
    first, *others = parts.view(ranks, -1).unbind()
    if not others:
        return first.clone()
    total = first + others[0]
    for part in others[1:]:
        total += part
    return total


define("own_part(Tensor whole, int parts, str group) -> Tensor", own_part)
define("sum_parts(Tensor parts, int ranks) -> Tensor", sum_parts)
torch.library.register_fake(
    "lowtide::own_part", lambda whole, parts, group: whole.new_empty((whole.numel() + parts - 1) // parts), lib=LIBRARY
)
torch.library.register_fake("lowtide::sum_parts", lambda parts, ranks: parts.new_empty(parts.numel() // ranks), lib=LIBRARY)


_SCHEMA = "(Tensor{} table, Tensor numbers, Tensor index, Tensor rows) -> Tensor{}"


def add_rows(table: torch.Tensor, numbers: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[n, width] the table with each of `rows` [k, width] added where `index` [k] says.

    `numbers` [n] are those of the table's rows, one after another. What belongs to none of them is left out.
    """
    return table.index_add(0, *_at_hand(numbers, index, rows))


def add_rows_(table: torch.Tensor, numbers: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return table.index_add_(0, *_at_hand(numbers, index, rows))


def _at_hand(numbers: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where in the table to add what. Elsewhere than on a CPU nothing waits to know how many that are: what is left out adds zeros."""
    place = index - numbers[:1]
    there = (place >= 0) & (place < len(numbers))
    if place.device.type == "cpu":
        return place[there], rows[there]
    return place.clamp(0, len(numbers) - 1), torch.where(there.unsqueeze(1), rows, 0)


def _table(table: torch.Tensor, numbers: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return table


define(f"add_rows{_SCHEMA.format('', '')}", add_rows)
define(f"add_rows_{_SCHEMA.format('(a!)', '(a!)')}", add_rows_)
torch.library.register_fake("lowtide::add_rows", lambda table, numbers, index, rows: torch.empty_like(table), lib=LIBRARY)
torch.library.register_fake("lowtide::add_rows_", _table, lib=LIBRARY)
