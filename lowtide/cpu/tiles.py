"""Register tiles: how many rows by how many vectors a product keeps in registers, from a count of instructions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

from lowtide.cpu.recipes import Target

_LESS = 0.85  # what a way that keeps more weights must take of the best that keeps less: plain, two results along a side, four
_TILES_BYTES = 192 * 1024  # of tiles at all points, that stay near while all panels pass them
_MADE_VECTORS = 4  # of a panel of products
_TRANSFORM_CYCLES = 4.0  # for a vector of a point, on the way there and back
_FIRST_RATE = 4.5  # bytes a cycle of weights that nobody has read since the last run
_NEAR_BYTES, _NEAR_RATE, _FAR_RATE = 512 * 1024, 64.0, 10.0  # of weights read again: those that a core's own cache holds, and others
_COLUMNS_BYTES = 256 * 1024  # of a convolution's weights, beyond which threads share columns
_UNEVEN = 0.12  # how much it counts that one of two threads waits for the other
_FROM_ANOTHER = 2.0  # what a byte takes that another core has written, over one from the cache that all share; 1 to 4.5 by where cores lie
_SEEN = 0.25  # of the time to come, behind products
_FEWEST = 8  # accumulators that keep the multipliers busy: their latency
_REMEMBERED = 4096  # answers: layers of one shape are many, and networks made again


class Tile(NamedTuple):
    rows: int
    vectors: int


def by_panels(rows: int, inner: int, columns: int, target: Target) -> bool:
    """Whether threads share the columns of a product, as its weights are what is moved most; else they share rows.

    Where they share columns, each reads what the other has made; where they share rows, both read all weights, which nobody has written.
    """
    if target.threads == 1:
        return False
    return target.width(columns) * (inner + 1) > _FROM_ANOTHER * (inner + columns) * rows


@lru_cache(_REMEMBERED)
def tile_of(rows: int, columns: int, target: Target, panels: bool = False, once: bool = False) -> Tile:
    """The tile that takes the fewest cycles for a product of so many rows and columns, where threads share rows, or panels.

    `once` where these are all rows: then weights come from afar for the first tile of rows.
    """
    far = _far(target) if once else 0.0
    return min((round(_shared(tile, rows, columns, target, panels, far), 6), -tile.vectors, tile) for tile in _tiles(rows, target))[2]


@lru_cache(_REMEMBERED)
def rows_beside(rows: int, columns: int, vectors: int, target: Target, once: bool = False) -> Tile:
    """The best tile of so many vectors, for a product of few rows whose weight is packed already."""
    far = _far(target) if once else 0.0
    return min((_cost(tile, rows, columns, target, far), tile) for tile in _tiles(rows, target) if tile.vectors == vectors)[1]


def _far(target: Target) -> float:
    """Cycles until a vector has come that nobody has read since the last run."""
    return 4 * target.lanes / _FIRST_RATE


class Transform(NamedTuple):
    """How a convolution of 3 x 3 is done on tiles: results along a side of one, tiles at a time, the register tile of their products."""

    side: int
    block: int
    tile: Tile
    by_panels: bool = False  # what threads share; else tiles


def by_columns(packed_bytes: int) -> bool:
    """Whether threads share the columns of a convolution: panels are passed once, and rows again and again."""
    return packed_bytes > _COLUMNS_BYTES


@lru_cache(_REMEMBERED)
def transform_of(images: int, side: tuple[int, int], inner: int, columns: int, target: Target) -> Transform | None:
    """The best transform for so many rows and columns, from `inner` channels to `columns`; None where products alone are about as fast."""
    plain, weights = tile_of(side[1], columns, target), 36 * inner * target.width(columns)
    cycles = 9 * inner * images * side[0] * _cost(plain, side[1], columns, target) / target.threads
    cycles += weights / (target.threads if by_columns(weights) else 1) / _FIRST_RATE
    best: tuple[float, Transform | None] = cycles, None
    for tile_side in (2, 4):
        count = images * -(-side[0] // tile_side) * -(-side[1] // tile_side)
        row = 4 * (tile_side + 2) ** 2 * max(-(-inner // target.lanes) * target.lanes, _MADE_VECTORS * target.lanes)
        blocks = -(-count // max(4, _TILES_BYTES // row))
        ways = _ways(tile_side, count, blocks, columns, target)
        cycles, transform = min(
            ((_transform_cycles(option, count, (inner, columns), target), option) for option in ways), key=lambda each: each[0]
        )
        if cycles <= _LESS * best[0]:
            best = cycles, transform
    return best[1]


def _ways(side: int, count: int, blocks: int, columns: int, target: Target) -> list[Transform]:
    """Threads share tiles, as many blocks each; or panels."""
    threads = target.threads
    shared = min(count, -(-blocks // threads) * threads)
    block = -(-count // shared)
    transforms = [Transform(side, block, tile_of(block, columns, replace(target, threads=1)))]
    if threads > 1:
        block = -(-count // blocks)
        transforms.append(Transform(side, block, tile_of(block, columns, target, panels=True), by_panels=True))
    return transforms


def _transform_cycles(transform: Transform, count: int, channels: tuple[int, int], target: Target) -> float:
    """What a thread takes: cycles of products, of transforms, and of weights that come from afar for each block."""
    (inner, columns), points = channels, (transform.side + 2) ** 2
    blocks, share = -(-count // transform.block), 1.0
    if transform.by_panels:
        share = _largest_share(_widths(transform.tile, columns, target), target.threads)
    else:
        blocks = -(-blocks // target.threads)
    products = blocks * points * inner * _cost(transform.tile, transform.block, columns, target) * share
    transforms = _TRANSFORM_CYCLES * blocks * transform.block * points * (-(-inner // target.lanes) + share * -(-columns // target.lanes))
    weights = 4 * points * inner * target.width(columns) * share
    again = (blocks - 1) * weights / (_NEAR_RATE if weights <= _NEAR_BYTES else _FAR_RATE)
    return products + transforms + weights / _FIRST_RATE + again


def _largest_share(widths: Sequence[int], threads: int) -> float:
    """Of panels of these widths, the part of the thread that has most."""
    borders = [len(widths) * at // threads for at in range(threads + 1)]
    return max(sum(widths[begin:end]) for begin, end in pairwise(borders)) / max(1, sum(widths))


def _tiles(rows: int, target: Target) -> list[Tile]:
    most, room = min(16, rows), target.registers - target.registers // 16  # compilers need one or two
    tiles = [Tile(mr, nv) for nv in range(1, 7) for mr in range(1, most + 1) if mr * nv + nv + 1 <= room]
    return tiles or [Tile(1, 1)]


def _cost(tile: Tile, rows: int, columns: int, target: Target, far: float = 0.0) -> float:
    """Cycles for each step of the sum."""
    widths = _widths(tile, columns, target)
    return _time(tile, rows, widths, far) if widths else 1e18


def _shared(tile: Tile, rows: int, columns: int, target: Target, panels: bool, far: float) -> float:
    """The same, and somewhat what the larger half takes longer than the other, where two threads share it."""
    widths = _widths(tile, columns, target)
    if not widths:
        return 1e18
    if target.threads == 1:
        return _time(tile, rows, widths, far)
    first, half = -(-rows // tile.rows) // 2 * tile.rows, len(widths) // 2
    by_rows = _time(tile, first, widths, far), _time(tile, rows - first, widths, far)
    one, two = (_time(tile, rows, widths[:half], far), _time(tile, rows, widths[half:], far)) if panels else by_rows
    return one + two + _UNEVEN * abs(one - two)


def _time(tile: Tile, rows: int, widths: Sequence[int], far: float = 0.0) -> float:
    """Tiles of rows pass the panels one after the other; the first waits for what comes from afar."""
    whole, rest = divmod(rows, tile.rows)
    passes = whole * sum(_step(tile.rows, each) for each in widths) + (sum(_step(rest, each) for each in widths) if rest else 0.0)
    return passes + sum(_waits(_step(min(rows, tile.rows), each), each * far) for each in widths)


def _waits(busy: float, coming: float) -> float:
    """What a step takes beyond its products where a vector of weights comes meanwhile: not all of that is hidden."""
    return max(0.0, coming - busy) + _SEEN * min(busy, coming)


def _widths(tile: Tile, columns: int, target: Target) -> list[int]:
    """The vectors of each panel; none where the half vector beside a full panel has no room."""
    vectors = target.whole(columns)
    panels = [tile.vectors] * (vectors // tile.vectors) + ([vectors % tile.vectors] if vectors % tile.vectors else [])
    if target.half(columns):
        if not panels or len(panels) > vectors // tile.vectors:
            panels[-1:] = [(panels[-1] if panels else 0) + 1]
        else:
            panels[-1] += 1
            if panels[-1] * (tile.rows + 1) + 1 > target.registers:
                return []
    return panels


@lru_cache(_REMEMBERED)
def _step(rows: int, vectors: int) -> float:
    """What one step of a sum takes: multiplications, or loads where these are more; few rows wait for weights from the second cache."""
    busy = max(rows * vectors, _FEWEST, vectors + rows / 2)
    return busy + 0.1 * (rows + vectors) + 0.6 * vectors * max(0, 5 - rows)
