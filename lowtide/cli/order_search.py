"""A search that always has an answer: the solver's last one, also when it is interrupted, or else the best of the simple orders."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from lowtide.cli.interrupt import until_interrupted
from lowtide.plan.summary import bytes_text
from lowtide.problems.order import OrderProblem
from lowtide.schedule import ProgramOrder, ReadyList, ReversePostOrder, Schedule, Solver, answers, schedule
from lowtide.schedule.warm_up import warm_up

SIMPLE: Mapping[str, Solver] = {
    "as written": ProgramOrder(),
    "ready list": ReadyList(),
    "reverse post-order from inputs": ReversePostOrder("inputs"),
    "reverse post-order from outputs": ReversePostOrder("outputs"),
}


@dataclass(frozen=True)
class OrderOutcome:
    """The best answer of a search, and what it took."""

    best: Schedule
    simple: Mapping[str, Schedule]  # the orders that anybody would try first, for comparison
    seconds: float  # of the search alone, without loading or compiling its kernels
    interrupted: bool

    @property
    def gap(self) -> float:
        """How much of the peak might at most be saved by another order, from 0 to 1; 0 where it is proven least."""
        return (self.best.peak_bytes - self.best.lower_bound_bytes) / max(self.best.peak_bytes, 1)

    @property
    def states(self) -> int:
        """The effort, in the solver's own states; 0 where it counts none."""
        return self.best.stats.get("states", 0)


def search(problem: OrderProblem, solver: Solver) -> OrderOutcome:
    """All that `solver` finds until it is done or interrupted."""
    searched = until_interrupted(lambda: warm_up(solver), answers(problem, solver), _interrupted_text)
    simple = {label: schedule(problem, order) for label, order in SIMPLE.items()}
    best = searched.last if searched.last is not None else min(simple.values(), key=lambda found: found.peak_bytes)
    return OrderOutcome(best, simple, searched.seconds, searched.interrupted)


def _interrupted_text(answer: Schedule) -> str:
    return f"peak {bytes_text(answer.peak_bytes)}, no order needs less than {bytes_text(answer.lower_bound_bytes)}"
