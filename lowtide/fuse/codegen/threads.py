"""What threads share of each stage: rows, or columns; so that each finds near what it has made itself.

What another core has written lately comes from there, at a fraction of the rate of a cache that all share. So a window over an image, which
computes little, goes the way of what made the image.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.fuse.layout import Buffer
from lowtide.fuse.stages import Convolution, Product, Stage, Windows, Winograd
from lowtide.fuse.tiles import by_columns as columns_are_shared
from lowtide.fuse.tiles import by_panels
from lowtide.ir.packed import Target

_FEWEST_ROWS = 4  # that are shared
_SHARED_ROWS = 32  # of an image that nobody here has made


def by_columns(stages: Sequence[Stage], target: Target) -> set[Stage]:
    """The stages of which threads share columns, or channels."""
    found: set[Stage] = set()
    makers: dict[Buffer, Stage] = {}
    for stage in stages:
        if _shares_columns(stage, makers, found, target):
            found.add(stage)
        makers[stage.out.buffer] = stage
    return found


def _shares_columns(stage: Stage, makers: dict[Buffer, Stage], found: set[Stage], target: Target) -> bool:
    if isinstance(stage, Product):
        return by_panels(stage.rows, stage.k, stage.weight.columns, target)
    if isinstance(stage, Convolution):
        return columns_are_shared(stage.weight.elements * 4)
    if isinstance(stage, Winograd):
        return stage.by_panels
    if not isinstance(stage, Windows):
        return False
    images, channels, rows, _ = stage.out.shape
    if target.whole(channels) + target.half(channels) < 2:
        return False
    maker = makers.get(stage.a.buffer)
    if images * rows < _FEWEST_ROWS:
        return True
    return rows < _SHARED_ROWS if maker is None else maker in found
