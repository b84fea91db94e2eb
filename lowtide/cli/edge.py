"""`lowtide edge MODEL.onnx --memory sram=512KiB@2GB/s`: a network's order and addresses in the memories of a small device."""

from __future__ import annotations

import re
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, cast

import typer
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from lowtide.api.edge import plan_edge
from lowtide.base.files import write_whole
from lowtide.base.messages import bytes_text, time_text
from lowtide.cli.output import STANDARD_OUTPUT, JsonOut, check_targets, exact_bytes, printable, refuse, short_name, write_answer
from lowtide.cli.solvers import facts_table
from lowtide.edge.output import to_header, to_json, to_page
from lowtide.edge.plan import EdgeBlock, EdgePlan, Space
from lowtide.errors import BudgetError, FormatError, LowtideError

if TYPE_CHECKING:
    from lowtide.edge.onnx import Views

_DOES_NOT_FIT = 3
_SHOWN = 8  # blocks of the fullest step
_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30}
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9}


def parse_memory(text: str, option: str = "--memory") -> Space:
    """A memory as the command line names it: `sram=512KiB@2GB/s`, `sram=512KiB@2GB/s,1GB/s` with a rate to write, `sram=any@2GB/s`."""
    match = re.fullmatch(r"([^=@]+)=([^@]+)(?:@([^,]+)(?:,(.+))?)?", text)
    if match is None:
        raise FormatError(f"{option} {text}: expected NAME=SIZE@RATE, as in sram=512KiB@2GB/s")
    name, size, read, write = match.groups()
    capacity = None if size == "any" else parse_size(f"{option} {text}", size)
    reads = None if read is None else parse_rate(f"{option} {text}", read)
    return Space(name, capacity, reads, reads if write is None else parse_rate(f"{option} {text}", write))


def parse_size(where: str, text: str) -> int:
    """Bytes: `512KiB`, `8MiB`, `1000B`, `64kB`, or a number alone."""
    number, unit, binary = _parsed(where, text, r"\s*([kKMG]?)(i?)B?", "a size such as 512KiB")
    return int(Fraction(number) * (_BINARY if binary else _DECIMAL)[unit.lower()])


def parse_rate(where: str, text: str) -> float:
    """Bytes a second: `2GB/s`, `100MB/s`, `0.1GB/s`, `1GiB/s`."""
    number, unit, binary = _parsed(where, text, r"\s*([kKMG]?)(i?)B/s", "a rate such as 2GB/s")
    return float(number) * (_BINARY if binary else _DECIMAL)[unit.lower()]


def parse_share(text: str) -> float:
    """A share of a whole: `10%`, `0.1`."""
    number, percent = _parsed("--extra-macs", text, "(%?)", "a share such as 10%")
    return float(number) / (100 if percent else 1)


def parse_count(text: str) -> float:
    """Multiplications a second: `1G`, `400M`, or a number alone."""
    number, unit = _parsed("--macs-per-s", text, "([kKMG]?)", "a number such as 1G")
    return float(number) * _DECIMAL[unit.lower()]


def _parsed(where: str, text: str, unit: str, expected: str) -> tuple[str, ...]:
    """A number and what stands behind it, the groups of a pattern. Raises FormatError."""
    if (match := re.fullmatch(rf"(\d+(?:\.\d+)?){unit}", text)) is None:
        raise FormatError(f"{where}: expected {expected}, got {text!r}")
    return match.groups()


def edge_command(
    model: Annotated[Path, typer.Argument(metavar="MODEL.onnx", help="the network", show_default=False)],
    memory: Annotated[
        list[str],
        typer.Option(metavar="NAME=SIZE@RATE", help="a memory: sram=512KiB@2GB/s; SIZE may be any; a second rate to write: @2GB/s,1GB/s"),
    ],
    dma: Annotated[bool, typer.Option("--dma", help="blocks are copied while operators run")] = False,
    align: Annotated[int, typer.Option(metavar="BYTES", help="addresses are multiples of it")] = 1,
    macs_per_s: Annotated[str | None, typer.Option(metavar="N", help="multiplications a second: 1G; else they take no time")] = None,
    flash: Annotated[str | None, typer.Option(metavar="RATE", help="how fast weights are read: 40MB/s; else that takes no time")] = None,
    constants: Annotated[
        str | None,
        typer.Option(
            metavar="NAME=SIZE@RATE", help="a memory of weights, flash=1MiB@50MB/s; in place of --flash: some may lie in --memory"
        ),
    ] = None,
    least: Annotated[str | None, typer.Option(metavar="NAME", help="make the bytes of this memory least, in place of the time")] = None,
    within: Annotated[float | None, typer.Option(metavar="US", help="the time for --least, in microseconds")] = None,
    size: Annotated[list[str] | None, typer.Option(metavar="AXIS=N", help="the extent of a symbolic axis, such as batch=1")] = None,
    views: Annotated[
        str, typer.Option(metavar="WHICH", help="results that are their input's bytes: none; reshape; slices, Concat and Split among them")
    ] = "reshape",
    cut: Annotated[bool, typer.Option("--cut", help="convolutions and their like work slice by slice, with rings between them")] = False,
    extra_macs: Annotated[
        str, typer.Option(metavar="SHARE", help="multiplications that --cut may do again: 10%; least: as few as the memory's size asks for")
    ] = "0",
    inputs_outside: Annotated[
        bool, typer.Option("--inputs-outside", help="inputs are read where the caller has them, and lie in no memory")
    ] = False,
    json_out: JsonOut = None,
    header: Annotated[str | None, typer.Option(metavar="OUT.h", help="write the offsets as a C header")] = None,
    page: Annotated[str | None, typer.Option(metavar="OUT.html", help="write a page with a lane for each memory")] = None,
) -> None:
    """Order a network and place it in the memories of a small device. What does not fit has exit code 3, and is told what would."""
    try:
        check_targets({"--json": json_out, "--header": header, "--page": page}, model)
        if STANDARD_OUTPUT in (header, page):
            raise FormatError(f"{'--header' if header == STANDARD_OUTPUT else '--page'}: expected a file")
        if flash is not None and constants is not None:
            raise FormatError("--constants: expected it without --flash, as the memory has a rate of its own")
        memories = [replace(parse_memory(text), align_bytes=align) for text in memory]
        plan = plan_edge(
            model, memories, dma=dma, macs_per_s=None if macs_per_s is None else parse_count(macs_per_s),
            constants_bytes_per_s=None if flash is None else parse_rate("--flash", flash),
            constants=None if constants is None else replace(parse_memory(constants, "--constants"), align_bytes=align),
            least=least, within_us=within, sizes=dict(_axis(text) for text in size or ()), views=cast("Views", views),
            cut=cut, extra_macs=None if extra_macs == "least" else parse_share(extra_macs), inputs_outside=inputs_outside,
        )  # fmt: skip
        if json_out == STANDARD_OUTPUT:
            write_answer(to_json(plan))
        else:
            show(Console(), plan, cut=cut)
        if json_out not in (None, STANDARD_OUTPUT):
            write_whole(str(json_out), to_json(plan))
        for target, write in ((header, to_header), (page, to_page)):
            if target is not None:
                write_whole(target, write(plan))
    except BudgetError as error:
        typer.echo(f"lowtide: {printable(str(error))}", err=True)
        raise typer.Exit(_DOES_NOT_FIT) from error
    except (LowtideError, OSError, ImportError) as error:
        refuse(error)


def _axis(text: str) -> tuple[str, int]:
    name, _, extent = text.rpartition("=")
    if not name or not extent.isdecimal() or len(extent) > 18:
        raise FormatError(f"--size {text}: expected AXIS=N, as in batch=1")
    return name, int(extent)


def show(console: Console, plan: EdgePlan, *, cut: bool) -> None:
    """The plan for people: what is promised, each space, and the step at which most bytes are alive."""
    console.print(_facts(plan, cut))
    console.print(_spaces(plan))
    console.print(_fullest(plan))


def _facts(plan: EdgePlan, cut: bool) -> Table:
    bound = time_text(plan.bound / 1e6) if plan.least is None else exact_bytes(plan.bound)
    rows = {
        "network": printable(plan.graph.name),
        "operators": f"{len(plan.order):,}",
        "time": "unknown: a rate is missing" if plan.time_us is None else time_text(plan.time_us),
        "made least": "the time" if plan.least is None else f"the bytes of {plan.spaces[plan.least].name}",
        "lower bound": bound,
        "gap": f"{plan.gap:.2%}" if plan.gap else "0 %",
        "status": f"{plan.status.name.lower()}: {plan.status.value}",
        **({"cuts": f"{len(plan.cuts)}, {plan.extra_macs:.1%} of multiplications done again"} if cut else {}),
        **({"searched": "cuts of up to 64 operators in a row, each in bands of one size"} if cut else {}),
        "moves": f"{len(plan.moves):,}, {bytes_text(sum(plan.blocks[move.block].size_bytes for move in plan.moves))}",
    }
    return facts_table(rows)


def _spaces(plan: EdgePlan) -> Table:
    table = Table("memory", *(Column(label, justify="right") for label in ("size", "needed", "blocks", "free")))
    for index, (memory, arena_bytes) in enumerate(zip(plan.spaces, plan.arena_bytes, strict=True)):
        size = "any" if memory.capacity_bytes is None else bytes_text(memory.capacity_bytes)
        free = "" if memory.capacity_bytes is None else bytes_text(memory.capacity_bytes - arena_bytes)
        blocks = sum(block.space == index for block in plan.blocks)
        table.add_row(memory.name, size, exact_bytes(arena_bytes), f"{blocks:,}", free)
    return table


def _fullest(plan: EdgePlan) -> Table:
    """What lies in the memories at the step at which most bytes are alive."""
    alive = [_alive(plan, step) for step in range(len(plan.order))]
    step = max(range(len(alive)), key=lambda each: sum(block.size_bytes for block in alive[each]))
    node = plan.graph.nodes[plan.order[step]]
    title = Text(f"most bytes alive at step {step} of {len(alive)}: {short_name(f'{node.kind} {node.name}')}")
    table = Table(
        "tensor", "memory", *(Column(label, justify="right") for label in ("bytes", "offset", "from step", "to step")), title=title
    )
    table.title_justify, table.title_style = "left", ""
    for block in alive[step][:_SHOWN]:
        name = short_name(plan.graph.tensors[block.tensors[0]].name) if block.tensors else "workspace"
        figures = (f"{block.size_bytes:,}", f"{block.offset_bytes:,}", str(block.start), str(block.end - 1))
        table.add_row(Text(name), plan.spaces[block.space].name, *figures)
    if len(alive[step]) > _SHOWN:
        table.add_row(f"{len(alive[step]) - _SHOWN} more", "", f"{sum(block.size_bytes for block in alive[step][_SHOWN:]):,}", "", "", "")
    return table


def _alive(plan: EdgePlan, step: int) -> list[EdgeBlock]:
    return sorted((block for block in plan.blocks if block.start <= step < block.end), key=lambda block: -block.size_bytes)
