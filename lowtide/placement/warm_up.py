"""A small problem on which a placer has to use all that it has: placing it loads compiled kernels from disk, or compiles them."""

from __future__ import annotations

from lowtide.placement.base import Placer
from lowtide.problems.placement import PlaceProblem

# The bound is 12 bytes and the smallest arena has 13: no heuristic ends by meeting the bound, and the exact search has to prove it.
_SIZES = (5, 5, 2, 3, 1, 4, 1, 1, 4, 7)
_LIVES = ((0, 3), (2, 5), (3, 5), (0, 2), (2, 6), (4, 6), (2, 4), (0, 1), (1, 2), (5, 6))


def warm_up(placer: Placer) -> None:
    """Has the kernels of `placer` loaded, so that seconds taken from now on are its own."""
    placer.place(PlaceProblem.of(_SIZES, [start for start, _ in _LIVES], [end for _, end in _LIVES]))
