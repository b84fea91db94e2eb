"""`lowtide place BUFFERS.csv`: addresses in the smallest arena, or within a capacity; on an interrupt the best so far.

What `lowtide place` prints: what is known of the arena, and simple placements beside it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Column, Table

from lowtide.base.messages import bytes_text
from lowtide.cli.exit import INTERRUPTED
from lowtide.cli.output import STANDARD_OUTPUT, JsonOut, check_targets, exact_bytes, refusals, write_answer, write_json
from lowtide.cli.solvers import PLACERS, MaxSeconds, facts_table, gap_text, parse_placer, until_interrupted
from lowtide.placement.auto import Auto
from lowtide.placement.base import Placement, Placer, answers, limited, warm_up
from lowtide.placement.greedy import Greedy
from lowtide.placement.picture import check_picture, draw
from lowtide.problems import Status
from lowtide.problems.files import ids, load_buffers, offsets_to_csv, save_offsets
from lowtide.problems.placement import PlaceProblem

SIMPLE: Mapping[str, Greedy] = {"first fit, as they start": Greedy("start"), "first fit, by size": Greedy("size")}
_HURRIED_SECONDS = 0.2  # for both of them together, where the search was to end soon


@dataclass(frozen=True)
class PlaceOutcome:
    """The best answer of a search, and what it took."""

    best: Placement
    simple: Mapping[str, Placement]  # what anybody would try first, for comparison; less those that there was no time for
    capacity_bytes: int | None  # that was asked for
    seconds: float  # of the search alone, without loading or compiling its kernels
    interrupted: bool

    @property
    def has_offsets(self) -> bool:
        """Whether a placement was found, be it within the capacity or not."""
        return bool(self.best.offsets) or self.best.fits  # without buffers there are no offsets either

    @property
    def gap(self) -> float | None:
        """How much of the arena might at most be saved by another placement, from 0 to 1; 0 where it is proven smallest."""
        if not self.has_offsets:
            return None
        return (self.best.arena_bytes - self.best.lower_bound_bytes) / max(self.best.arena_bytes, 1)


def search(problem: PlaceProblem, solver: Placer, capacity_bytes: int | None = None) -> PlaceOutcome:
    """All that `solver` finds until it is done or interrupted."""
    searched = until_interrupted(lambda: warm_up(solver), answers(problem, solver, capacity_bytes), _interrupted_text)
    hurried = searched.interrupted or getattr(solver, "max_seconds", math.inf) < math.inf
    deadline = time.monotonic() + (_HURRIED_SECONDS if hurried else math.inf)
    simple = {label: placer.place_by(deadline, problem, capacity_bytes) for label, placer in SIMPLE.items()}
    best = searched.last if searched.last is not None else min(simple.values(), key=lambda each: each.arena_bytes)
    whole = {label: placement for label, placement in simple.items() if "stacked" not in placement.stats}
    return PlaceOutcome(best, whole, capacity_bytes, searched.seconds, searched.interrupted)


def _interrupted_text(answer: Placement) -> str:
    return f"arena {bytes_text(answer.arena_bytes)}, none is smaller than {bytes_text(answer.lower_bound_bytes)}"


def show(console: Console, problem: PlaceProblem, outcome: PlaceOutcome) -> None:
    console.print(_facts(problem, outcome))
    console.print(_comparison(problem, outcome))


def reason(outcome: PlaceOutcome) -> str:
    """Why the buffers do not fit, in one line, and what may help."""
    best, capacity = outcome.best, f"{outcome.capacity_bytes:,} bytes"
    if best.status is Status.INFEASIBLE:
        return f"does not fit in {capacity}: proven: no arena is smaller than {best.lower_bound_bytes:,} bytes"
    smallest = f"the smallest arena found has {best.arena_bytes:,} bytes" if outcome.has_offsets else "no placement was found"
    return f"not known to fit in {capacity}: {smallest}, and none is proven impossible: allow more --nodes or --seconds"


def _facts(problem: PlaceProblem, outcome: PlaceOutcome) -> Table:
    best = outcome.best
    rows = {
        "buffers": f"{problem.buffer_count:,}",
        "arena": exact_bytes(best.arena_bytes) if outcome.has_offsets else "none: no placement was found",
        "lower bound": exact_bytes(best.lower_bound_bytes),
        "gap": "none: no placement was found" if outcome.gap is None else gap_text(outcome.gap, best.arena_bytes - best.lower_bound_bytes),
        "status": f"{'interrupted; ' * outcome.interrupted}{best.status.name.lower()}: {best.status.value}",
        "solver": best.solver,
        **{name.replace("_", " "): f"{count:,}" for name, count in best.stats.items()},
        "seconds": f"{outcome.seconds:.3f}",
    }
    if outcome.capacity_bytes is not None:
        rows["capacity"] = exact_bytes(outcome.capacity_bytes)
    return facts_table(rows)


def _comparison(problem: PlaceProblem, outcome: PlaceOutcome) -> Table:
    table = Table("placement", Column("arena", justify="right"), Column("saved here", justify="right"))
    apart = {"one after another, nothing shared": int(problem.size_bytes.sum())}
    for label, arena_bytes in (apart | {label: simple.arena_bytes for label, simple in outcome.simple.items()}).items():
        saved = f"{(arena_bytes - outcome.best.arena_bytes) / max(arena_bytes, 1):.1%}" if outcome.has_offsets else ""
        table.add_row(label, bytes_text(arena_bytes), saved)
    return table


_DOES_NOT_FIT = 3
_MOST = 2**62 - 1


def place_command(
    buffers: Annotated[
        Path,
        typer.Argument(metavar="BUFFERS.csv", help="the problem: columns id,lower,upper,size, and alignment or fixed", show_default=False),
    ],
    capacity: Annotated[
        int | None, typer.Option(min=0, max=_MOST, metavar="BYTES", help="ask only whether the buffers fit in so many bytes, and how")
    ] = None,
    align: Annotated[int, typer.Option(min=1, max=_MOST, metavar="BYTES", help="the alignment of buffers that have none of their own")] = 1,
    solver: Annotated[
        str | None,
        typer.Option(
            metavar="NAME{FIELD=VALUE,...}",
            help=f"how to find the offsets: {', '.join(PLACERS)}, or one of an installed package; settings in braces; auto by default",
        ),
    ] = None,
    nodes: Annotated[
        int | None, typer.Option(min=1, max=2**63 - 1, help="effort: the solver's max_nodes; the same on every machine")
    ] = None,
    seconds: MaxSeconds = None,
    json_out: JsonOut = None,
    output: Annotated[
        str | None,
        typer.Option(metavar="OFFSETS.csv", help="write id,lower,upper,size,offset where the buffers fit; - for standard output alone"),
    ] = None,
    plot: Annotated[str | None, typer.Option(metavar="FILE.png", help="draw addresses over time; .svg and .pdf too")] = None,
) -> None:
    """Give buffers addresses in the smallest arena. An interrupt (Ctrl-C) prints the best so far; what does not fit has exit code 3."""
    with refusals():  # of an import, too: a solver may need what is not installed, and says how to get it
        check_targets({"--json": json_out, "--output": output, "--plot": plot}, buffers)
        if plot is not None:
            check_picture(plot)
        chosen = limited(Auto() if solver is None else parse_placer(solver), max_nodes=nodes, max_seconds=seconds)
        problem = load_buffers(buffers, align_bytes=align)
        outcome = search(problem, chosen, capacity)
        _write(problem, outcome, json_out, output, plot)
    if not outcome.best.fits:
        typer.echo(f"lowtide: {reason(outcome)}", err=True)
    if outcome.interrupted:
        typer.echo("lowtide: interrupted: this is the best placement so far", err=True)
        raise typer.Exit(INTERRUPTED)
    if not outcome.best.fits:
        raise typer.Exit(_DOES_NOT_FIT)


def figures(problem: PlaceProblem, outcome: PlaceOutcome) -> dict[str, Any]:
    """What `--json` writes: what is known of the arena, what it took, and the offsets by id; there are none where none was found."""
    best = outcome.best
    return {
        "status": best.status.name.lower(),
        "interrupted": outcome.interrupted,
        "arena_bytes": best.arena_bytes,
        "lower_bound_bytes": best.lower_bound_bytes,
        "capacity_bytes": outcome.capacity_bytes,
        "gap": outcome.gap,
        "solver": best.solver,
        "effort": dict(best.stats),
        "seconds": outcome.seconds,
        "offsets": dict(zip(ids(problem), best.offsets, strict=False)),
    }


def _write(problem: PlaceProblem, outcome: PlaceOutcome, json_out: str | None, output: str | None, plot: str | None) -> None:
    if STANDARD_OUTPUT not in (json_out, output):
        show(Console(), problem, outcome)
    if json_out is not None:
        write_json(json_out, figures(problem, outcome))
    if output == STANDARD_OUTPUT and outcome.best.fits:
        write_answer(offsets_to_csv(problem, outcome.best.offsets))
    elif output is not None and outcome.best.fits:
        save_offsets(problem, outcome.best.offsets, output)
    if plot is not None:
        draw(problem, outcome.best, plot, capacity_bytes=outcome.capacity_bytes)
