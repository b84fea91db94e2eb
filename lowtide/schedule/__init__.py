"""The order of execution of least peak memory: `schedule(problem, solver)` with solvers that are values."""

from lowtide.schedule.base import Anytime, Schedule, Solver, Status, answers
from lowtide.schedule.best import Best, schedule
from lowtide.schedule.bound import lower_bound_bytes
from lowtide.schedule.greedy import ProgramOrder, ReadyList, ReversePostOrder

__all__ = [
    "Anytime", "Best", "ProgramOrder", "ReadyList", "ReversePostOrder", "Schedule", "Solver", "Status", "answers",
    "lower_bound_bytes", "schedule",
]  # fmt: skip
