"""`lowtide order GRAPH.json`: the order of least peak memory of a bare problem, proven or with its gap; on an interrupt the best so far."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from lowtide.base.messages import bytes_text
from lowtide.cli.exit import INTERRUPTED
from lowtide.cli.output import STANDARD_OUTPUT, JsonOut, check_targets, exact_bytes, refusals, short_name, write_json
from lowtide.cli.solvers import SOLVERS, MaxSeconds, facts_table, gap_text, parse_solver, until_interrupted
from lowtide.cost.memory import Footprint, simulate
from lowtide.problems import Status
from lowtide.problems.files import Loaded, load_with_positions
from lowtide.problems.order import OrderProblem
from lowtide.schedule import Auto, ProgramOrder, ReadyList, ReversePostOrder, Schedule, Solver, answers, schedule
from lowtide.schedule.auto import warm_up
from lowtide.schedule.base import limited

SIMPLE: Mapping[str, Solver] = {
    "as written": ProgramOrder(),
    "ready list": ReadyList(),
    "reverse post-order from inputs": ReversePostOrder("inputs"),
    "reverse post-order from outputs": ReversePostOrder("outputs"),
}


@dataclass(frozen=True)
class OrderOutcome:
    """The best answer of a search, and what it took."""

    best: Schedule
    simple: Mapping[str, Schedule]  # the orders that anybody would try first, for comparison
    seconds: float  # of the search alone, without loading or compiling its kernels
    interrupted: bool

    @property
    def gap(self) -> float:
        """How much of the peak might at most be saved by another order, from 0 to 1; 0 where it is proven least."""
        return (self.best.peak_bytes - self.best.lower_bound_bytes) / max(self.best.peak_bytes, 1)

    @property
    def states(self) -> int:
        """The effort, in the solver's own states; 0 where it counts none."""
        return self.best.stats.get("states", 0)


def search(problem: OrderProblem, solver: Solver) -> OrderOutcome:
    """All that `solver` finds until it is done or interrupted."""
    searched = until_interrupted(lambda: warm_up(solver), answers(problem, solver), _interrupted_text)
    simple = {label: schedule(problem, order) for label, order in SIMPLE.items()}
    best = searched.last if searched.last is not None else min(simple.values(), key=lambda each: each.peak_bytes)
    return OrderOutcome(best, simple, searched.seconds, searched.interrupted)


def _interrupted_text(answer: Schedule) -> str:
    return f"peak {bytes_text(answer.peak_bytes)}, no order needs less than {bytes_text(answer.lower_bound_bytes)}"


_SHOWN = 8  # tensors at the peak


def show(console: Console, problem: OrderProblem, outcome: OrderOutcome) -> None:
    console.print(_facts(problem, outcome))
    console.print(_comparison(outcome))
    if problem.node_count and outcome.best.status is not Status.INFEASIBLE:
        console.print(_peak(problem, simulate(problem, outcome.best.order), outcome.best))


def _facts(problem: OrderProblem, outcome: OrderOutcome) -> Table:
    best = outcome.best
    peak = "none: no order is low enough" if best.status is Status.INFEASIBLE else exact_bytes(best.peak_bytes)
    rows = {
        "nodes": f"{problem.node_count:,}",
        "peak": peak,
        "lower bound": exact_bytes(best.lower_bound_bytes),
        "gap": gap_text(outcome.gap, best.peak_bytes - best.lower_bound_bytes),
        "status": f"{'interrupted; ' * outcome.interrupted}{best.status.name.lower()}: {best.status.value}",
        "solver": best.solver,
        "states": f"{outcome.states:,}",
        "seconds": f"{outcome.seconds:.3f}",
    }
    return facts_table(rows)


def _comparison(outcome: OrderOutcome) -> Table:
    best = outcome.best
    table = Table("order", Column("peak", justify="right"), Column("saved here", justify="right"))
    for label, simple in outcome.simple.items():
        table.add_row(label, bytes_text(simple.peak_bytes), "" if best.status is Status.INFEASIBLE else _saving(simple, best))
    return table


def _peak(problem: OrderProblem, footprint: Footprint, best: Schedule) -> Table:
    """The largest tensors alive at the first step at the peak, and from and to which step they are; the rows add up to the peak."""
    step, (start, end) = footprint.peak_step, footprint.lifetimes
    node = best.order[step]
    alive = np.flatnonzero((start <= step) & (step < end) & (problem.tensor_bytes > 0))
    largest = alive[np.lexsort((start[alive], -problem.tensor_bytes[alive]))]
    title = Text.assemble(f"at the peak, step {step} of {problem.node_count}: ", Text(short_name(problem.names[node])))
    table = Table("tensor of", *(Column(label, justify="right") for label in ("bytes", "from step", "to step")), title=title)
    table.title_justify, table.title_style = "left", ""
    for tensor in largest[:_SHOWN].tolist():
        table.add_row(_made_by(problem, tensor), f"{problem.tensor_bytes[tensor]:,}", str(start[tensor]), str(end[tensor] - 1))
    for label, nbytes in (
        (f"{len(largest) - _SHOWN} more tensors", int(problem.tensor_bytes[largest[_SHOWN:]].sum())),
        ("the node's workspace", int(problem.workspace_bytes[node])),
        ("resident throughout", problem.resident_bytes),
    ):
        if nbytes:
            table.add_row(label, f"{nbytes:,}", "", "")
    return table


def _made_by(problem: OrderProblem, tensor: int) -> Text:
    """A tensor by the node that makes it, with its place among several."""
    node = int(problem.producer[tensor])
    if node < 0:
        return Text(f"tensor {tensor}, there from the start")
    outputs = problem.outputs_of
    position = tensor if outputs.ptr[node + 1] - outputs.ptr[node] > 1 else None
    return Text(short_name(problem.names[node])) + Text("" if position is None else f", tensor {position}")


def _saving(simple: Schedule, best: Schedule) -> str:
    return f"{(simple.peak_bytes - best.peak_bytes) / max(simple.peak_bytes, 1):.1%}"


def order_command(
    graph: Annotated[
        Path, typer.Argument(metavar="GRAPH.json", help="the problem: a list of nodes with their inputs and bytes", show_default=False)
    ],
    solver: Annotated[
        str | None,
        typer.Option(
            metavar="NAME{FIELD=VALUE,...}",
            help=f"how to find the order: {', '.join(SOLVERS)}, or one of an installed package; settings in braces; auto by default",
        ),
    ] = None,
    states: Annotated[
        int | None, typer.Option(min=1, max=2**63 - 1, help="effort: the solver's max_states; the same on every machine")
    ] = None,
    seconds: MaxSeconds = None,
    json_out: JsonOut = None,
) -> None:
    """Order the nodes of a graph for the least peak memory. An interrupt (Ctrl-C) prints the best order so far."""
    with refusals():  # of an import, too: a solver may need what is not installed, and says how to get it
        check_targets({"--json": json_out}, graph)
        chosen = limited(Auto() if solver is None else parse_solver(solver), max_states=states, max_seconds=seconds)
        loaded = load_with_positions(graph)
        outcome = search(loaded.problem, chosen)
        if json_out != STANDARD_OUTPUT:
            show(Console(), loaded.problem, outcome)
        if json_out is not None:
            write_json(json_out, figures(loaded, outcome))
    if outcome.interrupted:
        typer.echo("lowtide: interrupted: this is the best order so far", err=True)
        raise typer.Exit(INTERRUPTED)


def figures(loaded: Loaded, outcome: OrderOutcome) -> dict[str, Any]:
    """What `--json` writes: the order by places in the file's list "nodes" and by name, what is known of its peak, and what it took."""
    best = outcome.best
    return {
        "status": best.status.name.lower(),
        "interrupted": outcome.interrupted,
        "peak_bytes": best.peak_bytes,
        "lower_bound_bytes": best.lower_bound_bytes,
        "gap": outcome.gap,
        "solver": best.solver,
        "states": outcome.states,
        "seconds": outcome.seconds,
        "simple_orders_bytes": {label: simple.peak_bytes for label, simple in outcome.simple.items()},
        "order": [loaded.positions[node] for node in best.order],
        "names": [loaded.problem.names[node] for node in best.order],
    }
