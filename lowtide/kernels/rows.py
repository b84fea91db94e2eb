"""Rows added to those of a table by number, where a part of the table may be all that is at hand."""

from __future__ import annotations

import torch

from lowtide.kernels.library import LIBRARY, define

_SCHEMA = "(Tensor{} table, Tensor numbers, Tensor index, Tensor rows) -> Tensor{}"


def add_rows(table: torch.Tensor, numbers: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """[n, width] the table with each of `rows` [k, width] added where `index` [k] says.

    `numbers` [n] are those of the table's rows, one after another. What belongs to none of them is left out.
    """
    return table.index_add(0, *_at_hand(numbers, index, rows))


def add_rows_(table: torch.Tensor, numbers: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    """The same in the place of `table`."""
    return table.index_add_(0, *_at_hand(numbers, index, rows))


def _at_hand(numbers: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Where in the table to add what. Elsewhere than on a CPU nothing waits to know how many that are: what is left out adds zeros."""
    place = index - numbers[:1]
    there = (place >= 0) & (place < len(numbers))
    if place.device.type == "cpu":
        return place[there], rows[there]
    return place.clamp(0, len(numbers) - 1), torch.where(there.unsqueeze(1), rows, 0)


def _like_table(table: torch.Tensor, numbers: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return torch.empty_like(table)


def _table(table: torch.Tensor, numbers: torch.Tensor, index: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    return table


define(f"add_rows{_SCHEMA.format('', '')}", add_rows)
define(f"add_rows_{_SCHEMA.format('(a!)', '(a!)')}", add_rows_)
torch.library.register_fake("lowtide::add_rows", _like_table, lib=LIBRARY)
torch.library.register_fake("lowtide::add_rows_", _table, lib=LIBRARY)
