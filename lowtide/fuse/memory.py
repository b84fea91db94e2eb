"""When buffers of the arena live, as a problem of addresses: from the stage that first writes one to the end of the last that reads it."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.fuse.layout import LANES, SLACK, Buffer
from lowtide.fuse.stages import Stage
from lowtide.problems.placement import PlaceProblem

ITEM_BYTES = 4


def buffers(stages: Sequence[Stage]) -> list[Buffer]:
    """The arena's buffers, in the order of their first use."""
    found = dict[Buffer, None]()
    for stage in stages:
        for lay in (stage.out, *stage.reads):
            if lay.buffer.is_own:
                found[lay.buffer] = None
    return list(found)


def problem_of(stages: Sequence[Stage]) -> PlaceProblem:
    """The placement problem of `buffers`, one step a stage. Each buffer has room behind it for what is read past its end."""
    first, last = dict[Buffer, int](), dict[Buffer, int]()
    for step, stage in enumerate(stages):
        for lay in (stage.out, *stage.reads):
            first.setdefault(lay.buffer, step)
            last[lay.buffer] = step
    own = buffers(stages)
    return PlaceProblem.of(
        [-(-(each.elements + SLACK) // LANES) * LANES * ITEM_BYTES for each in own],
        [first[each] for each in own],
        [last[each] + 1 for each in own],
        names=[each.name for each in own],
        align_bytes=LANES * ITEM_BYTES,
    )
