"""Whether a placement is right, by a sweep over time that shares no code with any placer."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable
from typing import NoReturn, SupportsIndex

from lowtide.errors import CheckError
from lowtide.problems.placement import FREE, PlaceProblem


def check_placement(problem: PlaceProblem, offsets: Iterable[SupportsIndex], arena_bytes: int) -> None:
    """Raises CheckError, naming buffers, unless every buffer lies in the arena, aligned, where it is fixed, and alone on its bytes.

    At each step the buffers alive are kept in order of their offsets; as they do not overlap, a newcomer can only meet its two neighbours.
    """
    at = [int(each) for each in offsets]
    if len(at) != problem.buffer_count:
        raise CheckError(f"expected offsets of {problem.buffer_count} buffers, got {len(at)}")
    sizes, starts, ends = problem.size_bytes.tolist(), problem.start.tolist(), problem.end.tolist()
    each = zip(at, sizes, problem.align_bytes.tolist(), problem.fixed_bytes.tolist(), strict=True)
    for buffer, (offset, size, align, fixed) in enumerate(each):
        if offset < 0 or offset + size > arena_bytes:
            _refuse(problem, buffer, f"within the arena of {arena_bytes} bytes, got [{offset}, {offset + size})")
        if offset % align:
            _refuse(problem, buffer, f"an offset that is a multiple of {align}, got {offset}")
        if fixed not in (FREE, offset):
            _refuse(problem, buffer, f"the fixed offset {fixed}, got {offset}")
    living = [buffer for buffer in range(len(at)) if sizes[buffer] and starts[buffer] < ends[buffer]]
    events = sorted([(starts[each], 1, each) for each in living] + [(ends[each], 0, each) for each in living])  # who ends goes first
    alive: list[tuple[int, int]] = []  # (offset, buffer)
    for step, begins, buffer in events:
        if not begins:
            alive.pop(bisect_left(alive, (at[buffer], buffer)))
            continue
        place = bisect_left(alive, (at[buffer], buffer))
        for _, other in alive[max(place - 1, 0) : place + 1]:
            if at[other] < at[buffer] + sizes[buffer] and at[buffer] < at[other] + sizes[other]:
                raise CheckError(f"{_described(problem, at, other)} and {_described(problem, at, buffer)} overlap at step {step}")
        alive.insert(place, (at[buffer], buffer))


def _refuse(problem: PlaceProblem, buffer: int, expected: str) -> NoReturn:
    raise CheckError(f"buffer {problem.names[buffer]}: expected {expected}")


def _described(problem: PlaceProblem, at: list[int], buffer: int) -> str:
    return f"buffer {problem.names[buffer]} at [{at[buffer]}, {at[buffer] + int(problem.size_bytes[buffer])})"
