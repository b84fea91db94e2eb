"""Solvers and placers as text, for the command line and the bench: see `base.spec`."""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.base.spec import Family, named, parse
from lowtide.place.auto import Auto as AutoPlacer
from lowtide.place.base import Placer
from lowtide.place.exact.placer import Exact as ExactPlacer
from lowtide.place.greedy import Greedy, Portfolio
from lowtide.reference.addresses.cp_sat import Rectangles
from lowtide.reference.addresses.ilp import Addresses
from lowtide.reference.orders.cp_sat import Intervals
from lowtide.reference.orders.dynamic import DynamicProgramme
from lowtide.reference.orders.ilp import TimeIndexed
from lowtide.reference.orders.partition import AtWaists, Partitioned
from lowtide.schedule.auto import Auto
from lowtide.schedule.base import Solver
from lowtide.schedule.beam import Beam
from lowtide.schedule.best import Best
from lowtide.schedule.exact.solver import Exact
from lowtide.schedule.greedy import ProgramOrder, ReadyList, ReversePostOrder
from lowtide.schedule.repair import Repair

SOLVERS: Mapping[str, type[Solver]] = named(
    [
        *(Auto, Exact, Repair, AtWaists, Partitioned, Beam),
        *(Best, ReadyList, ReversePostOrder, ProgramOrder),
        *(DynamicProgramme, TimeIndexed, Intervals),
    ]
)
PLACERS: Mapping[str, type[Placer]] = named([AutoPlacer, ExactPlacer, Portfolio, Greedy, Rectangles, Addresses])


def parse_solver(text: str, solvers: Mapping[str, type[Solver]] = SOLVERS) -> Solver:
    """The solver that `text` describes. Raises FormatError naming the solver and the setting, and saying what there is to choose from."""
    return parse(text, Family(solvers, "solve", "exact{max_states=1000,max_seconds=2.5}"))


def parse_placer(text: str, placers: Mapping[str, type[Placer]] = PLACERS) -> Placer:
    """The placer that `text` describes. Raises FormatError naming the placer and the setting, and saying what there is to choose from."""
    return parse(text, Family(placers, "place", "exact{max_nodes=1000,max_seconds=2.5}"))
