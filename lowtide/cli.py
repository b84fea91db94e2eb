"""The command line: `lowtide optimize SPEC`."""

from __future__ import annotations

import importlib
import json
import os
import sys
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console
from rich.table import Table

from lowtide.api.compare import Comparison, Workload, compare, plain_sgd, workload_of
from lowtide.api.optimize import optimize
from lowtide.api.step import Step
from lowtide.cost.peak import peak_tensors
from lowtide.errors import LowtideError
from lowtide.ir.files import write_whole

app = typer.Typer(add_completion=False, no_args_is_help=True, help="Run a PyTorch program in less memory, and say how much before it runs.")
_USAGE_ERROR = 2


@app.callback()
def _main() -> None:
    """Keeps `optimize` a command of its own, beside those to come."""


@app.command("optimize")
def optimize_command(
    spec: Annotated[
        str, typer.Argument(help="module:function returning (model, batch, loss, optimizer), or the name of a model of the bench")
    ],
    batch_size: Annotated[int, typer.Option(min=1, help="batch size of a bench model")] = 1,
    fake: Annotated[bool, typer.Option("--fake", help="plan a bench model on the meta device: no memory, nothing run")] = False,
    measure: Annotated[bool, typer.Option(help="run eager PyTorch and lowtide and measure both")] = True,
    repeats: Annotated[int, typer.Option(min=1, help="timed steps of each")] = 5,
    save: Annotated[Path | None, typer.Option(help="write the plan here, as JSON")] = None,
    program: Annotated[Path | None, typer.Option(help="write the generated program here")] = None,
    json_out: Annotated[str | None, typer.Option("--json", metavar="FILE", help="write the figures as JSON; - for standard output")] = None,
) -> None:
    """Capture a training step, order it for the least peak, and show what that gains."""
    try:
        build = _builder(spec, batch_size, fake)
        workload = build()
        step = optimize(workload.model, workload.batch, loss=workload.loss, optimizer=workload.optimizer)
        compared = compare(build(), workload, step, repeats) if measure and not fake else None
        if save is not None:
            step.plan.save(save)
        if program is not None:
            step.save_program(program)
        if json_out is not None:
            _write_json(json_out, _figures(step, compared))
    except (LowtideError, OSError) as error:
        _refuse(error)
    if json_out != "-":
        _show(step, compared)


def main() -> None:
    """Entry point of the `lowtide` command."""
    app()


def _builder(spec: str, batch_size: int, fake: bool) -> Any:
    """A function that makes the workload anew at each call: eager PyTorch and lowtide must start from the same weights."""
    if ":" not in spec:
        return lambda: _bench_workload(spec, batch_size, fake)
    if fake:
        _refuse(f"--fake is for models of the bench; {spec} decides itself where its model lies")
    module_name, _, function_name = spec.partition(":")
    sys.path.insert(0, os.getcwd())
    try:
        function = getattr(importlib.import_module(module_name), function_name)
    except (ImportError, AttributeError) as error:
        _refuse(f"cannot find {spec}: {error}")
    return lambda: workload_of(function)


def _bench_workload(name: str, batch_size: int, fake: bool) -> Workload:
    sys.path.insert(0, os.getcwd())
    try:
        models = importlib.import_module("bench.models")
    except ImportError as error:
        _refuse(
            f"{name!r} is no module:function, and the bench's models cannot be imported ({error}): run inside a checkout, "
            "with lowtide[bench] installed"
        )
    try:
        made = models.get(name).build(batch_size, "meta" if fake else "cpu")
    except KeyError as error:
        _refuse(str(error.args[0]))
    return Workload(made.model, made.batch, made.loss, plain_sgd(made.model))


def _show(step: Step, compared: Comparison | None) -> None:
    console = Console()
    console.print(str(step.plan), highlight=False)
    table = Table("largest at the peak", "bytes", "kind", "made by", "where", title=None)
    plan = step.plan
    for tensor in peak_tensors(plan.graph, plan.order, plan.workspace_bytes)[:8]:
        where = f"{tensor.source.module} {Path(tensor.source.file).name}:{tensor.source.line}" if tensor.source is not None else ""
        table.add_row(tensor.name, f"{tensor.nbytes:,}", str(getattr(tensor.kind, "value", tensor.kind)), tensor.op or "", where)
    console.print(table)
    if compared is not None:
        console.print(str(compared), highlight=False)


def _figures(step: Step, compared: Comparison | None) -> dict[str, Any]:
    plan = step.plan
    figures: dict[str, Any] = {
        "operators": len(plan.graph.nodes),
        "resident_bytes": plan.resident_bytes,
        "eager_peak_bytes": plan.eager_peak_bytes,
        "peak_bytes": plan.peak_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "status": plan.status,
        "seconds": step.seconds,
    }
    return figures | ({} if compared is None else compared.figures())


def _write_json(target: str, figures: dict[str, Any]) -> None:
    text = json.dumps(figures, indent=1)
    if target == "-":
        typer.echo(text)
    else:
        write_whole(target, text + "\n")


def _refuse(error: object) -> NoReturn:
    """One clear line and exit code 2."""
    typer.echo(f"lowtide: {error}", err=True)
    raise typer.Exit(_USAGE_ERROR)
