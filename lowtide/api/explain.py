"""Why a program does not fit, and what would help, before any optimisation, and without running it; where its peak is, by how much."""

from __future__ import annotations

import dataclasses
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from lowtide.api.arguments import check_memories, checked_optimizer, device_of, lies_on_host, training_program, warn_of_nowhere_to_swap
from lowtide.api.captures import Captures
from lowtide.api.maker import PlanningSettings, StepMaker
from lowtide.api.notation import varying_of
from lowtide.api.options import Planning, Run, Shapes, Training, told_in_values
from lowtide.base.messages import Stages, bytes_text, time_text, wants_progress
from lowtide.base.process import collected_seldom
from lowtide.capture.batches import largest, positional_and_keyword
from lowtide.cost.bodies import workspaces_within
from lowtide.cost.memory import order_problem
from lowtide.cuda.absent import assumptions
from lowtide.cuda.forecast import eager_memory
from lowtide.errors import BatchError, BudgetError, CaptureError
from lowtide.ir.graph import Kind
from lowtide.plan.cost_report import FrontierPoint
from lowtide.plan.plan import CostReport, Plan
from lowtide.plan.snapshot import Snapshot, kind_text
from lowtide.plan.summary import pattern, snapshot_lines
from lowtide.planning.candidate import Candidate
from lowtide.planning.machine import Machine
from lowtide.planning.request import Limit, MemoryLimits
from lowtide.runtime.batch import BatchSpec
from lowtide.schedule import Auto, Best, schedule
from lowtide.split.dimensions import ComponentTable, DimensionGraph
from lowtide.split.search import loss_in_parts

_MODULES = 6  # that are named


@dataclass(frozen=True)
class Remedy:
    """One thing that would help, and how much."""

    what: str  # "order alone", "eviction, +10% time at most"
    peak_bytes: int
    slower: float | None  # than without it, as a share of the time: 0.1; None where that is not known
    arguments: str  # to give to `optimize` for it, "latency=1.1"; "" for none


@dataclass(frozen=True, eq=False)
class Explanation:
    """The peak of a program as it stands, before any optimisation, and what would lower it. No step was run for it."""

    peak: Snapshot  # of eager PyTorch; its tensors, largest first, are those that live then
    resident_bytes: int  # the caller's own, throughout
    allocated_bytes: int | None  # the most that PyTorch's allocator for a GPU counts as it stands; None elsewhere
    reserved_bytes: int | None  # the most that it has of the device then
    time_us: float  # of the program as it stands
    remedies: tuple[Remedy, ...]  # from the cheapest to the leanest; what rounds otherwise, a split loss and micro-batches, comes last
    frontier: tuple[FrontierPoint, ...]  # of all that was found best at something, leanest first
    memory_bytes: int | None  # what it is to fit in, if that was told
    host_bytes: int | None  # and what may be pinned on the host for that
    within: Remedy | None  # the fastest way to that, if any was found
    device: str  # whose rates times are by
    training: bool
    workspaces: bool  # temporaries within operators are counted, as these were tried
    assumed: str  # of a GPU that is not here; "" where nothing is
    dimensions: str  # those along which most is made, by name: "batch (2 to 512; 1.20 GiB), heads of h.*.attn (12; 90.00 MiB)"

    @property
    def peak_bytes(self) -> int:
        """The peak of eager PyTorch, with what is resident."""
        return self.peak.footprint_bytes

    @property
    def fits(self) -> bool | None:
        """Whether the program fits as it stands; None where no memory was told."""
        return None if self.memory_bytes is None else self.peak_bytes <= self.memory_bytes

    @property
    def by_kind(self) -> dict[str, int]:
        """Bytes at the peak by what they are for, the most first: "parameters", "optimizer state", "activations", "gradients"..."""
        return {kind_text(kind): nbytes for kind, nbytes in self.peak.by_kind.items() if nbytes}

    @property
    def by_module(self) -> dict[str, int]:
        """Bytes of activations at the peak by the module that made them, the most first."""
        return self.peak.by_module(Kind.ACTIVATION)

    def call(self, remedy: Remedy) -> str:
        return f"lowtide.optimize({', '.join(filter(None, ('model, batch', self._program, remedy.arguments)))})"

    @property
    def verdict(self) -> str:
        """Whether it fits in the memory that was told, and how; "" where none was."""
        if self.memory_bytes is None:
            return ""
        limit, least = bytes_text(self.memory_bytes), min(self.remedies, key=lambda remedy: remedy.peak_bytes)
        limit += "" if self.host_bytes is None else f" with {bytes_text(self.host_bytes)} of the host"
        if self.fits:
            return f"it fits in {limit} as it stands"
        if self.within is None:
            return f"nothing was found that fits in {limit}; the least is {bytes_text(least.peak_bytes)}, with {self.call(least)}"
        return f"it fits in {limit} by {self.within.what}{_slower(self.within, ', ')}: {self.call(self.within)}"

    def figures(self) -> dict[str, Any]:
        derived = {name: getattr(self, name) for name in ("peak_bytes", "by_kind", "by_module", "fits")}
        within = None if self.within is None else self._remedy_figures(self.within)
        return asdict(self) | derived | {"remedies": [*map(self._remedy_figures, self.remedies)], "within": within}

    def _remedy_figures(self, remedy: Remedy) -> dict[str, Any]:
        return asdict(remedy) | {"call": self.call(remedy)}

    def __str__(self) -> str:
        share = f"{bytes_text(self.resident_bytes)} of it the caller's own throughout"
        line = f"as it stands: peak {bytes_text(self.peak_bytes)}, {share}; {time_text(self.time_us)} a call"
        table = [f"{'what would help':<34}{'peak':>12}{'':>10}{'time':>9}", *map(self._remedy_line, self.remedies)]
        return "\n".join([line, *snapshot_lines(self.peak), *self._part_lines(), "", *table, "", *self._foot_lines()])

    def _remedy_line(self, remedy: Remedy) -> str:
        """Its name, the peak, how much less that is, how much more time it takes, what to give to `optimize`."""
        share = f"{1 - remedy.peak_bytes / self.peak_bytes:.0%} less" if self.peak_bytes else ""
        figures = f"{remedy.what:<34}{bytes_text(remedy.peak_bytes):>12}{share:>10}{_slower(remedy):>9}"
        return f"{figures}  {remedy.arguments}".rstrip()

    def _foot_lines(self) -> list[str]:
        """What the figures do not count, and the verdict."""
        notes = ["eviction: tensors are let go while still needed and restored later; numbers stay the same to the last bit"]
        notes = notes if any("eviction" in remedy.what for remedy in self.remedies) else []
        nothing = f"nothing was run: times are by the rates of {self.device}, and temporaries within operators are not counted"
        notes += ["no step was run: times and temporaries are those of operators tried on made-up data" if self.workspaces else nothing]
        return [*notes, *filter(None, (self.assumed, self.verdict))]

    def _part_lines(self) -> list[str]:
        """Who holds the memory at the peak, and along what the program's operators can be cut."""
        kinds = ", ".join(f"{name} {bytes_text(nbytes)}" for name, nbytes in self.by_kind.items())
        modules = [f"{name} {bytes_text(nbytes)}" for name, nbytes in self.top_modules.items()]
        more = f", and {len(modules) - _MODULES} more" if len(modules) > _MODULES else ""
        lines = [f"by kind: {kinds}", *([f"activations by module: {', '.join(modules[:_MODULES])}{more}"] if any(self.by_module) else [])]
        if self.allocated_bytes is not None and self.reserved_bytes is not None:
            counts = f"PyTorch's allocator counts {bytes_text(self.allocated_bytes)} of it, and reserves {bytes_text(self.reserved_bytes)}"
            lines.append(counts)
        return [*lines, *([f"made along dimensions: {self.dimensions}"] if self.dimensions else [])]

    @property
    def top_modules(self) -> dict[str, int]:
        """The same by module, those of repeated blocks together ("blocks.*.mlp")."""
        total: Counter[str] = Counter()
        for module, nbytes in self.by_module.items():
            total[pattern(module) or "no module"] += nbytes
        return dict(total.most_common())

    @property
    def _program(self) -> str:
        return "loss=loss, optimizer=optimizer" if self.training else ""


def _slower(remedy: Remedy, before: str = "") -> str:
    return "" if remedy.slower is None else f"{before}{remedy.slower:+.1%}"


_LEVEL = "quick"  # of effort, where none is asked for: an explanation is waited for, and rounds what it says
_LEANER = 0.95  # of the peak by order alone: what splitting the loss has to come to
_SLOWER = (0.05, 0.10, 0.30)  # shares of time that are asked about


@told_in_values
@collected_seldom()
def explain(
    model: nn.Module, batch: Any, *, loss: Callable[..., Any] | None = None,
    optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None = None, memory: MemoryLimits = None,
    training: Training = Training(), shapes: Shapes = Shapes(), planning: Planning = Planning(), run: Run = Run(),
) -> Explanation:  # fmt: skip
    """Where the program's memory peaks as it stands, what is held then, and what would lower it; `print` it.

    The program is followed under fake tensors and the model does not run, so that it may lie on the meta device. Model, optimizer and
    random generators stay as they were. Each remedy was planned as `optimize` plans: each distinct operator is tried on made-up data
    for its time and its temporaries. With `Planning(workspaces=False)`, or another machine to `simulate`, nothing runs. Temporaries are
    not counted then, and times are by the rates of the machine. Arguments are those of `optimize`; beside them:

    memory: what it is to fit in. The answer then says whether it fits, and if not, the fastest way found to make it fit. With
        `{"host": "48GiB"}`, alone or beside the device's, no remedy pins more of the host than that.
    shapes: of a range the largest shape is explained; a share of memory is of its peak.
    planning: `effort` is "quick" by default. `simulate` is the machine whose rates and allocator count; without it this one, whose
        rates are measured once.
    run: only `swap` and `state` matter here.

    Raises CaptureError, BatchError and TypeError as `optimize` does; ValueError if `device` is a GPU that is not here and `simulate`
    names none.
    """
    trained = checked_optimizer(model, loss, optimizer, training, run)
    limit = Limit.of(memory)
    args, kwargs = positional_and_keyword(batch)
    args, kwargs = largest(args, kwargs, varying_of(shapes.dynamic, args, kwargs))
    machine = planning.machine
    target = device_of(model, planning.device, machine)
    check_memories(limit, target, machine, swap=run.swap)
    workspaces = planning.workspaces is not False
    warn_of_nowhere_to_swap(run, target, machine is not None)
    BatchSpec.of(args, kwargs, target)  # refuses what is no batch
    between_steps = lies_on_host(run, target, machine is not None)
    program = training_program(model, loss, trained, training, between_steps=between_steps)
    stages = Stages(planning.callback, wants_progress(planning.progress))
    timed = Limit(latency=1.0, host_bytes=limit.host_bytes)
    settings = PlanningSettings(timed, run.state == "swap", planning.solver or Auto(), planning.sweeps(_LEVEL))
    maker = StepMaker(
        Captures(model, program, target, stages, machine=machine),
        Machine(str(target), machine, workspaces, run.swap, stages),
        settings,
        None,
        stages,
    )
    captured, plan = maker.plan_of_most_steps(args, kwargs)
    assert plan.cost_report is not None, "a limit was asked for"
    eager = captured.eager(plan.granule_bytes)
    peak, on_device = eager.peak, eager_memory(eager.lives, eager.timeline.workspace_bytes) if target.type == "cuda" else None
    if peak is None:
        raise CaptureError("the program runs no operator on tensors: there is no peak to explain")
    memory_bytes = limit.fixed(peak.footprint_bytes).memory_bytes
    further = _FurtherArguments(run, limit)
    within = None if memory_bytes is None else _within(plan.cost_report, memory_bytes, f"memory={memory!r}")
    halved = _halved(maker, args, kwargs, memory_bytes if within is None else None)
    if within is None and halved is not None and memory_bytes is not None:
        within = halved if halved.peak_bytes <= memory_bytes else None
    return Explanation(
        peak=peak,
        resident_bytes=plan.resident_bytes,
        allocated_bytes=None if on_device is None else on_device[0],
        reserved_bytes=None if on_device is None else on_device[1],
        time_us=plan.cost_report.order_us,
        remedies=tuple(
            further.of(each)
            for each in (*_remedies(plan.cost_report), *_loss_split(captured, plan), *([halved] if halved is not None else []))
        ),
        frontier=plan.cost_report.frontier,
        memory_bytes=memory_bytes,
        host_bytes=limit.host_bytes,
        within=None if within is None else further.of(within),
        device=plan.provenance.device,
        training=program is not None,
        workspaces=workspaces and machine is None,
        assumed=assumptions(target, machine),
        dimensions=ComponentTable.of(DimensionGraph.of(captured.graph)).short(),
    )


def _remedies(report: CostReport) -> list[Remedy]:
    """From the cheapest to the leanest, each leaner than the one before."""
    remedies = [_order_alone(report, f"memory={report.order_peak_bytes}")]
    for share in _SLOWER:
        point = next(each for each in report.frontier if each.time_us <= (1 + share) * report.order_us)
        remedies.append(_letting_go(f"+{share:.0%} time at most", point, report, f"latency={1 + share:g}"))
    remedies.append(_letting_go("least found", report.frontier[0], report, f"memory={report.frontier[0].peak_bytes}"))
    return [each for at, each in enumerate(remedies) if at == 0 or each.peak_bytes < remedies[at - 1].peak_bytes]


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


@dataclass(frozen=True)
class _FurtherArguments:
    """What was told beside the limit of the device."""

    run: Run
    limit: Limit

    def of(self, remedy: Remedy) -> Remedy:
        """The remedy with what else `optimize` has to be told, as this was."""
        setting = f'state="{self.run.state}"' if self.run.state != "device" else "" if self.run.swap else "swap=False"
        more = f", run=lowtide.Run({setting})" if setting else ""
        arguments = remedy.arguments if self.limit.host_bytes is None else self._with_host(remedy.arguments)
        return dataclasses.replace(remedy, arguments=arguments + more) if arguments else remedy

    def _with_host(self, arguments: str) -> str:
        """Arguments with the limit of the host; where they have one of the device, that is by name."""
        if "memory={" in arguments or not arguments:
            return arguments
        device_bytes = re.search(r"memory=([0-9]+)", arguments)
        if device_bytes is None:
            return f"{arguments}, memory={Limit(host_bytes=self.limit.host_bytes).given!r}"
        return arguments.replace(device_bytes[0], f"memory={self.limit.within(int(device_bytes[1])).given!r}")


def _letting_go(how_far: str, point: FrontierPoint, report: CostReport, arguments: str) -> Remedy:
    return Remedy(f"eviction, {how_far}", point.peak_bytes, point.time_us / report.order_us - 1, arguments)


def _order_alone(report: CostReport, arguments: str) -> Remedy:
    """Within a limit: without one nothing that takes longer is done for it, so that the same order may need more."""
    us = min((each.time_us for each in report.frontier if each.peak_bytes <= report.order_peak_bytes), default=report.order_us)
    return Remedy("order alone", report.order_peak_bytes, us / report.order_us - 1, arguments)


def _within(report: CostReport, memory_bytes: int, arguments: str) -> Remedy | None:
    if report.order_peak_bytes <= memory_bytes:
        return _order_alone(report, arguments)
    fitting = [each for each in report.frontier if each.peak_bytes <= memory_bytes]  # the last is the fastest
    return _letting_go("as little as does", fitting[-1], report, arguments) if fitting else None


def _halved(maker: StepMaker, args: tuple[Any, ...], kwargs: dict[str, Any], memory_bytes: int | None) -> Remedy | None:
    """The same with twice as many micro-batches, captured anew; None where the batch or the loss cannot be cut so.

    By order alone; where that does not do for `memory_bytes`, by evicting what does, or to the least that was found.
    """
    program = maker.capturing.program
    if program is None or isinstance(program.accumulate, str):
        return None
    count = 2 * program.accumulate
    # Twice as many operators: exact search would take most of the time, to make an estimate a little better.
    solver = Best() if isinstance(maker.settings.solver, Auto) else maker.settings.solver
    settings = dataclasses.replace(maker.settings, limit=dataclasses.replace(maker.settings.limit, latency=None), solver=solver)
    capturing = dataclasses.replace(maker.capturing, program=dataclasses.replace(program, accumulate=count))
    halved = dataclasses.replace(maker, capturing=capturing, settings=settings)
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
    limit = maker.settings.limit.within(memory_bytes)
    within = dataclasses.replace(maker, settings=dataclasses.replace(maker.settings, limit=limit))
    try:
        return within.plan_of_most_steps(args, kwargs)[1].peak_bytes
    except BudgetError as error:
        return error.smallest_peak_bytes if error.searched else _within_or_least(maker, args, kwargs, error.smallest_peak_bytes)
