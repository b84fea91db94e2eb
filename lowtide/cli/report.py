"""`lowtide report PLAN.json OUT ...`: a saved plan as a page, a picture, a trace or a snapshot."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from lowtide.cli.output import check_targets, refusals
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
