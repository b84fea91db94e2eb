"""The placement engine on its own: buffers in, their addresses out. No torch, no graph."""

from __future__ import annotations

import os

from lowtide.placement.auto import Auto
from lowtide.placement.base import Placement, Placer, limited
from lowtide.problems.placement import PlaceProblem
from lowtide.problems.placement_csv import load_buffers


def place(
    problem: PlaceProblem | str | os.PathLike[str],
    solver: Placer | None = None,
    *,
    capacity_bytes: int | None = None,
    max_nodes: int | None = None,
    max_seconds: float | None = None,
) -> Placement:
    """Offsets for the buffers of `problem` in the smallest arena, with a proven lower bound: what `lowtide place` prints.

    problem: what to place, or the path of a CSV file that holds it, as in `lowtide.problems.placement_csv`.
    solver: how to find the offsets, a value like `lowtide.placement.Exact()`; `Auto()` where left out.
    capacity_bytes: asks for any placement within so many bytes instead; whether there is one is the answer's `status`.
    max_nodes: the solver's effort, in its own nodes: the same on every machine.
    max_seconds: a cap on its time, for when effort was guessed too high; an answer that it cuts short depends on the machine.

    Raises TypeError for another kind of `problem` or `solver`, and OSError for a file that cannot be read. Raises FormatError for a file
    that holds no problem, naming the line, or a solver that cannot be limited so.
    """
    solver = limited(Auto() if solver is None else solver, max_nodes=max_nodes, max_seconds=max_seconds)
    if not isinstance(problem, (PlaceProblem, str, os.PathLike)):
        raise TypeError(f"problem: expected a lowtide.PlaceProblem, or the path of a CSV file, got {problem!r}")
    return solver.place(problem if isinstance(problem, PlaceProblem) else load_buffers(problem), capacity_bytes)
