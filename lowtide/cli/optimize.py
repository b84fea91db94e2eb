"""The verbs on a program that SPEC says: in less memory, measured beside eager PyTorch; explained beforehand; or as a file.

`lowtide optimize SPEC` and `lowtide explain SPEC` (where a training step's memory peaks, and what would help) are of training steps,
`lowtide compile SPEC --out FILE` of an inference function, which runs without the model.
"""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from lowtide.base.files import write_whole
from lowtide.cli import output
from lowtide.cli.output import STANDARD_OUTPUT, check_targets, memory_limits, prints_aside, refusals, refuse, say, write_json

if TYPE_CHECKING:
    from lowtide.api.compare import Comparison, Workload
    from lowtide.api.step import Step
    from lowtide.planning.request import MemoryLimits


def optimize_command(
    spec: Annotated[str, typer.Argument(help="module:function, which returns (model, batch, loss, optimizer)")],
    batch_size: output.BatchSize = None,
    memory: Annotated[
        str | None, typer.Option(metavar="AMOUNT", help="the most the step may take: 8GiB, 60% of its own peak, or cuda=24GiB,host=48GiB")
    ] = None,
    latency: Annotated[float | None, typer.Option(help="the most time, as a multiple of that without recomputation: 1.1")] = None,
    exact: Annotated[bool, typer.Option(help="eager's numbers to the last bit; else rewrites may round otherwise")] = True,
    kernels: Annotated[
        str, typer.Option(metavar="KIND", help="auto, eager (torch's), or with --no-exact compiled: norms, activations and updates")
    ] = "auto",
    swap: output.Swap = True,
    state: output.State = "device",
    effort: Annotated[str, typer.Option(metavar="LEVEL", help="how far to look under a limit: quick, normal or thorough")] = "normal",
    dynamic: output.Dynamic = None,
    arena: Annotated[bool, typer.Option("--arena", help="serve the step's memory from one block, at planned addresses")] = False,
    device: Annotated[str | None, typer.Option(help="with --simulate: the machine, of those that `lowtide devices` lists")] = None,
    simulate: Annotated[bool, typer.Option("--simulate", help="plan for --device in place of this machine; nothing is run")] = False,
    on: output.FollowedOn = None,
    fake: Annotated[bool, typer.Option("--fake", help='call the function with device="meta": planned without memory, nothing run')] = False,
    measure: Annotated[bool, typer.Option(help="run eager PyTorch and lowtide and measure both")] = True,
    repeats: Annotated[int, typer.Option(min=1, help="timed steps of each")] = 5,
    save: Annotated[Path | None, typer.Option(help="write the plan here, as JSON")] = None,
    program: Annotated[Path | None, typer.Option(help="write the generated program here")] = None,
    json_out: output.JsonOut = None,
) -> None:
    """Capture a training step, order it for the least peak, and show what that gains."""
    # These import torch, which takes seconds: other commands do without it.
    from lowtide.api.arguments import check_kernels
    from lowtide.api.compare import compare
    from lowtide.api.optimize import optimize
    from lowtide.api.options import Planning, Run, Shapes
    from lowtide.cli.workload import builder, dynamic_of, users_code
    from lowtide.cost.presets import preset

    limits = memory_limits(memory)
    if simulate != (device is not None):
        refuse("--device and --simulate: expected both, to plan for another machine, or neither")
    with refusals(ValueError):
        _check_limits(limits, latency, effort)
        machine = None if device is None else preset(device, "--device")
    try:
        check_kernels(Run(kernels=kernels).kernels, exact, varies=dynamic is not None, tries=not fake and machine is None)
    except ValueError as error:
        refuse(f"--{error}")
    shapes, planning = Shapes(dynamic=dynamic_of(dynamic)), Planning(effort=effort, device=on, simulate=machine)
    with refusals(ValueError):
        run = Run(kernels=kernels, arena="always" if arena else "never", swap=swap, state=state)
        check_targets({"--save": save, "--program": program, "--json": json_out})
        with prints_aside(json_out):
            build = builder(spec, batch_size, fake)
            workload = build()
            with users_code(spec):
                step = optimize(
                    workload.model, workload.batch, loss=workload.loss, optimizer=workload.optimizer,
                    memory=limits, latency=latency, exact=exact, shapes=shapes, planning=planning, run=run,
                )  # fmt: skip
                compared = compare(build(), workload, step, repeats) if measure and not fake and machine is None else None
        if save is not None:
            step.plan.save(save)
        if program is not None:
            write_whole(program, step.source)
        if json_out is not None:
            write_json(json_out, _figures(step, compared))
    if json_out != STANDARD_OUTPUT:
        _show(step, compared)


def _check_limits(memory: MemoryLimits, latency: float | None, effort: str) -> None:
    from lowtide.planning.request import Effort, Limit, checked_latency

    Effort.of(effort)
    checked_latency(latency)
    if Limit.of(memory).is_of_memory and latency is not None:
        refuse("--memory and --latency: expected one limit or none, got both")


def _show(step: Step, compared: Comparison | None) -> None:
    say(step.plan, *step.ranges)
    for each in () if compared is None else (compared, step.arena):
        if each is not None:
            Console().print(str(each), highlight=False)


def _figures(step: Step, compared: Comparison | None) -> dict[str, Any]:
    plan = step.plan
    figures: dict[str, Any] = {
        "operators": len(plan.graph.nodes),
        "resident_bytes": plan.resident_bytes,
        "eager_peak_bytes": plan.eager_peak_bytes,
        "peak_bytes": plan.peak_bytes,
        "lower_bound_bytes": plan.lower_bound_bytes,
        "pinned_bytes": plan.pinned_bytes,
        "host_bytes": plan.host_bytes,
        "status": plan.status,
        "seconds": step.seconds,
    }
    if plan.peak is not None:
        figures["peak"] = asdict(plan.peak)
    if plan.cost_report is not None:
        figures |= {"time_us": plan.cost_report.time_us, "order_us": plan.cost_report.order_us, "recomputed": plan.cost_report.recomputed}
        figures |= {"host_frontier": plan.cost_report.host_frontier}
        figures |= {"frontier": plan.cost_report.frontier, "evictions": [asdict(eviction) for eviction in plan.cost_report.evictions]}
    return figures | ({} if compared is None else compared.figures())


def explain_command(
    spec: Annotated[str, typer.Argument(help="module:function, which returns (model, batch, loss, optimizer)")],
    batch_size: output.BatchSize = None,
    on: output.FollowedOn = None,
    fake: Annotated[bool, typer.Option("--fake", help='call the function with device="meta": the model takes no memory')] = False,
    memory: Annotated[
        str | None, typer.Option(metavar="AMOUNT", help="what it is to fit in: 8GiB, 60% of its own peak, or cuda=24GiB,host=48GiB")
    ] = None,
    accumulate: Annotated[int, typer.Option(min=1, help="micro-batches")] = 1,
    device: Annotated[str | None, typer.Option(help="the machine, of those that `lowtide devices` lists; this one by default")] = None,
    swap: output.Swap = True,
    state: output.State = "device",
    effort: Annotated[str, typer.Option(metavar="LEVEL", help="how far to look: quick, normal or thorough")] = "quick",
    dynamic: output.Dynamic = None,
    json_out: output.JsonOut = None,
) -> None:
    """Say why a training step does not fit, and what would help, without running it."""
    # These import torch, which takes seconds: other commands do without it.
    from lowtide.api.explain import explain
    from lowtide.api.options import Planning, Run, Shapes, Training
    from lowtide.cli.workload import builder, dynamic_of, users_code

    with refusals(TypeError, ValueError):
        check_targets({"--json": json_out})
        with prints_aside(json_out):
            work = builder(spec, batch_size, fake)()
            with users_code(spec):
                explanation = explain(
                    work.model, work.batch, loss=work.loss, optimizer=work.optimizer, memory=memory_limits(memory),
                    training=Training(accumulate=accumulate), shapes=Shapes(dynamic=dynamic_of(dynamic)),
                    planning=Planning(effort=effort, device=on, simulate=device), run=Run(swap=swap, state=state),
                )  # fmt: skip
        if json_out is not None:
            write_json(json_out, explanation.figures())
    if json_out != STANDARD_OUTPUT:
        say(explanation)


def compile_command(
    spec: Annotated[str, typer.Argument(help="model.py:function, which returns (model, batch), the model in eval mode")],
    out: Annotated[Path, typer.Option(metavar="FILE", help="where the function goes, such as model.lowtide")],
    batch_size: output.BatchSize = None,
    json_out: output.JsonOut = None,
) -> None:
    """Generate kernels for inference on a CPU, and write the function with its weights to a file for `lowtide.load_frozen`.

    The file is read again, run on the batch, and compared with eager's result and float64's.
    """
    # These import torch, which takes seconds: other commands do without it.
    from lowtide.api.load import frozen_needs, load_frozen
    from lowtide.api.optimize import optimize
    from lowtide.capture.batches import positional_and_keyword
    from lowtide.cli.workload import builder, users_code

    with refusals(ValueError):
        check_targets({"--out": out, "--json": json_out})
        with prints_aside(json_out):
            work = builder(spec, batch_size, fake=False)()
            _check_infers(work, spec)
            with users_code(spec):
                step = optimize(work.model, work.batch, exact=False)
            args, kwargs = positional_and_keyword(work.batch)
            verification = step.verify(*args, **kwargs)
            step.save_frozen(out, *args, **kwargs)
        load_frozen(out)(*args, **kwargs)  # that the file reads, and runs on the batch, is seen here
        needs = frozen_needs(out)
        if json_out is not None:
            deviations = {"deviation": verification.worst.from_eager, "eagers_own": verification.worst.eagers_own}
            write_json(json_out, asdict(needs) | deviations)
    if json_out != STANDARD_OUTPUT:
        typer.echo(f"{out} {needs}")
        typer.echo(verification)


def _check_infers(work: Workload, spec: str) -> None:
    """Exits for a workload that trains, or whose model would draw, or update statistics, as in training."""
    if work.optimizer is not None:
        refuse(f"{spec}: expected (model, batch), to infer; got a loss and an optimizer, too: return (model.eval(), batch)")
    if any(module.training for module in work.model.modules()):
        refuse(f"{spec}: expected a model in eval mode, got one in training mode: return model.eval()")
