"""Schedulers as text, for the command line: see `ir.spec`."""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.ir.spec import Family, named, parse, replaced
from lowtide.schedule.auto import Auto
from lowtide.schedule.base import Solver
from lowtide.schedule.beam import Beam
from lowtide.schedule.best import Best
from lowtide.schedule.cp_sat import Intervals
from lowtide.schedule.dynamic import DynamicProgramme
from lowtide.schedule.exact import Exact
from lowtide.schedule.greedy import ProgramOrder, ReadyList, ReversePostOrder
from lowtide.schedule.ilp import TimeIndexed
from lowtide.schedule.partition import AtWaists, Partitioned
from lowtide.schedule.repair import Repair

__all__ = ["SOLVERS", "limited", "named", "parse_solver"]

SOLVERS: Mapping[str, type[Solver]] = named(
    [
        *(Auto, Exact, Repair, AtWaists, Partitioned, Beam),
        *(Best, ReadyList, ReversePostOrder, ProgramOrder),
        *(DynamicProgramme, TimeIndexed, Intervals),
    ]
)


def parse_solver(text: str, solvers: Mapping[str, type[Solver]] = SOLVERS) -> Solver:
    """The solver that `text` describes. Raises FormatError naming the solver and the setting, and saying what there is to choose from."""
    return parse(text, Family(solvers, "solve", "exact{max_states=1000,max_seconds=2.5}"))


def limited(solver: Solver, *, max_states: int | None = None, max_seconds: float | None = None) -> Solver:
    """`solver` with these settings in place of its own; None leaves one as it is. Raises FormatError where it has no such setting."""
    return replaced(solver, {"max_states": max_states, "max_seconds": max_seconds})
