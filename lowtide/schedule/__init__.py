"""The order of execution of least peak memory: `schedule(problem, solver)` with solvers that are values."""

from lowtide.schedule.auto import AUTO, Auto, schedule
from lowtide.schedule.base import Anytime, Schedule, Solver, answers
from lowtide.schedule.beam import Beam
from lowtide.schedule.best import Best, schedule_all
from lowtide.schedule.cuts import lower_bound_bytes
from lowtide.schedule.exact import Exact
from lowtide.schedule.greedy import ProgramOrder, ReadyList, ReversePostOrder
from lowtide.schedule.repair import Repair

__all__ = [
    "AUTO", "Anytime", "Auto", "Beam", "Best", "Exact", "ProgramOrder",
    "ReadyList", "Repair", "ReversePostOrder", "Schedule", "Solver", "answers",
    "lower_bound_bytes", "schedule", "schedule_all",
]  # fmt: skip
