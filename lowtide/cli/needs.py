"""`lowtide needs MODEL`: on which GPUs a model trains, before there is one."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from lowtide.base.files import write_whole
from lowtide.cli.output import STANDARD_OUTPUT, STATE, check_targets, memory_limits, prints_aside, refuse, say, write_json
from lowtide.errors import LowtideError

if TYPE_CHECKING:
    from lowtide.api.needs import Needs


def needs_command(
    model: Annotated[str, typer.Argument(help="a transformers configuration (folder, config.json), a timm model, or module:function")],
    batch_size: Annotated[int | None, typer.Option(min=1, help="examples in a batch, 1 by default")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="tokens of a text, 1024 by default")] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="adamw (the default), adamw-fused, adafactor, momentum, sgd; none for inference")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="amp (float32 weights, bfloat16 autocast; the default), bfloat16 or float32")] = None,
    cards: Annotated[str | None, typer.Option(help="names that `lowtide devices` lists, with commas between")] = None,
    memory: Annotated[str | None, typer.Option(metavar="host=AMOUNT", help="what copies may pin of the host: host=48GiB")] = None,
    swap: Annotated[bool, typer.Option(help="let tensors go to the host and back")] = True,
    state: Annotated[str, typer.Option(metavar="PLACE", help=STATE)] = "device",
    json_out: Annotated[str | None, typer.Option("--json", metavar="FILE", help="write it all as JSON; - for standard output")] = None,
    html: Annotated[str | None, typer.Option(metavar="FILE", help="write a page")] = None,
) -> None:
    """Say what a model needs: by card, whether it fits, how, and how long a step takes. Nothing is run, and no GPU is needed."""
    from lowtide.api.needs import needs
    from lowtide.api.options import Run
    from lowtide.cli.workload import builder, users_code
    from lowtide.cost.presets import CARDS
    from lowtide.integrations.architectures import Setting, named_model

    try:
        check_targets({"--json": json_out, "--html": html})
        with prints_aside(json_out):
            if ":" in model:
                if (length, optimizer, dtype) != (None, None, None):
                    raise ValueError(f"{model}: expected no --length, --optimizer or --dtype, as the function makes what is trained")
                work, what = builder(model, batch_size, fake=True)(), f"as {model} returns it"
            else:
                work, what = named_model(model, Setting(batch_size or 1, length or 1024, optimizer or "adamw", dtype or "amp"))
            with users_code(model):
                answer = needs(
                    work.model,
                    work.batch,
                    loss=work.loss,
                    optimizer=work.optimizer,
                    cards=CARDS if cards is None else [each.strip() for each in cards.split(",")],
                    memory=memory_limits(memory),
                    run=Run(swap=swap, state=state),
                )
        title = f"{_called(model)}: {what}"
        if json_out is not None:
            write_json(json_out, {"program": title} | answer.figures())
        if html is not None:
            from lowtide.report.page import needs_page

            write_whole(html, needs_page(title, answer.headline, answer.kinds, answer.rows(), answer.assumed))
    except (LowtideError, OSError, TypeError, ValueError) as error:
        refuse(error)
    if json_out != STANDARD_OUTPUT:
        _show(title, answer)


def _called(model: str) -> str:
    """The name of a configuration is its folder's."""
    path = Path(model)
    return model if ":" in model else path.resolve().parent.name if path.is_file() else path.name


def _show(title: str, answer: Needs) -> None:
    say(title, answer.headline, answer.kinds)
    table = Table("card", "memory", "usable", "", "a step")
    for row in answer.rows():
        table.add_row(*map(escape, row))
    Console().print(table)
    say(answer.assumed)
