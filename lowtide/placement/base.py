"""What a placer is, the one shape of its results, and a small problem on which a placer has to use all that it has.

Placing that loads compiled kernels from disk, or compiles them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Protocol, runtime_checkable

import numpy as np
from numpy.typing import ArrayLike

from lowtide.base.solver_text import check_amounts, described, replaced
from lowtide.problems import Status
from lowtide.problems.placement import PlaceProblem, check_placement


@dataclass(frozen=True, slots=True)
class Placement:
    """Addresses for a problem's buffers, and what is known of their arena."""

    offsets: tuple[int, ...]  # [n] in bytes from the arena's start; empty where none was found
    arena_bytes: int  # of these offsets, even where they are above the capacity asked for; the lower bound where there are none
    lower_bound_bytes: int  # no arena is smaller
    status: Status
    solver: str  # that found it, with the settings that are not its defaults: "Portfolio(max_moves=0)"
    stats: Mapping[str, int] = field(default_factory=dict)  # effort, by the solver's own names

    @property
    def fits(self) -> bool:
        """Whether the offsets answer the question: within the capacity, where one was given."""
        return self.status in (Status.OPTIMAL, Status.FEASIBLE)


@runtime_checkable
class Placer(Protocol):
    """A way to find addresses: a frozen dataclass whose fields are its settings."""

    def place(self, problem: PlaceProblem, capacity_bytes: int | None = None) -> Placement:
        """The smallest arena found; or, with a capacity, any placement that fits it: then the first found is as good as the best.

        The same problem and settings always give the same placement.
        """
        ...


@runtime_checkable
class Anytime(Protocol):
    """A placer that answers early, and then better and better."""

    def answers(self, problem: PlaceProblem, capacity_bytes: int | None = None) -> Iterator[Placement]:
        """At least one placement, none with a larger arena or a lower bound than the one before; the last is what `place` gives."""
        ...

    def place(self, problem: PlaceProblem, capacity_bytes: int | None = None) -> Placement:
        """The smallest arena that was found, with the highest bound that was proven; or the first placement within the capacity."""
        *_, last = self.answers(problem, capacity_bytes)
        return last


def answers(problem: PlaceProblem, placer: Placer, capacity_bytes: int | None = None) -> Iterator[Placement]:
    """All that `placer` has to say, the best last: for callers who may have to stop it early."""
    if isinstance(placer, Anytime):
        yield from placer.answers(problem, capacity_bytes)
    else:
        yield placer.place(problem, capacity_bytes)


def placed(
    problem: PlaceProblem,
    offsets: ArrayLike,
    placer: object,
    *,
    capacity_bytes: int | None = None,
    bound_bytes: int = 0,
    stats: Mapping[str, int] | None = None,
) -> Placement:
    """The result of a placer that found `offsets` and proved that no arena is below `bound_bytes`.

    Checks the offsets, so that no placer answers for itself. Raises CheckError where they are wrong.
    """
    where = np.asarray(offsets, np.int64)
    arena_bytes = int((where + problem.size_bytes).max(initial=0)) if problem.buffer_count else 0
    check_placement(problem, where.tolist(), arena_bytes)
    bound_bytes = max(bound_bytes, problem.lower_bound_bytes)
    status = judged(arena_bytes, bound_bytes, capacity_bytes)
    return Placement(tuple(where.tolist()), arena_bytes, bound_bytes, status, described(placer), stats or {})


def unplaced(problem: PlaceProblem, placer: Placer, *, capacity_bytes: int, bound_bytes: int) -> Placement:
    """The result of a placer that found no offsets, and proved that no arena is below `bound_bytes`."""
    bound_bytes = max(bound_bytes, problem.lower_bound_bytes)
    status = Status.INFEASIBLE if bound_bytes > capacity_bytes else Status.UNKNOWN
    return Placement((), bound_bytes, bound_bytes, status, described(placer), {})


def judged(arena_bytes: int, bound_bytes: int, capacity_bytes: int | None) -> Status:
    """What an arena and a bound say about each other, and about the capacity."""
    if capacity_bytes is not None and arena_bytes > capacity_bytes:
        return Status.INFEASIBLE if bound_bytes > capacity_bytes else Status.UNKNOWN
    return Status.OPTIMAL if arena_bytes <= bound_bytes else Status.FEASIBLE


def checked(placer: object, name: str = "placer") -> Placer:
    """What a user gave as a placer, under a name. Raises TypeError for anything else, its class or its own name too; ValueError."""
    if isinstance(placer, type) or not isinstance(placer, Placer):
        raise TypeError(f"{name}: expected a value like lowtide.placement.Exact(), got {placer!r}")
    check_amounts(placer)
    return placer


def limited(placer: Placer, *, max_nodes: int | None = None, max_seconds: float | None = None) -> Placer:
    """`placer` with these settings in place of its own; None leaves one as it is. Raises FormatError where it has no such setting."""
    return replaced(checked(placer, "solver"), {"max_nodes": max_nodes, "max_seconds": max_seconds})


# The bound is 12 bytes and the smallest arena has 13: no heuristic ends by meeting the bound, and the exact search has to prove it.
_SIZES = (5, 5, 2, 3, 1, 4, 1, 1, 4, 7)
_LIVES = ((0, 3), (2, 5), (3, 5), (0, 2), (2, 6), (4, 6), (2, 4), (0, 1), (1, 2), (5, 6))


def warm_up(placer: Placer) -> None:
    """Has the kernels of `placer` loaded, so that seconds taken from now on are its own."""
    placer.place(PlaceProblem.of(_SIZES, [start for start, _ in _LIVES], [end for _, end in _LIVES]))
