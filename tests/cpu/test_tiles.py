"""Tiles of products and transforms: they fit the registers, panels cover the columns, and one question has one answer."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from lowtide.cpu import tiles
from lowtide.cpu.recipes import Target

TARGETS = st.builds(Target, st.sampled_from([4, 8, 16]), st.sampled_from([16, 32]), st.sampled_from([1, 2, 8]))
ROWS, COLUMNS = st.integers(1, 3000), st.integers(1, 3000)
AVX2, AVX512 = Target(8, 16), Target(16, 32)


def fits(tile: tiles.Tile, target: Target) -> bool:
    """Accumulators, a vector of weights for each of a row's, and a number of the input."""
    return tile.rows * tile.vectors + tile.vectors + 1 <= target.registers


@settings(max_examples=150, deadline=None)
@given(ROWS, COLUMNS, TARGETS, st.booleans(), st.booleans())
def test_a_tile_fits_registers_and_its_panels_cover_all_columns(rows, columns, target, panels, once):
    tile = tiles.tile_of(rows, columns, target, panels, once)
    assert 1 <= tile.rows <= rows
    assert tile.vectors >= 1
    assert fits(tile, target)
    widths = tiles._widths(tile, columns, target)
    assert sum(widths) == target.whole(columns) + target.half(columns)
    assert all(fits(tiles.Tile(tile.rows, each), target) for each in widths)
    assert sum(widths) * target.lanes >= target.width(columns) >= columns


@settings(max_examples=60, deadline=None)
@given(ROWS, COLUMNS, TARGETS, st.booleans(), st.booleans())
def test_one_question_has_one_answer(rows, columns, target, panels, once):
    """Whatever was asked before, and of an equal target that is another object."""
    found = tiles.tile_of(rows, columns, target, panels, once)
    tiles.tile_of.cache_clear(), tiles._step.cache_clear()
    tiles.tile_of(rows + 1, columns, target, not panels, once)
    assert tiles.tile_of(rows, columns, replace(target), panels, once) == found


@settings(max_examples=60, deadline=None)
@given(ROWS, COLUMNS, TARGETS)
def test_no_other_tile_takes_fewer_cycles(rows, columns, target):
    alone = replace(target, threads=1)
    found = tiles.tile_of(rows, columns, alone)
    others = [tiles._cost(tile, rows, columns, alone) for tile in tiles._tiles(rows, alone)]
    assert tiles._cost(found, rows, columns, alone) <= min(others) + 1e-6


@settings(max_examples=60, deadline=None)
@given(ROWS, COLUMNS, TARGETS)
def test_rows_beside_a_packed_weight_keep_its_vectors(rows, columns, target):
    packed = tiles.tile_of(3000, columns, target)
    few = tiles.rows_beside(rows, columns, packed.vectors, target)
    assert few.vectors == packed.vectors
    assert few.rows <= rows
    assert fits(few, target)


CONVOLUTIONS = (st.integers(1, 4), st.tuples(st.integers(1, 80), st.integers(1, 80)), st.integers(1, 600), st.integers(1, 600))


@settings(max_examples=100, deadline=None)
@given(*CONVOLUTIONS, TARGETS)
def test_blocks_of_transformed_tiles_cover_the_picture_and_stay_near(images, side, inner, columns, target):
    made = tiles.transform_of(images, side, inner, columns, target)
    if made is None:
        return
    count = images * -(-side[0] // made.side) * -(-side[1] // made.side)
    blocks = -(-count // made.block)
    assert made.side in (2, 4)
    assert 1 <= made.block <= count
    assert (blocks - 1) * made.block < count <= blocks * made.block
    assert fits(made.tile, target)
    assert made.tile.rows <= made.block
    wide = max(-(-inner // target.lanes) * target.lanes, tiles._MADE_VECTORS * target.lanes)
    block_bytes = 4 * (made.side + 2) ** 2 * wide * made.block
    assert made.block <= 4 or block_bytes <= tiles._TILES_BYTES
    assert not made.by_panels or target.threads > 1


def test_a_transform_is_found_where_it_is_known_to_help_and_not_where_there_is_hardly_anything():
    assert tiles.transform_of(1, (56, 56), 64, 64, AVX512) is not None
    assert tiles.transform_of(1, (1, 1), 64, 64, AVX512) is None
    assert tiles.transform_of(1, (56, 56), 1, 1, AVX512) is None


@pytest.mark.parametrize("target", [AVX2, AVX512])
def test_threads_share_what_is_moved_least(target):
    """Rows of a tall product, whose weights are few; columns of a flat one; nothing where there is one thread."""
    two = replace(target, threads=2)
    assert not tiles.by_panels(10_000, 64, 64, two)
    assert tiles.by_panels(1, 1024, 4096, two)
    assert not tiles.by_panels(1, 1024, 4096, target)
    assert not tiles.by_columns(4 * 9 * 16 * 16)
    assert tiles.by_columns(4 * 9 * 512 * 512)


def test_large_products_use_most_registers():
    """What multiplies keeps busy: at least 8 accumulators, the latency of a multiplier."""
    for target in (AVX2, AVX512):
        tile = tiles.tile_of(4096, 4096, target)
        assert tile.rows * tile.vectors >= target.registers // 2
        assert tile.rows * tile.vectors >= tiles._FEWEST
