"""The commands, and what belongs to all of them. `lowtide report PLAN.json OUT ...`: a saved plan as page, picture, trace or snapshot."""

from __future__ import annotations

import io
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

from lowtide.cli.edge import edge_command
from lowtide.cli.needs import devices_command, needs_command
from lowtide.cli.optimize import compile_command, explain_command, optimize_command
from lowtide.cli.order import order_command
from lowtide.cli.output import check_targets, refusals
from lowtide.cli.place import place_command
from lowtide.plan.plan import Plan
from lowtide.report import check_report, save


def report_command(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.json", help="as step.plan.save or `lowtide optimize --output` wrote it")],
    out: Annotated[
        list[Path],
        typer.Argument(
            metavar="OUT ...",
            help="what to write: .html a page, .png, .svg or .pdf a picture, .json a trace for Chrome and Perfetto, .pickle a snapshot "
            "for PyTorch's memory_viz",
        ),
    ],
) -> None:
    """Show a saved plan: memory over the step, what lives when, what was evicted, what memory buys. torch is not needed."""
    with refusals():
        for each in out:
            check_report(each)
        check_targets({f"OUT {each}": str(each) for each in out}, plan)
        read = Plan.load(plan)
        for each in out:
            save(read, each)


app = typer.Typer(add_completion=False, no_args_is_help=True, help="Run a PyTorch program in less memory, and say how much before it runs.")
app.command("optimize")(optimize_command)
app.command("explain")(explain_command)
app.command("needs")(needs_command)
app.command("compile")(compile_command)
app.command("report")(report_command)
app.command("devices")(devices_command)
app.command("order")(order_command)
app.command("place")(place_command)
app.command("edge")(edge_command)


def run() -> None:
    """Read the command line and do what it says. Raises SystemExit."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names come from the user's files, and not every terminal can write them
    if os.environ.get("COLUMNS", "1").strip("0") == "":
        del os.environ["COLUMNS"]  # of a terminal without columns: in none of them nothing can be told
    app()
