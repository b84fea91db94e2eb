"""`lowtide needs MODEL`: on which GPUs a model trains, before there is one. `lowtide devices`: the machines that can be planned for."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lowtide.base.files import write_whole
from lowtide.cli import output
from lowtide.cli.output import STANDARD_OUTPUT, check_targets, memory_limits, prints_aside, refusals, refuse, say, write_json
from lowtide.cost.device import Device
from lowtide.cost.presets import PRESETS


def needs_command(
    model: Annotated[
        str, typer.Argument(help="a transformers configuration (folder, config.json), a timm model, module:function, or a .lowtide file")
    ],
    batch_size: Annotated[int | None, typer.Option(min=1, help="examples in a batch, 1 by default")] = None,
    length: Annotated[int | None, typer.Option(min=1, help="tokens of a text, 1024 by default")] = None,
    optimizer: Annotated[
        str | None, typer.Option(help="adamw (the default), adamw-fused, adafactor, momentum, sgd; none for inference")
    ] = None,
    dtype: Annotated[str | None, typer.Option(help="amp (float32 weights, bfloat16 autocast; the default), bfloat16 or float32")] = None,
    cards: Annotated[str | None, typer.Option(help="names that `lowtide devices` lists, with commas between")] = None,
    memory: Annotated[str | None, typer.Option(metavar="host=AMOUNT", help="what copies may pin of the host: host=48GiB")] = None,
    swap: output.Swap = True,
    state: output.State = "device",
    json_out: output.JsonOut = None,
    html: Annotated[str | None, typer.Option(metavar="FILE", help="write a page")] = None,
) -> None:
    """Say what a model needs: by card, whether it fits, how, and how long a step takes. Nothing is run, and no GPU is needed.

    Of a file that `lowtide compile` wrote: what the function takes of this machine's memory once it is loaded.
    """
    if model.endswith(".lowtide"):
        if (batch_size, length, optimizer, dtype, cards, memory, html) != (None,) * 7:
            refuse(f"{model}: expected no option but --json: a file says by itself what the function is given")
        _say_of_file(model, json_out)
        return
    from lowtide.api.needs import needs
    from lowtide.api.options import Run
    from lowtide.cli.workload import builder, users_code
    from lowtide.cost.presets import CARDS
    from lowtide.integrations.architectures import Setting, named_model

    with refusals(TypeError, ValueError):
        check_targets({"--json": json_out, "--html": html})
        with prints_aside(json_out):
            if ":" in model:
                if (length, optimizer, dtype) != (None, None, None):
                    raise ValueError(f"{model}: expected no --length, --optimizer or --dtype, as the function makes what is trained")
                work, what = builder(model, batch_size, fake=True, asks_fake="needs, which runs nothing")(), f"as {model} returns it"
            else:
                work, what = named_model(model, Setting(batch_size or 1, length or 1024, optimizer or "adamw", dtype or "amp"))
            with users_code(model):
                answer = needs(
                    work.model, work.batch, loss=work.loss, optimizer=work.optimizer,
                    cards=CARDS if cards is None else [each.strip() for each in cards.split(",")],
                    memory=memory_limits(memory), run=Run(swap=swap, state=state),
                )  # fmt: skip
        title = f"{_called(model)}: {what}"
        if json_out is not None:
            write_json(json_out, {"program": title} | answer.figures())
        if html is not None:
            from lowtide.report.page import needs_page

            write_whole(html, needs_page(title, answer.headline, answer.kinds, answer.rows(), answer.assumed))
    if json_out != STANDARD_OUTPUT:
        say(title, answer)


def _say_of_file(path: str, json_out: str | None) -> None:
    from lowtide.api.load import frozen_needs

    with refusals():
        needs = frozen_needs(path)
        if json_out is not None:
            write_json(json_out, asdict(needs))
    if json_out != STANDARD_OUTPUT:
        say(f"{path} {needs}")


def _called(model: str) -> str:
    """The name of a configuration is its folder's."""
    path = Path(model)
    return model if ":" in model else path.resolve().parent.name if path.is_file() else path.name


def devices_command(
    measure: Annotated[bool, typer.Option(help="measure this machine, or read what was measured before")] = True,
    json_out: output.JsonOut = None,
) -> None:
    """List machines as numbers: rates that their makers state, and those that this machine reaches."""
    with refusals():
        check_targets({"--json": json_out})
        devices = [*(_measured() if measure else []), *PRESETS]
        if json_out is not None:
            write_json(json_out, {device.name: _figures(device) for device in devices})
    if json_out != STANDARD_OUTPUT:
        _show_devices(devices)


def _measured() -> list[Device]:
    from lowtide.cost.timings import devices_here  # imports torch

    return devices_here()


_FIGURES = (
    "bandwidth_bytes_per_s", "to_host_bytes_per_s", "from_host_bytes_per_s", "can_swap", "launch_us", "issue_us", "half_flops",
    "efficiency", "granule_bytes", "memory_bytes",
)  # fmt: skip


def _figures(device: Device) -> dict[str, Any]:
    rates = {f"{dtype}_flops_per_s": device.flops_per_s[dtype] for dtype in ("float32", "bfloat16")}
    return rates | {name: getattr(device, name) for name in _FIGURES}


_UNITS = """matrix products in TFLOP/s; memory and the link to the host, each way, in GB/s; launch in microseconds
half: MFLOP of an operator that runs at half the rate; reached: the share of its maker's figures that kernels reach"""


def _show_devices(devices: list[Device]) -> None:
    table = Table("device", "float32", "bfloat16", "memory", "link", "launch", "half", "reached", "GiB", caption=_UNITS)
    for column in table.columns[1:]:
        column.justify = "right"
    for device in devices:
        table.add_row(
            device.name,
            *(f"{device.flops_per_s[dtype] / 1e12:.3g}" for dtype in ("float32", "bfloat16")),
            f"{device.bandwidth_bytes_per_s / 1e9:.4g}",
            f"{device.to_host_bytes_per_s / 1e9:.3g}" if device.can_swap else "none",
            f"{device.launch_us:.2g}",
            f"{device.half_flops / 1e6:.2g}" if device.half_flops else "",
            f"{device.efficiency:.0%}",
            f"{device.memory_bytes / 2**30:.0f}" if device.memory_bytes else "",
        )
    Console().print(table)
