"""The order of execution of least peak memory: `schedule(problem, solver)` with solvers that are values."""

from lowtide.schedule.auto import AUTO, Auto, schedule
from lowtide.schedule.base import Anytime, Schedule, Solver, Status, answers
from lowtide.schedule.beam import Beam
from lowtide.schedule.best import Best
from lowtide.schedule.bound import lower_bound_bytes
from lowtide.schedule.cp_sat import Intervals
from lowtide.schedule.dynamic import DynamicProgramme
from lowtide.schedule.exact import Exact
from lowtide.schedule.greedy import ProgramOrder, ReadyList, ReversePostOrder
from lowtide.schedule.ilp import TimeIndexed
from lowtide.schedule.incremental import reschedule
from lowtide.schedule.partition import AtWaists, Partitioned
from lowtide.schedule.repair import Repair

__all__ = [
    "AUTO", "Anytime", "AtWaists", "Auto", "Beam", "Best", "DynamicProgramme", "Exact", "Intervals", "Partitioned", "ProgramOrder",
    "ReadyList", "Repair", "ReversePostOrder", "Schedule", "Solver", "Status", "TimeIndexed", "answers", "lower_bound_bytes",
    "reschedule", "schedule",
]  # fmt: skip
