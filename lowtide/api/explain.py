"""Why a program does not fit, and what would help: before any optimisation, and without running it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn

from lowtide.api.arguments import check_arguments, check_scaler, check_swapping, device_of, warn_of_nowhere_to_swap
from lowtide.api.captures import Captures
from lowtide.api.explanation import Explanation, Remedy
from lowtide.api.machine import Machine
from lowtide.api.maker import PlanningSettings, StepMaker
from lowtide.api.options import Planning, Run, Shapes, Training, told_in_values
from lowtide.api.ranges.notation import varying_of
from lowtide.api.ranges.samples import largest
from lowtide.api.stages import Stages, wants_progress
from lowtide.base.garbage import collected_seldom
from lowtide.capture.batches import positional_and_keyword
from lowtide.capture.optimizers.wrappers import torch_optimizer
from lowtide.capture.program import TrainingProgram
from lowtide.cost.bodies import workspaces_within
from lowtide.cost.device import Device
from lowtide.cost.memory import order_problem
from lowtide.errors import BatchError, BudgetError, CaptureError
from lowtide.plan.cost_report import FrontierPoint
from lowtide.plan.plan import CostReport, Plan
from lowtide.planning.candidate import Candidate
from lowtide.planning.limits import Limit, Memory
from lowtide.runtime.batch import BatchSpec
from lowtide.schedule import Auto, Best, schedule
from lowtide.split.dimensions import Dimensions
from lowtide.split.graphs import loss_in_parts
from lowtide.split.names import ComponentTable

_LEVEL = "quick"  # of effort, where none is asked for: an explanation is waited for, and rounds what it says
_LEANER = 0.95  # of the peak by order alone: what splitting the loss has to come to
_SLOWER = (0.05, 0.10, 0.30)  # shares of time that are asked about


@told_in_values
@collected_seldom()
def explain(
    model: nn.Module,
    batch: Any,
    *,
    loss: Callable[..., Any] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None,
    memory: int | str | None = None,
    training: Training = Training(),
    shapes: Shapes = Shapes(),
    planning: Planning = Planning(),
    run: Run = Run(),
) -> Explanation:
    """Where the program's memory peaks as it stands, what is held then, and what would lower it; `print` it.

    The program is followed under fake tensors and the model does not run, so that it may lie on the meta device. Model, optimizer and
    random generators stay as they were. Each remedy was planned as `optimize` plans: each distinct operator is tried on made-up data
    for its time and its temporaries. With `Planning(workspaces=False)`, or another machine to `simulate`, nothing runs. Temporaries are
    not counted then, and times are by the rates of the machine. Arguments are those of `optimize`; beside them:

    memory: what it is to fit in. The answer then says whether it fits, and if not, the fastest way found to make it fit.
    shapes: of a range the largest shape is explained; a share of memory is of its peak.
    planning: `effort` is "quick" by default. `simulate` is the machine whose rates and allocator count; without it this one, whose
        rates are measured once.
    run: only `swap` and `swap_state` matter here.

    Raises CaptureError, BatchError and TypeError as `optimize` does; ValueError if `device` is a GPU that is not here and `simulate`
    names no machine.
    """
    check_arguments(model, loss, optimizer, training)
    check_scaler(training.scaler, optimizer, run.swap_state)
    trained: torch.optim.Optimizer | None = torch_optimizer(optimizer)
    check_swapping(model, trained, run.swap_state)
    limit = None if memory is None else Memory.of(memory)
    args, kwargs = positional_and_keyword(batch)
    args, kwargs = largest(args, kwargs, varying_of(shapes.dynamic, args, kwargs))
    target = device_of(model, planning.device)
    machine = planning.machine
    workspaces = planning.workspaces is not False
    warn_of_nowhere_to_swap(run.swap_state, target, machine is not None)
    _check_here(target, machine)
    BatchSpec.of(args, kwargs, target)  # refuses what is no batch
    program = None
    if loss is not None and trained is not None:
        program = TrainingProgram(model, loss, trained, training.after_backward, training.accumulate, training.scaler)
    stages = Stages(planning.callback, wants_progress(planning.progress))
    asked = PlanningSettings(Limit(latency=1.0), run.swap_state, planning.solver or Auto(), planning.sweeps(_LEVEL))
    maker = StepMaker(Captures(model, program, target, stages), Machine(target, machine, workspaces, run.swap, stages), asked, None, stages)
    captured, plan = maker.plan_of_most_steps(args, kwargs)
    assert plan.cost_report is not None, "a limit was asked for"
    peak = captured.eager(plan.granule_bytes).peak
    if peak is None:
        raise CaptureError("the program runs no operator on tensors: there is no peak to explain")
    memory_bytes = None if limit is None else limit.of_peak(peak.footprint_bytes)
    within = None if memory_bytes is None else _within(plan.cost_report, memory_bytes, memory)
    halved = _halved(maker, args, kwargs, memory_bytes if within is None else None)
    if within is None and halved is not None and memory_bytes is not None:
        within = halved if halved.peak_bytes <= memory_bytes else None
    return Explanation(
        peak=peak,
        resident_bytes=plan.resident_bytes,
        time_us=plan.cost_report.order_us,
        remedies=tuple(
            _with_swap(each, run)
            for each in (*_remedies(plan.cost_report), *_loss_split(captured, plan), *([halved] if halved is not None else []))
        ),
        frontier=plan.cost_report.frontier,
        memory_bytes=memory_bytes,
        within=None if within is None else _with_swap(within, run),
        device=plan.provenance.device,
        training=program is not None,
        workspaces=workspaces and machine is None,
        dimensions=ComponentTable.of(Dimensions.of(captured.graph)).short(),
    )


def _check_here(target: torch.device, machine: Device | None) -> None:
    """Rates are needed: of a machine that is here, or of one that is named."""
    if machine is None and target.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"device: expected a device that is here, or the name of a machine in `simulate` ('h200'), got {target}")


def _remedies(report: CostReport) -> list[Remedy]:
    """From the cheapest to the leanest, each leaner than the one before."""
    found = [_order_alone(report, f"memory={report.order_peak_bytes}")]
    for share in _SLOWER:
        point = next(each for each in report.frontier if each.time_us <= (1 + share) * report.order_us)
        found.append(_letting_go(f"+{share:.0%} time at most", point, report, f"latency={1 + share:g}"))
    found.append(_letting_go("least found", report.frontier[0], report, f"memory={report.frontier[0].peak_bytes}"))
    return [each for at, each in enumerate(found) if at == 0 or each.peak_bytes < found[at - 1].peak_bytes]


def _loss_split(captured: Candidate, plan: Plan) -> list[Remedy]:
    """The loss in parts, by order alone, where that is the answer: nothing where it spares little."""
    split = loss_in_parts(captured.graph)
    if split is None or plan.cost_report is None:
        return []
    problem = order_problem(split.graph, workspaces_within(split.graph.nodes, round_to=plan.granule_bytes), round_to=plan.granule_bytes)
    peak_bytes = schedule(problem, Best()).peak_bytes
    if peak_bytes > _LEANER * plan.cost_report.order_peak_bytes:
        return []
    return [Remedy(f"the loss split over {split.over}", peak_bytes, None, f"exact=False, memory={peak_bytes}")]


def _with_swap(remedy: Remedy, run: Run) -> Remedy:
    """The remedy with what else `optimize` has to be told, as this was."""
    more = ", run=lowtide.Run(swap_state=True)" if run.swap_state else "" if run.swap else ", run=lowtide.Run(swap=False)"
    return dataclasses.replace(remedy, arguments=remedy.arguments + more) if remedy.arguments else remedy


def _letting_go(how_far: str, point: FrontierPoint, report: CostReport, arguments: str) -> Remedy:
    return Remedy(f"eviction, {how_far}", point.peak_bytes, point.time_us / report.order_us - 1, arguments)


def _order_alone(report: CostReport, arguments: str) -> Remedy:
    """Within a limit: without one nothing that takes longer is done for it, so that the same order may need more."""
    us = min((each.time_us for each in report.frontier if each.peak_bytes <= report.order_peak_bytes), default=report.order_us)
    return Remedy("order alone", report.order_peak_bytes, us / report.order_us - 1, arguments)


def _within(report: CostReport, memory_bytes: int, memory: int | str | None) -> Remedy | None:
    """The fastest way to so many bytes."""
    if report.order_peak_bytes <= memory_bytes:
        return _order_alone(report, f"memory={memory!r}")
    fitting = [each for each in report.frontier if each.peak_bytes <= memory_bytes]  # the last is the fastest
    return _letting_go("as little as does", fitting[-1], report, f"memory={memory!r}") if fitting else None


def _halved(maker: StepMaker, args: tuple[Any, ...], kwargs: dict[str, Any], memory_bytes: int | None) -> Remedy | None:
    """The same with twice as many micro-batches, captured anew; None where the batch or the loss cannot be cut so.

    By order alone; where that does not do for `memory_bytes`, by evicting what does, or to the least that was found.
    """
    program = maker.capturing.program
    if program is None or isinstance(program.accumulate, str):
        return None
    count = 2 * program.accumulate
    # Twice as many operators: exact search would take most of the time, to make an estimate a little better.
    solver = Best() if isinstance(maker.asked.solver, Auto) else maker.asked.solver
    asked = dataclasses.replace(maker.asked, limit=Limit(), solver=solver)
    capturing = dataclasses.replace(maker.capturing, program=dataclasses.replace(program, accumulate=count))
    halved = dataclasses.replace(maker, capturing=capturing, asked=asked)
    try:
        by_order_bytes = halved.peak_by_order_bytes(args, kwargs)
    except (BatchError, CaptureError):
        return None
    within = "" if memory_bytes is None else f", memory={memory_bytes}"
    if memory_bytes is None or by_order_bytes <= memory_bytes:
        return Remedy("smaller micro-batches", by_order_bytes, None, f"training=lowtide.Training(accumulate={count}){within}")
    peak_bytes = _within_or_least(halved, args, kwargs, memory_bytes)
    return Remedy(
        "smaller micro-batches, eviction", peak_bytes, None, f"training=lowtide.Training(accumulate={count}), memory={peak_bytes}"
    )


def _within_or_least(maker: StepMaker, args: tuple[Any, ...], kwargs: dict[str, Any], memory_bytes: int) -> int:
    """The peak of a plan within so many bytes, else the least that was found."""
    within = dataclasses.replace(maker, asked=dataclasses.replace(maker.asked, limit=Limit(Memory(memory_bytes))))
    try:
        return within.plan_of_most_steps(args, kwargs)[1].peak_bytes
    except BudgetError as error:
        return error.smallest_peak_bytes if error.searched else _within_or_least(maker, args, kwargs, error.smallest_peak_bytes)
