"""Solvers and placers by name: lowtide's own, and those that installed packages offer. How they are written is in `base.solver_text`.

A package offers a class by an entry point, under the name that `--solver` is to know it by:

    [project.entry-points."lowtide.solvers"]  # or "lowtide.placers"
    intervals = "research.orders.cp_sat:Intervals"
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.metadata import EntryPoint, entry_points
from typing import Any, TypeVar

from lowtide.base.solver_text import SolverFamily, named, parse
from lowtide.errors import FormatError
from lowtide.placement.auto import Auto as AutoPlacer
from lowtide.placement.base import Placer
from lowtide.placement.exact import Exact as ExactPlacer
from lowtide.placement.greedy import Greedy, Portfolio
from lowtide.schedule.auto import Auto
from lowtide.schedule.base import Solver
from lowtide.schedule.beam import Beam
from lowtide.schedule.best import Best
from lowtide.schedule.exact import Exact
from lowtide.schedule.greedy import ProgramOrder, ReadyList, ReversePostOrder
from lowtide.schedule.repair import Repair

S = TypeVar("S")
SOLVERS: Mapping[str, type[Solver]] = named([Auto, Exact, Repair, Beam, Best, ReadyList, ReversePostOrder, ProgramOrder])
PLACERS: Mapping[str, type[Placer]] = named([AutoPlacer, ExactPlacer, Portfolio, Greedy])
_NONE_OFFERED = "the papers' own methods come with lowtide-research, which is not installed: pip install -e ./research in a checkout"


def parse_solver(text: str, solvers: Mapping[str, type[Solver]] | None = None) -> Solver:
    """The solver that `text` describes: of `solvers`, or where left out of lowtide's own and of what is installed.

    Raises FormatError naming the solver and the setting, and saying what there is to choose from.
    """
    return parse(text, _family(text, "lowtide.solvers", SOLVERS, solvers, "solve", "exact{max_states=1000,max_seconds=2.5}"))


def parse_placer(text: str, placers: Mapping[str, type[Placer]] | None = None) -> Placer:
    """The placer that `text` describes, as `parse_solver` does it."""
    return parse(text, _family(text, "lowtide.placers", PLACERS, placers, "place", "exact{max_nodes=1000,max_seconds=2.5}"))


def _family(
    text: str, group: str, own: Mapping[str, type[S]], given: Mapping[str, type[S]] | None, method: str, example: str
) -> SolverFamily[S]:
    """Whom `text` may name. Only the offers that it does name are loaded: nobody pays for the others, nor fails with them."""
    if given is not None:
        return SolverFamily(given, method, example)
    points, words = entry_points(group=group), set(re.findall(r"[\w-]+", text))
    offered = {point.name: _loaded(point, method) for point in points if point.name in words - own.keys()}
    others = ", ".join(sorted({point.name for point in points} - own.keys()))
    return SolverFamily({**offered, **own}, method, example, f"or of what is installed: {others}" if others else _NONE_OFFERED)


def _loaded(point: EntryPoint, method: str) -> type[Any]:
    try:
        offered = point.load()
    except (ImportError, AttributeError) as error:
        raise FormatError(f"solver {point.name}: an installed package offers {point.value}, which cannot be loaded: {error}") from error
    if not isinstance(offered, type) or not hasattr(offered, method):
        raise FormatError(f"solver {point.name}: expected a class with a method {method} at {point.value}, got {offered!r}")
    return offered
