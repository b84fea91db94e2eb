"""`lowtide compile SPEC --out FILE`: an inference function as a file, which runs without the model's code."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from lowtide.cli.output import STANDARD_OUTPUT, check_targets, prints_aside, refuse, write_json
from lowtide.errors import LowtideError
from lowtide.plan.summary import bytes_text

if TYPE_CHECKING:
    from lowtide.api.compare import Workload


def compile_command(
    spec: Annotated[str, typer.Argument(help="model.py:function, which returns (model, batch), the model in eval mode")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="where the function goes, such as model.lowtide")],
    batch_size: Annotated[int | None, typer.Option(min=1, help="call the function with this batch_size")] = None,
    json_out: Annotated[str | None, typer.Option("--json", metavar="FILE", help="write the figures as JSON; - for standard output")] = None,
) -> None:
    """Generate kernels for inference on a CPU, and write the function with its weights to a file for `lowtide.load_frozen`.

    The file is read again, run on the batch, and compared with eager's result and float64's.
    """
    # These import torch, which takes seconds: other commands do without it.
    from lowtide.api.optimize import optimize
    from lowtide.capture.batches import positional_and_keyword
    from lowtide.cli.workload import builder, users_code

    try:
        check_targets({"--out": out, "--json": json_out})
        with prints_aside(json_out):
            work = builder(spec, batch_size, fake=False)()
            _check_infers(work, spec)
            with users_code(spec):
                step = optimize(work.model, work.batch, exact=False)
            args, kwargs = positional_and_keyword(work.batch)
            verification = step.verify(*args, **kwargs)
            step.save_frozen(out, *args, **kwargs)
        figures = _figures(out, work) | {"deviation": verification.worst.from_eager, "eagers_own": verification.worst.eagers_own}
        if json_out is not None:
            write_json(json_out, figures)
    except (LowtideError, OSError, ValueError) as error:
        refuse(error)
    if json_out != STANDARD_OUTPUT:
        typer.echo(f"{out}: {bytes_text(figures['file_bytes'])}; loaded it holds {bytes_text(figures['held_bytes'])}")
        typer.echo(verification)


def _check_infers(work: Workload, spec: str) -> None:
    """Exits for a workload that trains, or whose model would draw, or update statistics, as in training."""
    if work.optimizer is not None:
        refuse(f"{spec}: expected (model, batch), to infer; got a loss and an optimizer, too: return (model.eval(), batch)")
    if any(module.training for module in work.model.modules()):
        refuse(f"{spec}: expected a model in eval mode, got one in training mode: return model.eval()")


def _figures(out: Path, work: Workload) -> dict[str, Any]:
    """Of the file as it reads: that it does, and that it runs on the batch, is seen here."""
    from lowtide.api.load import load_frozen
    from lowtide.capture.batches import positional_and_keyword

    args, kwargs = positional_and_keyword(work.batch)
    loaded = load_frozen(out)
    loaded(*args, **kwargs)
    return {"file_bytes": out.stat().st_size, "held_bytes": loaded.held_bytes}
