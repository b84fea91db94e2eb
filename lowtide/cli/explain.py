"""`lowtide explain SPEC`: where a training step's memory peaks as it stands, and what would lower it; nothing is run."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lowtide.cli.output import STANDARD_OUTPUT, STATE, check_targets, memory_limits, prints_aside, refuse, say, write_json
from lowtide.errors import LowtideError
from lowtide.plan.summary import alike_at, bytes_text, snapshot_line

if TYPE_CHECKING:
    from lowtide.api.explain import Explanation
    from lowtide.plan.snapshot import Snapshot

_TENSORS = 10  # lines of the table


def explain_command(
    spec: Annotated[str, typer.Argument(help="module:function, which returns (model, batch, loss, optimizer)")],
    batch_size: Annotated[int | None, typer.Option(min=1, help="call the function with this batch_size")] = None,
    on: Annotated[str | None, typer.Option(help="with --fake: the device to be followed on, cpu by default; cuda needs no GPU")] = None,
    fake: Annotated[bool, typer.Option("--fake", help='call the function with device="meta": the model takes no memory')] = False,
    memory: Annotated[
        str | None, typer.Option(metavar="AMOUNT", help="what it is to fit in: 8GiB, 60% of its own peak, or cuda=24GiB,host=48GiB")
    ] = None,
    accumulate: Annotated[int, typer.Option(min=1, help="micro-batches")] = 1,
    device: Annotated[str | None, typer.Option(help="the machine, of those that `lowtide devices` lists; this one by default")] = None,
    swap: Annotated[bool, typer.Option(help="let tensors go to the host and back, where the machine has memory of its own")] = True,
    state: Annotated[str, typer.Option(metavar="PLACE", help=STATE)] = "device",
    effort: Annotated[str, typer.Option(metavar="LEVEL", help="how far to look: quick, normal or thorough")] = "quick",
    dynamic: Annotated[
        str | None, typer.Option(metavar="JSON", help='extents that vary, by argument and dimension: \'{"0": {"0": [2, 64]}}\'')
    ] = None,
    json_out: Annotated[str | None, typer.Option("--json", metavar="FILE", help="write it all as JSON; - for standard output")] = None,
) -> None:
    """Say why a training step does not fit, and what would help, without running it."""
    # These import torch, which takes seconds: other commands do without it.
    from lowtide.api.explain import explain
    from lowtide.api.options import Planning, Run, Shapes, Training
    from lowtide.cli.workload import builder, dynamic_of, users_code

    try:
        check_targets({"--json": json_out})
        with prints_aside(json_out):
            work = builder(spec, batch_size, fake)()
            with users_code(spec):
                explanation = explain(
                    work.model,
                    work.batch,
                    loss=work.loss,
                    optimizer=work.optimizer,
                    memory=memory_limits(memory),
                    training=Training(accumulate=accumulate),
                    shapes=Shapes(dynamic=dynamic_of(dynamic)),
                    planning=Planning(effort=effort, device=on, simulate=device),
                    run=Run(swap=swap, state=state),
                )
        if json_out is not None:
            write_json(json_out, explanation.figures())
    except (LowtideError, OSError, TypeError, ValueError) as error:
        refuse(error)
    if json_out != STANDARD_OUTPUT:
        _show(explanation)


def _show(explanation: Explanation) -> None:
    say(explanation.headline, snapshot_line(explanation.peak))
    Console().print(_tensors(explanation.peak))
    say(*explanation.part_lines())
    table = Table("what would help", "peak", "", "time", "lowtide.optimize(...)")
    for column in table.columns:
        column.overflow = "fold"
    for row in explanation.remedy_rows():
        table.add_row(*map(escape, row))
    Console().print(table)
    say(*explanation.foot_lines())


def _tensors(peak: Snapshot) -> Table:
    """What stands at the peak, the largest first, those of repeated blocks together."""
    table = Table("bytes", "what", "kind", "made by")
    groups = alike_at(peak)
    for column in table.columns:
        column.overflow = "fold"
    for group in groups[:_TENSORS]:
        table.add_row(bytes_text(group.nbytes), *map(escape, (group.spec, group.tensors[0].kind.value, group.origin)))
    rest = [tensor for group in groups[_TENSORS:] for tensor in group.members]
    if rest:
        table.add_row(bytes_text(sum(tensor.nbytes for tensor in rest)), f"{len(rest)} more", "", "")
    return table
