"""The papers' solvers and placers beside lowtide's own, as text. For benches and tests: they run where none of this is installed.

`--solver` finds the same classes by the entry points in `pyproject.toml`.
"""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.base.solver_text import named
from lowtide.cli import solvers
from lowtide.placement.base import Placer
from lowtide.schedule.base import Solver
from research.addresses.cp_sat import Rectangles
from research.addresses.ilp import Addresses
from research.orders.cp_sat import Intervals
from research.orders.dynamic import DynamicProgramme
from research.orders.ilp import TimeIndexed
from research.orders.partition import AtWaists, Partitioned

OFFERED_SOLVERS: Mapping[str, type[Solver]] = named([AtWaists, Partitioned, DynamicProgramme, TimeIndexed, Intervals])
OFFERED_PLACERS: Mapping[str, type[Placer]] = named([Rectangles, Addresses])
SOLVERS = {**solvers.SOLVERS, **OFFERED_SOLVERS}
PLACERS = {**solvers.PLACERS, **OFFERED_PLACERS}


def parse_solver(text: str) -> Solver:
    """The solver that `text` describes. Raises FormatError naming the solver and the setting, and saying what there is to choose from."""
    return solvers.parse_solver(text, SOLVERS)


def parse_placer(text: str) -> Placer:
    """The placer that `text` describes. Raises FormatError naming the placer and the setting, and saying what there is to choose from."""
    return solvers.parse_placer(text, PLACERS)
