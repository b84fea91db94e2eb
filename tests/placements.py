"""Placement problems for tests: random ones, and the best arena by brute force."""

from __future__ import annotations

import csv
import io
from itertools import permutations

from hypothesis import strategies as st

from lowtide.problems.files import ids
from lowtide.problems.placement import FREE, PlaceProblem


@st.composite
def problems(draw: st.DrawFn, max_buffers: int = 7, max_step: int = 6, max_bytes: int = 8, aligned: bool = True, fixed: bool = True):
    """Small problems with every feature: empty buffers, empty lives, alignments, fixed offsets."""
    count = draw(st.integers(0, max_buffers))
    sizes, starts, ends, aligns, offsets = [], [], [], [], []
    top = 0
    for _ in range(count):
        start = draw(st.integers(0, max_step))
        size, align = draw(st.integers(0, max_bytes)), draw(st.sampled_from([1, 1, 1, 2, 3, 4]) if aligned else st.just(1))
        sizes.append(size)
        starts.append(start)
        ends.append(draw(st.integers(start, max_step)))
        aligns.append(align)
        offset = FREE
        if fixed and draw(st.integers(0, 4)) == 0:  # above all other fixed ones: so that they never meet
            offset = -(-(top + draw(st.integers(0, 2))) // align) * align
            top = offset + size
        offsets.append(offset)
    return PlaceProblem.of(sizes, starts, ends, align_bytes=aligns, fixed_bytes=offsets)


def meet(problem: PlaceProblem, one: int, other: int) -> bool:
    """Whether two buffers share a step, and have bytes to share."""
    alive = max(problem.start[one], problem.start[other]) < min(problem.end[one], problem.end[other])
    return bool(alive and problem.size_bytes[one] > 0 and problem.size_bytes[other] > 0)


def least_arena_bytes(problem: PlaceProblem) -> int:
    """By brute force: the best over all sequences in which each buffer goes to the lowest place above those it meets or between them.

    Some best placement has every buffer pushed down as far as it goes; put in order of its offsets, first fit finds it again.
    """
    n = problem.buffer_count
    held = [each for each in range(n) if problem.fixed_bytes[each] != FREE]
    free = [each for each in range(n) if problem.fixed_bytes[each] == FREE]
    best = None
    for sequence in permutations(free):
        offsets = {each: int(problem.fixed_bytes[each]) for each in held}
        for buffer in sequence:
            offsets[buffer] = _first_fit(problem, buffer, offsets)
        arena = max((offsets[each] + int(problem.size_bytes[each]) for each in range(n)), default=0)
        best = arena if best is None else min(best, arena)
    return best or 0


def _first_fit(problem: PlaceProblem, buffer: int, offsets: dict[int, int]) -> int:
    align, size = int(problem.align_bytes[buffer]), int(problem.size_bytes[buffer])
    taken = sorted((at, at + int(problem.size_bytes[other])) for other, at in offsets.items() if meet(problem, buffer, other))
    place = 0
    for low, high in taken:
        if place + size <= low:
            break
        place = max(place, -(-high // align) * align)
    return place


def buffers_to_csv(problem: PlaceProblem) -> str:
    """One row a buffer, as `load_buffers` reads it, with the columns `alignment` and `fixed` where they say something."""
    columns = {"id": ids(problem), "lower": problem.start, "upper": problem.end, "size": problem.size_bytes}
    if (problem.align_bytes != 1).any():
        columns["alignment"] = problem.align_bytes
    if (problem.fixed_bytes != FREE).any():
        columns["fixed"] = ["" if fixed == FREE else fixed for fixed in problem.fixed_bytes]
    text = io.StringIO(newline="")
    csv.writer(text, lineterminator="\n").writerows([columns, *zip(*columns.values(), strict=True)])
    return text.getvalue()
