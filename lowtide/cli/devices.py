"""`lowtide devices`: the machines that can be planned for, and what this one does."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from lowtide.cli.output import STANDARD_OUTPUT, check_targets, refuse, write_json
from lowtide.cost.device import Device
from lowtide.cost.presets import PRESETS
from lowtide.errors import LowtideError


def devices_command(
    measure: Annotated[bool, typer.Option(help="measure this machine, or read what was measured before")] = True,
    json_out: Annotated[str | None, typer.Option("--json", metavar="FILE", help="write the figures as JSON; - for standard output")] = None,
) -> None:
    """List machines as numbers: rates that their makers state, and those that this machine reaches."""
    try:
        check_targets({"--json": json_out})
        devices = [*(_measured() if measure else []), *PRESETS]
        if json_out is not None:
            write_json(json_out, {device.name: _figures(device) for device in devices})
    except (LowtideError, OSError) as error:
        refuse(error)
    if json_out != STANDARD_OUTPUT:
        _show(devices)


def _measured() -> list[Device]:
    from lowtide.cost.timings import devices_here  # imports torch

    return devices_here()


def _figures(device: Device) -> dict[str, Any]:
    return {
        "float32_flops_per_s": device.flops_per_s["float32"],
        "bfloat16_flops_per_s": device.flops_per_s["bfloat16"],
        "bandwidth_bytes_per_s": device.bandwidth_bytes_per_s,
        "to_host_bytes_per_s": device.to_host_bytes_per_s,
        "from_host_bytes_per_s": device.from_host_bytes_per_s,
        "can_swap": device.can_swap,
        "launch_us": device.launch_us,
        "issue_us": device.issue_us,
        "half_flops": device.half_flops,
        "efficiency": device.efficiency,
        "granule_bytes": device.granule_bytes,
        "memory_bytes": device.memory_bytes,
    }


_UNITS = """matrix products in TFLOP/s; memory and the link to the host, each way, in GB/s; launch in microseconds
half: MFLOP of an operator that runs at half the rate; reached: the share of its maker's figures that kernels reach"""


def _show(devices: list[Device]) -> None:
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
