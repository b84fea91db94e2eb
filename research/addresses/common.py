"""What the reference solvers share: a problem in whole units of memory, the placement that they start from, and placements by sequence."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lowtide.placement.base import Placement, Placer, placed, unplaced
from lowtide.placement.greedy import Portfolio
from lowtide.problems import Status
from lowtide.problems.placement import FREE, Ints, PlaceProblem


@dataclass(frozen=True, eq=False)
class Model:
    """The buffers that can be in each other's way, their bytes as whole units, their lives in numbers of events.

    A unit is what divides all sizes and fixed offsets and goes with all alignments, or more bytes where an arena has more than the limit
    in such units. Sizes and offsets are then rounded down, alignments that are no multiple of the unit are given up, and what can be
    placed in B bytes can be placed in B // unit_bytes units: rounded down, offsets of a right placement are right.
    """

    unit_bytes: int
    exact: bool  # whether a placement in units is one in bytes
    buffers: NDArray[np.intp]  # [k] the others have no bytes, or no life
    size: Ints  # [k] in units, from here on
    align: Ints  # [k]
    fixed: Ints  # [k] or FREE
    start: Ints  # [k] the number of an event: a step at which something starts or ends
    end: Ints  # [k]

    @classmethod
    def of(cls, problem: PlaceProblem, arena_bytes: int, limit: int) -> Model:
        """A model in which an arena of so many bytes has at most `limit` units, or one a byte more where sizes are that large."""
        buffers = np.flatnonzero((problem.size_bytes > 0) & (problem.start < problem.end))
        size, align, fixed = problem.size_bytes[buffers], problem.align_bytes[buffers], problem.fixed_bytes[buffers]
        divisor = _unit(size, align, fixed[fixed != FREE])
        unit = max(divisor, -(-arena_bytes // limit))
        steps = np.unique(np.concatenate([problem.start[buffers], problem.end[buffers]]))
        return cls(
            unit_bytes=unit,
            exact=unit == divisor,
            buffers=buffers,
            size=size // unit,
            align=np.where(align % unit == 0, align // unit, 1),
            fixed=np.where(fixed == FREE, FREE, fixed // unit),
            start=np.searchsorted(steps, problem.start[buffers]),
            end=np.searchsorted(steps, problem.end[buffers]),
        )

    @property
    def pair_count(self) -> int:
        """The length of `pairs`, without making them."""
        starts = np.sort(self.start[self.size > 0])
        return int((np.searchsorted(starts, self.end[self.size > 0]) - np.arange(1, len(starts) + 1)).sum())

    @cached_property
    def pairs(self) -> NDArray[np.intp]:
        """[pairs, 2] who shares a step with whom, and has units to share: the first of each pair starts no later than the second."""
        order = np.argsort(self.start, kind="stable")
        order = order[self.size[order] > 0]
        pairs = [np.empty((0, 2), np.intp)]
        for place, one in enumerate(order.tolist()):
            after = order[place + 1 : np.searchsorted(self.start[order], self.end[one])]
            pairs.append(np.column_stack([np.full(len(after), one), after]))
        return np.concatenate(pairs)


def first_placement(problem: PlaceProblem, capacity_bytes: int | None) -> Placement:
    """The best placement of the quick heuristics, whose arena a reference solver has to beat or to prove."""
    return Portfolio(max_moves=0).place(problem, capacity_bytes)


def in_sequence(problem: PlaceProblem, buffers: Iterable[int]) -> Ints:
    """[n] offsets where each of `buffers`, in this sequence, goes to the lowest place that those before it leave; fixed ones come first.

    The sequence of a right placement's offsets gives an arena no larger than its own: by induction no buffer ends above where it was.
    O(n^2): for problems that a reference solver can take.
    """
    offsets = np.where(problem.fixed_bytes == FREE, 0, problem.fixed_bytes)
    is_placed = (problem.fixed_bytes != FREE) & (problem.size_bytes > 0)
    ends = problem.start < problem.end
    for buffer in buffers:
        if problem.fixed_bytes[buffer] != FREE:
            continue
        meets = is_placed & ends & (problem.start < problem.end[buffer]) & (problem.start[buffer] < problem.end)
        offsets[buffer] = _lowest(problem, buffer, np.flatnonzero(meets), offsets)
        is_placed[buffer] = problem.size_bytes[buffer] > 0
    return offsets


def better_offsets(problem: PlaceProblem, offsets: ArrayLike, first: Placement) -> ArrayLike:
    """The offsets of the smaller arena, those of `first` where they are equal."""
    return offsets if int((np.asarray(offsets) + problem.size_bytes).max(initial=0)) < first.arena_bytes else first.offsets


def _lowest(problem: PlaceProblem, buffer: int, others: NDArray[np.intp], offsets: Ints) -> int:
    size, align, place = int(problem.size_bytes[buffer]), int(problem.align_bytes[buffer]), 0
    for other in others[np.argsort(offsets[others], kind="stable")].tolist():
        if place + size <= offsets[other]:
            break
        place = max(place, -(-int(offsets[other] + problem.size_bytes[other]) // align) * align)
    return place


def _unit(size: Ints, align: Ints, fixed: Ints) -> int:
    """The most bytes that divide all sizes and fixed offsets, and divide or are divided by each alignment."""
    unit = max(1, int(np.gcd.reduce(np.concatenate([size, fixed]))))
    aligns = np.unique(align).tolist()
    while clash := next((each for each in aligns if unit % each and each % unit), 0):
        unit = int(np.gcd(unit, clash))
    return unit


@dataclass(frozen=True)
class Found:
    """What a solver found of a model, and proved."""

    offsets: tuple[float, ...] | None = None  # [k] in units, as the solver says: not to be trusted
    least_units: int = 0  # no arena has fewer
    stats: Mapping[str, int] = field(default_factory=dict)


def is_answer(first: Placement, capacity_bytes: int | None) -> bool:
    """Whether nothing is left to be asked: the placement fits, or is the best, or none can fit."""
    return first.status is not Status.UNKNOWN if capacity_bytes is not None else first.status is Status.OPTIMAL


def answered(problem: PlaceProblem, placer: Placer, model: Model, first: Placement, answer: Found, capacity_bytes: int | None) -> Placement:
    """The better placement of the solver's and the first one, with the solver's bound.

    Of the solver's offsets only their sequence is taken: those of a rounded model are not in bytes, and a solver of programs with large
    constants can take an overlap for a rounding error.
    """
    bound_bytes = max(first.lower_bound_bytes, answer.least_units * model.unit_bytes)
    if capacity_bytes is not None and len(first.offsets) < problem.buffer_count:
        return unplaced(problem, placer, capacity_bytes=capacity_bytes, bound_bytes=bound_bytes)
    offsets: ArrayLike = first.offsets
    if answer.offsets is not None:
        sequence = model.buffers[np.argsort(np.asarray(answer.offsets), kind="stable")]
        offsets = better_offsets(problem, in_sequence(problem, sequence.tolist()), first)
    return placed(problem, offsets, placer, capacity_bytes=capacity_bytes, bound_bytes=bound_bytes, stats=answer.stats)
