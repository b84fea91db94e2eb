"""The two engines on their own: a bare problem in, its order or its addresses out. No torch, no graph."""

from __future__ import annotations

import os

from lowtide.placement.auto import Auto as AutoPlacer
from lowtide.placement.base import Placement, Placer
from lowtide.placement.base import limited as limited_placer
from lowtide.problems.files import load_buffers, load_problem
from lowtide.problems.order import OrderProblem
from lowtide.problems.placement import PlaceProblem
from lowtide.schedule import Auto, Schedule, Solver, schedule
from lowtide.schedule.base import limited


def order(
    problem: OrderProblem | str | os.PathLike[str],
    solver: Solver | None = None,
    *,
    max_states: int | None = None,
    max_seconds: float | None = None,
) -> Schedule:
    """An order of `problem` of least peak memory, with a proven lower bound: what `lowtide order` prints.

    problem: what to order, or the path of a JSON file that holds it, in either form of `lowtide.problems.files`.
    solver: how to find the order, a value like `lowtide.schedule.ReadyList()`; `Auto()` where left out.
    max_states: the solver's effort, in its own states: the same on every machine.
    max_seconds: a cap on its time, for when effort was guessed too high; an answer that it cuts short depends on the machine.

    Raises TypeError for another kind of `problem` or `solver`, and OSError for a file that cannot be read. Raises FormatError for a file
    that holds no problem, naming the node, or a solver that cannot be limited so.
    """
    solver = limited(Auto() if solver is None else solver, max_states=max_states, max_seconds=max_seconds)
    if not isinstance(problem, (OrderProblem, str, os.PathLike)):
        raise TypeError(f"problem: expected a lowtide.OrderProblem, or the path of a JSON file, got {problem!r}")
    return schedule(problem if isinstance(problem, OrderProblem) else load_problem(problem), solver)


def place(
    problem: PlaceProblem | str | os.PathLike[str],
    solver: Placer | None = None,
    *,
    capacity_bytes: int | None = None,
    max_nodes: int | None = None,
    max_seconds: float | None = None,
) -> Placement:
    """Offsets for the buffers of `problem` in the smallest arena, with a proven lower bound: what `lowtide place` prints.

    problem: what to place, or the path of a CSV file that holds it, as in `lowtide.problems.files`.
    solver: how to find the offsets, a value like `lowtide.placement.Exact()`; `Auto()` where left out.
    capacity_bytes: asks for any placement within so many bytes instead; whether there is one is the answer's `status`.
    max_nodes: the solver's effort, in its own nodes: the same on every machine.
    max_seconds: a cap on its time, for when effort was guessed too high; an answer that it cuts short depends on the machine.

    Raises TypeError for another kind of `problem` or `solver`, and OSError for a file that cannot be read. Raises FormatError for a file
    that holds no problem, naming the line, or a solver that cannot be limited so.
    """
    solver = limited_placer(AutoPlacer() if solver is None else solver, max_nodes=max_nodes, max_seconds=max_seconds)
    if not isinstance(problem, (PlaceProblem, str, os.PathLike)):
        raise TypeError(f"problem: expected a lowtide.PlaceProblem, or the path of a CSV file, got {problem!r}")
    return solver.place(problem if isinstance(problem, PlaceProblem) else load_buffers(problem), capacity_bytes)
