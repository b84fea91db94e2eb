"""Solvers and placers by name: lowtide's own, and those that installed packages offer. How they are written is in `base.solver_text`. A
search by them can be stopped: then its last answer counts, and that it did not come to its end is said.

A package offers a class by an entry point, under the name that `--solver` is to know it by:

    [project.entry-points."lowtide.solvers"]  # or "lowtide.placers"
    intervals = "research.orders.cp_sat:Intervals"
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Annotated, Any, Generic, TypeAlias, TypeVar

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lowtide.base.messages import bytes_text
from lowtide.base.solver_text import SolverFamily, named, parse
from lowtide.cli.exit import interruptible
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
MaxSeconds: TypeAlias = Annotated[float | None, typer.Option(help="a cap on time: the solver's max_seconds")]
_NONE_OFFERED = "the papers' own methods come with lowtide-research, which is not installed: pip install -e ./research in a checkout"


def parse_solver(text: str, solvers: Mapping[str, type[Solver]] | None = None) -> Solver:
    """The solver that `text` describes: of `solvers`, or where left out of lowtide's own and of what is installed.

    Raises FormatError naming the solver and the setting, and saying what there is to choose from.
    """
    return parse(text, _family(text, "lowtide.solvers", SOLVERS, solvers, "solve", "exact{max_states=1000,max_seconds=2.5}"))


def parse_placer(text: str, placers: Mapping[str, type[Placer]] | None = None) -> Placer:
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


Answer = TypeVar("Answer")


@dataclass(frozen=True)
class SearchAnswer(Generic[Answer]):
    last: Answer | None  # None where it was interrupted before its first answer
    seconds: float  # of the search alone, without loading or compiling its kernels
    interrupted: bool


def until_interrupted(prepare: Callable[[], None], answers: Iterable[Answer], describe: Callable[[Answer], str]) -> SearchAnswer[Answer]:
    """All answers until there are no more or an interrupt; a second interrupt is not held back.

    On a terminal the best so far is shown while the search goes on, on standard error.
    """
    last, interrupted, started = None, False, time.perf_counter()
    try:
        with interruptible(), Console(stderr=True).status("loading the solver's kernels") as spinner:
            prepare()
            started = time.perf_counter()
            spinner.update("searching")
            for last in answers:
                spinner.update(f"{describe(last)}; Ctrl-C to stop here")
    except KeyboardInterrupt:
        interrupted = True
    return SearchAnswer(last, time.perf_counter() - started, interrupted)


def facts_table(rows: Mapping[str, str]) -> Table:
    """What is known of an answer: a label and a text in each row."""
    table = Table(show_header=False)
    for label, text in rows.items():
        table.add_row(label, Text(text))
    return table


def gap_text(gap: float, gap_bytes: int) -> str:
    return f"{gap:.2%}, {bytes_text(gap_bytes)}" if gap_bytes else "0 %"
