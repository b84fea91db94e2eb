"""What the tables of the ICCAD'23 paper share: the engine under a cap, times, and peaks in the paper's unit."""

from __future__ import annotations

import time

from bench.networks import PROBLEMS
from lowtide.problems.order import OrderProblem
from lowtide.schedule import Schedule, Solver
from lowtide.schedule.exact import Exact


def exact(seconds: float) -> Exact:
    """The engine, capped by seconds alone."""
    return Exact(max_states=10**9, max_seconds=seconds)


def warm_up(solver: Solver | None = None) -> None:
    """Has kernels compiled, or loaded: of `solver`, or of the engine, whose cap on seconds would count that time too."""
    for name in ("randwire-s1", "nasnet-imagenet"):  # an easy one, and one that takes all the engine has
        (Exact(max_states=100_000) if solver is None else solver).solve(PROBLEMS[name].problem())


def timed(solver: Solver, problem: OrderProblem) -> tuple[Schedule, float]:
    """An answer, and the seconds it took."""
    start = time.perf_counter()
    found = solver.solve(problem)
    return found, time.perf_counter() - start


def kib(found: Schedule, problem: OrderProblem) -> float:
    """The peak without what is resident."""
    return (found.peak_bytes - problem.resident_bytes) / 1024
