"""From a program to planned variants: capture, measure, plan; now, and again when what was captured has changed."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from lowtide.api.limits import Memory
from lowtide.api.stages import Stages
from lowtide.api.step import Variant, circumstances
from lowtide.capture.program import Captured, TrainingProgram, capture_inference, capture_training
from lowtide.cost.device import Device
from lowtide.cost.timings import device_here, measure_timings
from lowtide.cost.workspaces import measure_workspaces
from lowtide.errors import BudgetError, CheckError
from lowtide.ir.graph import Graph
from lowtide.ir.plan import Plan, Provenance
from lowtide.ir.text import to_text
from lowtide.rewrite.remat import rematerialise
from lowtide.runtime.caller import Caller
from lowtide.schedule import Solver
from lowtide.schedule.rehearsal import rehearse
from lowtide.search.budget import Budget, plan_within
from lowtide.search.evict import rehearse_eviction
from lowtide.search.frontier import Sweep
from lowtide.search.planning import candidates, eager_peak_bytes, make_plan, replan
from lowtide.search.seeds import rehearse_seeds

_CUDA_GRANULE_BYTES = 512  # torch's caching allocator rounds every request up to this


@dataclass(frozen=True)
class Maker:
    """Everything that is needed to capture and plan."""

    model: nn.Module
    program: TrainingProgram | None
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    device: torch.device
    solver: Solver
    workspaces: bool  # measure operators: their temporaries, and their times where a limit asks for them
    memory: Memory | None
    latency: float | None
    sweep: Sweep
    swap: bool  # tensors may be sent to the host and back, where the device has memory of its own
    swap_state: bool  # parameters and optimizer state too
    simulated: Device | None  # the machine that is planned for, where that is not this one
    saved: Plan | None
    stages: Stages

    @property
    def caller(self) -> Caller:
        """The objects that the step works on."""
        return Caller(self.model, None if self.program is None else self.program.optimizer)

    def make(self) -> list[Variant]:
        """Capture and plan the program as the caller's objects are now."""
        here = circumstances(self.caller)
        with self.stages.stage("capture", "capturing the program"):
            captured = self._capture()
        measured = [self._measured(each) for each in captured]
        # A share is of the peak of the program that most steps run, the last; an optimizer's first step keeps to the same bytes.
        memory_bytes = None if self.memory is None else self.memory.of_peak(measured[-1].eager_peak_bytes(captured[-1]))
        budget = Budget(memory_bytes, self.latency) if self.saved is None else _budget_of(self.saved)
        plans = self._plans(captured, measured, budget)
        return [Variant.of(each, plan, here, gradients=self.program is not None) for each, plan in zip(captured, plans, strict=True)]

    def plan_of_most_steps(self, budget: Budget) -> tuple[Captured, int, Plan]:
        """The program that most steps run, what its allocator rounds sizes up to, and its plan; nothing is made ready to run."""
        with self.stages.stage("capture", "capturing the program"):
            captured = self._capture()[-1]
        measured = self._measured(captured)
        return captured, measured.granule_bytes, self._plan(captured, measured, budget)

    def _capture(self) -> tuple[Captured, ...]:
        if self.program is None:
            return (capture_inference(self.model, self.args, self.kwargs, self.device),)
        return capture_training(self.program, self.args, self.kwargs, self.device)

    def _measured(self, captured: Captured) -> _Measured:
        """What each operator of each equal graph needs beside its arguments and results; measured unless that is switched off."""
        device = max((value.storage.device for value in captured.graph.inputs), default=str(self.device))
        graphs = candidates(captured.graph)
        if self.saved is not None and (known := _as_saved(self.saved, graphs)) is not None:
            return _Measured(device, 1, {}, known)
        granule_bytes = _CUDA_GRANULE_BYTES if device.startswith("cuda") else 1
        if self.simulated is not None:
            device, granule_bytes = self.simulated.name, self.simulated.granule_bytes
        if not self.workspaces or self.simulated is not None:
            return _Measured(device, granule_bytes, {graph: (0,) * len(graph.nodes) for graph in graphs})
        with self.stages.stage("measure", "measuring operators' temporaries"):
            return _Measured(device, granule_bytes, {graph: measure_workspaces(graph.nodes).nbytes for graph in graphs})

    def _plans(self, captured: Sequence[Captured], measured: Sequence[_Measured], budget: Budget) -> list[Plan]:
        """A plan for each program. Where several do not fit, the error is that of the one that needs the most."""
        plans: list[Plan] = []
        refused: list[BudgetError] = []
        for each, of in zip(captured, measured, strict=True):
            try:
                plans.append(self._plan(each, of, budget))
            except BudgetError as error:
                if self.saved is not None:  # what the saved plan keeps to was not asked for now: as near to it as can be
                    plans.append(self._plan(each, of, Budget(error.smallest_peak_bytes)))
                else:
                    refused.append(error)
        if refused:
            raise max(refused, key=lambda error: error.smallest_peak_bytes)
        return plans

    def _plan(self, captured: Captured, measured: _Measured, budget: Budget) -> Plan:
        if measured.saved is not None:
            return measured.saved
        limited = budget != Budget()
        with self.stages.stage("compile", "loading compiled kernels, or compiling them for the first time"):
            rehearse(self.solver)
            if limited:
                rehearse_eviction()
                rehearse_seeds()
        node_us = self._times(measured) if limited else {}
        settings: dict[str, Any] = {"round_to": measured.granule_bytes, "held_by_eager": captured.gradients}
        among, provenance = measured.temporaries, _provenance(measured.device)
        with self.stages.stage("order", f"ordering {len(captured.graph.nodes)} operators"):
            if limited:
                settings |= {"sweep": self.sweep, "links": self._links(measured), "lend": self.swap_state}
                return plan_within(budget, among, node_us, self.solver, provenance, **settings)
            return make_plan(among, self.solver, provenance, **settings)

    def _links(self, measured: _Measured) -> Device | None:
        """The device over whose links to a host tensors may be swapped; None where there is nowhere to swap to."""
        if not self.swap:
            return None
        device = self.simulated or device_here(measured.device)
        return device if device.can_swap else None

    def _times(self, measured: _Measured) -> dict[Graph, tuple[float, ...]]:
        """Microseconds of each node of each candidate: measured where operators may be run, else by roofline."""
        if self.simulated is not None:
            return {graph: self.simulated.graph_us(graph) for graph in measured.temporaries}
        with self.stages.stage("measure", "measuring operators' times"):
            device = device_here(measured.device)
            if not self.workspaces:
                return {graph: device.graph_us(graph) for graph in measured.temporaries}
            return {graph: measure_timings(graph.nodes, device).us for graph in measured.temporaries}


@dataclass(frozen=True)
class _Measured:
    """Of one captured program: the graphs that compute it, and what their operators need."""

    device: str
    granule_bytes: int  # its allocator rounds every request up to this
    temporaries: Mapping[Graph, tuple[int, ...]]  # by graph, by node; the captured one first
    saved: Plan | None = None  # the plan that was saved for it: then nothing is measured

    def eager_peak_bytes(self, captured: Captured) -> int:
        if self.saved is not None:
            return self.saved.eager_peak_bytes
        sizes = self.temporaries[captured.graph]
        return eager_peak_bytes(captured.graph, sizes, round_to=self.granule_bytes, held_by_eager=captured.gradients)


def _budget_of(saved: Plan) -> Budget:
    """What the programs beside that of a saved plan keep to: its peak, where it was made under a limit."""
    return Budget() if saved.trade is None else Budget(saved.peak_bytes)


def _as_saved(saved: Plan, graphs: tuple[Graph, ...]) -> Plan | None:
    """The saved plan for the one of these graphs that it is of, if any."""
    text = to_text(saved.graph, sources=False)
    for graph in graphs:
        written = graph
        if saved.trade is not None:
            try:
                written = rematerialise(graph, saved.trade.runs).graph
            except (CheckError, IndexError):  # a sequence of another graph's nodes
                continue
        if to_text(written, sources=False) == text:
            return replan(saved, written)
    return None


def _provenance(device: str) -> Provenance:
    return Provenance(
        lowtide=version("lowtide"),
        torch=torch.__version__,
        device=device,
        python=platform.python_version(),
        threads=torch.get_num_threads(),
    )
