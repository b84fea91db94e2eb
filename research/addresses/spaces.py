"""Several memory spaces, such as a small fast memory beside a large slow one: which buffer lies where, and at what address.

Spaces are listed from the fastest to the slowest, and each buffer names those that it may live in. Having all in the fastest is rarely
possible; `place_in_spaces` keeps there what gains most for the bytes and steps that it takes up.

Whose bytes alive fit into a capacity, when lives are taken one after the other.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lowtide.base.kernels import kernel
from lowtide.errors import FormatError
from lowtide.placement.auto import AUTO, place
from lowtide.placement.base import Placement, Placer, placed
from lowtide.placement.strip import arena_bound_bytes
from lowtide.problems import Status
from lowtide.problems.placement import FREE, Ints, PlaceProblem, subproblem_of


def with_room(
    size: Ints, start: Ints, end: Ints, order: NDArray[np.intp], must: NDArray[np.bool_], capacity_bytes: int
) -> NDArray[np.bool_]:
    """[n] whether each is taken: in `order`, all that `must`, and others as long as nowhere in their lives more than the capacity is alive.

    Each costs time in proportion to the starts and ends of others within its life.
    """
    events = np.unique(np.concatenate([start, end]))
    low, high = np.searchsorted(events, start), np.searchsorted(events, end)
    return _taken(size, low, high, order, must, capacity_bytes, np.zeros(max(len(events), 1), np.int64))


@kernel
def _taken(size: Any, low: Any, high: Any, order: Any, must: Any, capacity: Any, live: Any) -> NDArray[np.bool_]:
    taken = np.zeros(len(size), np.bool_)
    for one in order:
        most = 0
        for at in range(low[one], high[one]):
            most = max(most, live[at])
        if must[one] or most + size[one] <= capacity:
            taken[one] = True
            for at in range(low[one], high[one]):
                live[at] += size[one]
    return taken


@dataclass(frozen=True)
class Space:
    """A memory of its own, with addresses from 0."""

    name: str
    capacity_bytes: int | None = None  # None for as much as it takes


@dataclass(frozen=True, eq=False)
class SpacedProblem:
    """Buffers to be placed in several spaces."""

    buffers: PlaceProblem
    spaces: tuple[Space, ...]  # the fastest first
    allowed: tuple[tuple[int, ...], ...]  # [n] the spaces that each buffer may live in, the fastest first
    benefit: NDArray[np.float64]  # [n] of having it one space further up than the next that it allows

    @classmethod
    def of(
        cls,
        buffers: PlaceProblem,
        spaces: Sequence[Space],
        allowed: Sequence[Sequence[int]] | None = None,
        benefit: ArrayLike | None = None,
    ) -> SpacedProblem:
        """The problem of `buffers`; where left out, all are allowed everywhere, and the benefit is their bytes.

        Raises FormatError naming the buffer: no space or an unknown one, spaces that are not from fastest to slowest, a benefit that is
        negative or no number, or a fixed offset without a fixed space.
        """
        everywhere = tuple(range(len(spaces)))
        chosen = [everywhere] * buffers.buffer_count if allowed is None else [tuple(map(int, each)) for each in allowed]
        gains = np.array(buffers.size_bytes if benefit is None else benefit, np.float64)
        if len(chosen) != buffers.buffer_count or gains.shape != (buffers.buffer_count,):
            got = f"{len(chosen)} and {gains.shape}"
            raise FormatError(f"expected the spaces and the benefit of each of {buffers.buffer_count} buffers, got {got}")
        for index, (each, gain) in enumerate(zip(chosen, gains.tolist(), strict=True)):
            _check_buffer(buffers, index, each, gain, len(spaces))
        return cls(buffers, tuple(spaces), tuple(chosen), gains)


def _check_buffer(buffers: PlaceProblem, index: int, allowed: tuple[int, ...], benefit: float, count: int) -> None:
    name = buffers.names[index]
    if not allowed or list(allowed) != sorted(set(allowed)) or allowed[0] < 0 or allowed[-1] >= count:
        raise FormatError(f"buffer {name}: expected some of the spaces 0 to {count - 1} in ascending order, got {list(allowed)}")
    if not 0 <= benefit < np.inf:
        raise FormatError(f"buffer {name}: expected a benefit of 0 or more, got {benefit}")
    if buffers.fixed_bytes[index] != FREE and len(allowed) > 1:
        raise FormatError(f"buffer {name}: expected one space for a fixed offset, got {list(allowed)}")


@dataclass(frozen=True)
class SpacedPlacement:
    """Spaces and addresses for a problem's buffers."""

    space: tuple[int, ...]  # [n] where each buffer lives; -1 where there is no room for it
    offsets: tuple[int, ...]  # [n] in bytes from the start of its space; -1 where there is no room
    arena_bytes: tuple[int, ...]  # by space
    benefit: float  # of all buffers that live in a space further up than their last
    status: Status  # OPTIMAL where each buffer is in its first space, and no space could be smaller
    stuck: tuple[str, ...] = ()  # the names of buffers for which there was no room


def place_in_spaces(problem: SpacedProblem, placer: Placer = AUTO) -> SpacedPlacement:
    """Puts buffers into the fastest spaces that have room for them, those of the highest benefit per byte and step first.

    Space by space, it takes those that may live nowhere else, then others by benefit as long as the bytes alive allow, and has them
    placed by `placer`. What comes to lie above the capacity moves on to its next space. With one space this is `place`.
    """
    waiting = np.array([each[0] for each in problem.allowed], np.int64)  # the space that each buffer would go to next
    space, offsets = np.full(len(waiting), -1, np.int64), np.full(len(waiting), -1, np.int64)
    placements: list[Placement] = []
    for index in range(len(problem.spaces)):
        buffers, answer = _filled(problem, index, np.flatnonzero(waiting == index), placer)
        if not answer.fits:
            stuck = _stuck(problem.buffers, buffers, answer, problem.spaces[index])
            status = answer.status if all(len(problem.allowed[each]) == 1 for each in buffers.tolist()) else Status.UNKNOWN
            return _result(problem, space, offsets, [*placements, answer], status, stuck)
        space[buffers], offsets[buffers] = index, answer.offsets
        for each in np.flatnonzero((waiting == index) & (space != index)).tolist():
            waiting[each] = next(later for later in problem.allowed[each] if later > index)
        placements.append(answer)
    first = all(where == each[0] for where, each in zip(space.tolist(), problem.allowed, strict=True))
    best = first and all(each.status is Status.OPTIMAL for each in placements)
    return _result(problem, space, offsets, placements, Status.OPTIMAL if best else Status.FEASIBLE, ())


def _filled(problem: SpacedProblem, index: int, candidates: NDArray[np.intp], placer: Placer) -> tuple[NDArray[np.intp], Placement]:
    """Who of the candidates lives in a space, and where; all who may live nowhere else, even if they do not fit."""
    capacity_bytes = problem.spaces[index].capacity_bytes
    last = np.array([problem.allowed[each][-1] == index for each in candidates.tolist()], bool)
    if capacity_bytes is None:
        return candidates, place(subproblem_of(problem.buffers, candidates), placer)
    chosen = _chosen(problem, candidates, last, capacity_bytes)
    while True:
        buffers, must_stay = candidates[chosen], last[chosen]
        subproblem = subproblem_of(problem.buffers, buffers)
        answer = place(subproblem, placer, capacity_bytes)
        if answer.fits or must_stay.all():
            return buffers, answer
        high = _above(subproblem, answer, capacity_bytes)
        if answer.offsets and not (high & must_stay).any():
            return buffers[~high], _lowered(subproblem_of(problem.buffers, buffers[~high]), answer, ~high, placer, capacity_bytes)
        leaving = np.flatnonzero(chosen & ~last)  # in the way of one that must stay: half of them move on, those of least benefit
        leaving = leaving[np.argsort(_density(problem, candidates[leaving]), kind="stable")]
        chosen[leaving[: (len(leaving) + 1) // 2]] = False


def _chosen(problem: SpacedProblem, candidates: NDArray[np.intp], last: NDArray[np.bool_], capacity_bytes: int) -> NDArray[np.bool_]:
    """[candidates] whether each stays: who must, and others by benefit where the bytes alive leave room, sizes rounded to alignments."""
    buffers = problem.buffers
    size = -(-buffers.size_bytes[candidates] // buffers.align_bytes[candidates]) * buffers.align_bytes[candidates]
    order = np.lexsort((-_density(problem, candidates), ~last))
    return with_room(size, buffers.start[candidates], buffers.end[candidates], order, last, capacity_bytes)


def _density(problem: SpacedProblem, buffers: NDArray[np.intp]) -> NDArray[np.float64]:
    """Benefit for each byte and step taken up."""
    steps = (problem.buffers.end - problem.buffers.start)[buffers]
    return problem.benefit[buffers] / np.maximum(problem.buffers.size_bytes[buffers].astype(np.float64) * steps, 1.0)


def _above(subproblem: PlaceProblem, answer: Placement, capacity_bytes: int) -> NDArray[np.bool_]:
    if not answer.offsets:
        return np.zeros(subproblem.buffer_count, bool)
    above: NDArray[np.bool_] = np.array(answer.offsets, np.int64) + subproblem.size_bytes > capacity_bytes
    return above


def _lowered(subproblem: PlaceProblem, answer: Placement, chosen: NDArray[np.bool_], placer: Placer, capacity_bytes: int) -> Placement:
    """What is left of a placement once what lies above the capacity is taken off."""
    offsets = np.array(answer.offsets, np.int64)[chosen]
    bound_bytes = arena_bound_bytes(subproblem)
    return placed(subproblem, offsets, placer, capacity_bytes=capacity_bytes, bound_bytes=bound_bytes, stats=answer.stats)


def _stuck(problem: PlaceProblem, buffers: NDArray[np.intp], answer: Placement, space: Space) -> tuple[str, ...]:
    """Those for which there is no room: too large or fixed too high by themselves, or left above the capacity, or most bytes at once."""
    subproblem, capacity_bytes = subproblem_of(problem, buffers), space.capacity_bytes or 0
    high = np.maximum(subproblem.fixed_bytes, 0) + subproblem.size_bytes > capacity_bytes
    if not high.any():
        high = _above(subproblem, answer, capacity_bytes)
    if not high.any():
        steps, live_bytes = subproblem.live_bytes
        step = steps[live_bytes.argmax()]
        high = (subproblem.start <= step) & (step < subproblem.end) & (subproblem.size_bytes > 0)
    return tuple(problem.names[each] for each in buffers[high].tolist())


def _result(
    problem: SpacedProblem, space: Ints, offsets: Ints, placements: list[Placement], status: Status, stuck: tuple[str, ...]
) -> SpacedPlacement:
    arenas = [each.arena_bytes for each in placements] + [0] * (len(problem.spaces) - len(placements))
    ahead = [0 <= where < each[-1] for where, each in zip(space.tolist(), problem.allowed, strict=True)]
    return SpacedPlacement(
        tuple(space.tolist()), tuple(offsets.tolist()), tuple(arenas), float(problem.benefit[ahead].sum()), status, stuck
    )
