"""`lowtide order GRAPH.json`: the order of least peak memory of a bare problem, proven or with its gap; on an interrupt the best so far."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from lowtide.cli.exit import INTERRUPTED
from lowtide.cli.order_search import OrderOutcome, search
from lowtide.cli.order_table import show
from lowtide.cli.output import STANDARD_OUTPUT, check_targets, refuse, write_json
from lowtide.cli.solvers import SOLVERS, parse_solver
from lowtide.errors import LowtideError
from lowtide.problems.order_json import Loaded, load_with_positions
from lowtide.schedule import Auto
from lowtide.schedule.base import limited


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
    seconds: Annotated[float | None, typer.Option(help="a cap on time: the solver's max_seconds")] = None,
    json_out: Annotated[
        str | None, typer.Option("--json", metavar="OUT", help="write the answer as JSON; - for standard output alone")
    ] = None,
) -> None:
    """Order the nodes of a graph for the least peak memory. An interrupt (Ctrl-C) prints the best order so far."""
    try:
        check_targets({"--json": json_out}, graph)
        chosen = limited(Auto() if solver is None else parse_solver(solver), max_states=states, max_seconds=seconds)
        loaded = load_with_positions(graph)
        outcome = search(loaded.problem, chosen)
        if json_out != STANDARD_OUTPUT:
            show(Console(), loaded.problem, outcome)
        if json_out is not None:
            write_json(json_out, figures(loaded, outcome))
    except (LowtideError, OSError, ImportError) as error:  # a solver may need what is not installed, and says how to get it
        refuse(error)
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
