"""The order of execution of least peak memory: `schedule(problem, solver)` with solvers that are values."""

from lowtide.schedule.base import Schedule, Solver, Status
from lowtide.schedule.best import Best, schedule
from lowtide.schedule.bound import lower_bound_bytes
from lowtide.schedule.greedy import ProgramOrder, ReadyList, ReversePostOrder

__all__ = ["Best", "ProgramOrder", "ReadyList", "ReversePostOrder", "Schedule", "Solver", "Status", "lower_bound_bytes", "schedule"]
