"""What `lowtide place` prints: what is known of the arena, and simple placements beside it."""

from __future__ import annotations

from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from lowtide.cli.output import exact_bytes
from lowtide.cli.place_search import PlaceOutcome
from lowtide.place.base import Status
from lowtide.plan.summary import bytes_text
from lowtide.problems.placement import PlaceProblem


def show(console: Console, problem: PlaceProblem, outcome: PlaceOutcome) -> None:
    console.print(_facts(problem, outcome))
    console.print(_comparison(problem, outcome))


def reason(outcome: PlaceOutcome) -> str:
    """Why the buffers do not fit, in one line, and what may help."""
    best, capacity = outcome.best, f"{outcome.capacity_bytes:,} bytes"
    if best.status is Status.INFEASIBLE:
        return f"does not fit in {capacity}: proven: no arena is smaller than {best.lower_bound_bytes:,} bytes"
    found = f"the smallest arena found has {best.arena_bytes:,} bytes" if outcome.has_offsets else "no placement was found"
    return f"not known to fit in {capacity}: {found}, and none is proven impossible: allow more --nodes or --seconds"


def _facts(problem: PlaceProblem, outcome: PlaceOutcome) -> Table:
    best = outcome.best
    rows = {
        "buffers": f"{problem.buffer_count:,}",
        "arena": exact_bytes(best.arena_bytes) if outcome.has_offsets else "none: no placement was found",
        "lower bound": exact_bytes(best.lower_bound_bytes),
        "gap": _gap(outcome),
        "status": f"{'interrupted; ' * outcome.interrupted}{best.status.name.lower()}: {best.status.value}",
        "solver": best.solver,
        **{name.replace("_", " "): f"{count:,}" for name, count in best.stats.items()},
        "seconds": f"{outcome.seconds:.3f}",
    }
    if outcome.capacity_bytes is not None:
        rows["capacity"] = exact_bytes(outcome.capacity_bytes)
    table = Table(show_header=False)
    for label, value in rows.items():
        table.add_row(label, Text(value))
    return table


def _comparison(problem: PlaceProblem, outcome: PlaceOutcome) -> Table:
    table = Table("placement", Column("arena", justify="right"), Column("saved here", justify="right"))
    apart = {"one after another, nothing shared": int(problem.size_bytes.sum())}
    for label, arena_bytes in (apart | {label: simple.arena_bytes for label, simple in outcome.simple.items()}).items():
        saved = f"{(arena_bytes - outcome.best.arena_bytes) / max(arena_bytes, 1):.1%}" if outcome.has_offsets else ""
        table.add_row(label, bytes_text(arena_bytes), saved)
    return table


def _gap(outcome: PlaceOutcome) -> str:
    if outcome.gap is None:
        return "none: no placement was found"
    gap_bytes = outcome.best.arena_bytes - outcome.best.lower_bound_bytes
    return f"{outcome.gap:.2%}, {bytes_text(gap_bytes)}" if gap_bytes else "0 %"
