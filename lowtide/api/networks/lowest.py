"""Offsets for a few hundred buffers without a search: where the room `place` would take more memory than the network itself.

Each buffer, in turn, goes to the lowest gap beside those that it lives with; of some orders the one is taken whose arena is least.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from lowtide.problems.placement import PlaceProblem

Placed = tuple[list[int], int]  # offsets, and the arena's length, in bytes


def lowest(problem: PlaceProblem) -> Placed:
    """Offsets, and the arena's length, in bytes, for buffers none of which is fixed. The time grows with the square of their number."""
    size, start, end = (each.tolist() for each in (problem.size_bytes, problem.start, problem.end))
    keys = (
        lambda buffer: -size[buffer],
        lambda buffer: -size[buffer] * (end[buffer] - start[buffer]),
        lambda buffer: start[buffer] - end[buffer],
    )
    orders = [sorted(range(problem.buffer_count), key=key) for key in keys]
    return min((_stacked(problem, order) for order in orders), key=lambda placed: placed[1])


def _stacked(problem: PlaceProblem, order: Sequence[int]) -> Placed:
    size, start, end, align = (each.tolist() for each in (problem.size_bytes, problem.start, problem.end, problem.align_bytes))
    offsets = [0] * len(size)
    done: list[int] = []
    for buffer in order:
        beside = [other for other in done if start[other] < end[buffer] and start[buffer] < end[other]]
        taken = sorted((offsets[other], offsets[other] + size[other]) for other in beside)
        offsets[buffer] = _gap(taken, size[buffer], align[buffer])
        done.append(buffer)
    return offsets, max((offset + nbytes for offset, nbytes in zip(offsets, size, strict=True)), default=0)


def _gap(taken: Iterable[tuple[int, int]], nbytes: int, align: int) -> int:
    """The lowest offset with so many free bytes behind it."""
    at = 0
    for begin, end in taken:
        if at + nbytes <= begin:
            break
        at = max(at, -(-end // align) * align)
    return at
