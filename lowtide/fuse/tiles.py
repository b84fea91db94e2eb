"""Register tiles: how many rows by how many vectors a product keeps in registers, from a count of instructions."""

from __future__ import annotations

from typing import NamedTuple

from lowtide.ir.packed import Target

_FEWEST = 5  # accumulators that keep the multipliers busy: their latency


class Tile(NamedTuple):
    """Rows by vectors."""

    rows: int
    vectors: int


def tile_of(rows: int, columns: int, target: Target) -> Tile:
    """The tile that takes the fewest cycles for a product of so many rows and columns."""
    return min((_cost(tile, rows, columns, target), -tile.vectors, tile) for tile in _tiles(rows, target))[2]


def rows_beside(rows: int, columns: int, vectors: int, target: Target) -> Tile:
    """The best tile of so many vectors, for a product of few rows whose weight is packed already."""
    return min((_cost(tile, rows, columns, target), tile) for tile in _tiles(rows, target) if tile.vectors == vectors)[1]


def _tiles(rows: int, target: Target) -> list[Tile]:
    most = min(16, rows)
    found = [Tile(mr, nv) for nv in range(1, 7) for mr in range(1, most + 1) if mr * nv + nv + 1 <= target.registers]
    return found or [Tile(1, 1)]


def _cost(tile: Tile, rows: int, columns: int, target: Target) -> float:
    """Cycles for each step of the sum."""
    vectors = target.whole(columns)
    panels = [tile.vectors] * (vectors // tile.vectors) + ([vectors % tile.vectors] if vectors % tile.vectors else [])
    if target.half(columns):
        if not panels or len(panels) > vectors // tile.vectors:
            panels[-1:] = [(panels[-1] if panels else 0) + 1]
        else:
            panels[-1] += 1
            if panels[-1] * (tile.rows + 1) + 1 > target.registers:
                return 1e18  # the half vector beside a full panel has no room
    parts = [tile.rows] * (rows // tile.rows) + ([rows % tile.rows] if rows % tile.rows else [])
    counted = {part: parts.count(part) for part in set(parts)}
    return sum(times * sum(max(part * each, _FEWEST, each + part / 2) + 0.3 for each in panels) for part, times in counted.items())
