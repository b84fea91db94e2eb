"""Where buffers of a generated network's arena lie."""

from __future__ import annotations

from lowtide.fuse.network import Bare, network_of
from lowtide.ir.regions import Region
from lowtide.place import Portfolio, place
from lowtide.problems.placement import PlaceProblem


def placed(problem: PlaceProblem) -> tuple[list[int], int]:
    """Offsets, and the arena's length, in bytes."""
    found = place(problem, Portfolio())
    return [int(offset) for offset in found.offsets], int(found.arena_bytes)


def offsets_of(region: Region, bare: Bare) -> list[int]:
    """The offsets of a region's buffers, in bytes."""
    found: list[int] = []

    def noted(problem: PlaceProblem) -> tuple[list[int], int]:
        offsets, arena_bytes = placed(problem)
        found.extend(offsets)
        return offsets, arena_bytes

    network_of(bare, region.joined, noted)
    return found
