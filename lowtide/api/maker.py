"""From a program to planned variants: capture, measure, plan; now, and again when what was captured has changed."""

from __future__ import annotations

import platform
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any

import torch
from torch import nn

from lowtide.api.limits import Memory
from lowtide.api.stages import Stages
from lowtide.api.step import Variant
from lowtide.capture.program import Captured, TrainingProgram, capture_inference, capture_training
from lowtide.capture.real import knowing
from lowtide.cost.device import Device
from lowtide.cost.lab.laboratory import Call, Laboratory
from lowtide.cost.timings import device_here, measure_timings
from lowtide.cost.workspaces import measure_workspaces
from lowtide.errors import BudgetError, CaptureError, CheckError, FormatError
from lowtide.ir.graph import Graph, Node
from lowtide.ir.made import Results
from lowtide.ir.text.graph_text import to_text
from lowtide.plan.plan import Plan, Provenance
from lowtide.planning.budget import Budget, plan_within
from lowtide.planning.planner import bound_to, candidates, eager_peak_bytes, make_plan, replan
from lowtide.remat.blocks.seeds import rehearse_seeds
from lowtide.remat.evict.eviction import rehearse_eviction
from lowtide.remat.sweep.search import Sweep
from lowtide.remat.write_out import rematerialise
from lowtide.runtime.caller import Caller
from lowtide.runtime.unchanged.granted import Granted, first_difference
from lowtide.runtime.unchanged.look import Look, Reads
from lowtide.schedule import Solver
from lowtide.schedule.warm_up import rehearse

_CUDA_GRANULE_BYTES = 512  # torch's caching allocator rounds every request up to this


@dataclass(frozen=True)
class Maker:
    """Everything that is needed to capture and plan."""

    model: nn.Module
    program: TrainingProgram | None
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
        return Caller(self.model) if self.program is None else Caller(self.model, self.program.optimizer, self.program.scaler)

    def make(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, as_saved: bool = False) -> list[Variant]:
        """Capture and plan the program as the caller's objects and this batch are now.

        Raises FormatError where it has to be `as_saved` and is not.
        """
        with self._laboratory() as laboratory:
            captured, granted = self._capture_as_it_is(args, kwargs, laboratory)
            if as_saved:
                self._check_saved(captured)
            measured = [self._measured(each, laboratory) for each in captured]
        # A share is of the peak of the program that most steps run, the last; an optimizer's first step keeps to the same bytes.
        memory_bytes = None if self.memory is None else self.memory.of_peak(measured[-1].eager_peak_bytes(captured[-1]))
        budget = Budget(memory_bytes, self.latency) if self.saved is None else _budget_of(self.saved)
        plans = self._plans(captured, measured, budget)
        return [Variant.of(each, plan, granted, gradients=self.program is not None) for each, plan in zip(captured, plans, strict=True)]

    def plan_of_most_steps(self, args: tuple[Any, ...], kwargs: dict[str, Any], budget: Budget) -> tuple[Captured, int, Plan]:
        """The program that most steps run, what its allocator rounds sizes up to, and its plan; nothing is made ready to run."""
        with self._laboratory() as laboratory:
            captured = self._capture(args, kwargs, laboratory)[-1]
            measured = self._measured(captured, laboratory, timed=budget != Budget())
        return captured, measured.granule_bytes, self._plan(captured, measured, budget)

    def _laboratory(self) -> Laboratory:
        """Where operators are tried; where they may not be, it only remembers."""
        return Laboratory(gradients=self.program is not None, tries=self.workspaces and self.simulated is None)

    def _capture_as_it_is(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], laboratory: Laboratory
    ) -> tuple[tuple[Captured, ...], Granted]:
        """The program, and what it takes for granted. A first run may fill in what later ones find (a cache in a configuration)."""
        for _ in range(2):
            before = Look(self.caller).places
            captured = self._capture(args, kwargs, laboratory)
            reads = Reads(frozenset().union(*(each.read for each in captured)))
            change = first_difference(reads.among(before), reads.among(Look(self.caller).places))
            if not change:
                return captured, Granted(self.caller, reads)
        raise CaptureError(
            f"the program changes what it rests on each time it runs, which a captured step would not: {change}; "
            "keep what changes from step to step in a buffer"
        )

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any], laboratory: Laboratory) -> tuple[Captured, ...]:
        def really(node: Node, before: Sequence[Node], makes_bytes: int) -> Results | None:
            return laboratory.results(Call(node, before, makes_bytes))

        with self.stages.stage("capture", "capturing the program"), knowing(really):
            if self.program is None:
                return (capture_inference(self.model, args, kwargs, self.device),)
            return capture_training(self.program, args, kwargs, self.device)

    @property
    def _is_limited(self) -> bool:
        """Whether there is something to keep to, so that times matter."""
        return self.memory is not None or self.latency is not None or (self.saved is not None and self.saved.trade is not None)

    def _measured(self, captured: Captured, laboratory: Laboratory, timed: bool | None = None) -> _Measured:
        """What each operator of each equal graph needs, beside its arguments and results; and how long it takes, where that matters."""
        measured = self._workspaces_of(captured, laboratory)
        if measured.saved is not None or not (self._is_limited if timed is None else timed):
            return measured
        return replace(measured, node_us=self._times(measured, laboratory))

    def _workspaces_of(self, captured: Captured, laboratory: Laboratory) -> _Measured:
        """What each operator of each equal graph needs beside its arguments and results; measured unless that is switched off."""
        device, granule_bytes = self._machine(captured)
        if self.saved is not None and self._is_saved(captured):
            return _Measured(device, granule_bytes, {}, _as_saved(self.saved, candidates(captured.graph)))
        graphs = candidates(captured.graph)
        if not self.workspaces or self.simulated is not None:
            return _Measured(device, granule_bytes, {graph: (0,) * len(graph.nodes) for graph in graphs})
        with self.stages.stage("measure", "measuring operators' temporaries"):
            found = {graph: measure_workspaces(graph.nodes, laboratory=laboratory) for graph in graphs}
        # An equal graph whose operators give results that lie otherwise than it says is none.
        sizes = {graph: found[graph].nbytes for graph in graphs if graph is captured.graph or not found[graph].unlike}
        return _Measured(device, granule_bytes, sizes)

    def _machine(self, captured: Captured) -> tuple[str, int]:
        """The device that is planned for, and what its allocator rounds every request up to."""
        if self.simulated is not None:
            return self.simulated.name, self.simulated.granule_bytes
        device = max((value.storage.device for value in captured.graph.inputs), default=str(self.device))
        return device, _CUDA_GRANULE_BYTES if device.startswith("cuda") else 1

    def _is_saved(self, captured: Captured) -> bool:
        """Whether the saved plan is of this program."""
        device, granule_bytes = self._machine(captured)
        return self.saved is not None and self.saved.program == bound_to(captured.graph, _provenance(device), granule_bytes) != ""

    def _check_saved(self, captured: Sequence[Captured]) -> None:
        """Raises FormatError, before anything is measured, where the saved plan is of none of these programs."""
        if any(map(self._is_saved, captured)):
            return
        assert self.saved is not None
        there, here = self.saved.provenance, _provenance(self._machine(captured[-1])[0])
        raise FormatError(
            "the saved plan is of another program: other model, batch, optimizer settings or versions "
            f"(made with torch {there.torch} for {there.device}; here are torch {here.torch} and {here.device}); "
            "leave `plan` out to make a new one"
        )

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
        settings: dict[str, Any] = {"round_to": measured.granule_bytes, "held_by_eager": captured.gradients}
        among, provenance = measured.temporaries, _provenance(measured.device)
        with self.stages.stage("order", f"ordering {len(captured.graph.nodes)} operators"):
            if limited:
                settings |= {"sweep": self.sweep, "links": self._links(measured), "lend": self.swap_state}
                return plan_within(budget, among, measured.node_us, self.solver, provenance, **settings)
            return make_plan(among, self.solver, provenance, **settings)

    def _links(self, measured: _Measured) -> Device | None:
        """The device over whose links to a host tensors may be swapped; None where there is nowhere to swap to."""
        if not self.swap:
            return None
        device = self.simulated or device_here(measured.device)
        return device if device.can_swap else None

    def _times(self, measured: _Measured, laboratory: Laboratory) -> dict[Graph, tuple[float, ...]]:
        """Microseconds of each node of each candidate: measured where operators may be run, else by roofline."""
        if self.simulated is not None:
            return {graph: self.simulated.graph_us(graph) for graph in measured.temporaries}
        with self.stages.stage("measure", "measuring operators' times"):
            device = device_here(measured.device)
            if not self.workspaces:
                return {graph: device.graph_us(graph) for graph in measured.temporaries}
            return {graph: measure_timings(graph.nodes, device, laboratory=laboratory).us for graph in measured.temporaries}


@dataclass(frozen=True)
class _Measured:
    """Of one captured program: the graphs that compute it, and what their operators need."""

    device: str
    granule_bytes: int  # its allocator rounds every request up to this
    temporaries: Mapping[Graph, tuple[int, ...]]  # by graph, by node; the captured one first
    saved: Plan | None = None  # the plan that was saved for it: then nothing is measured
    node_us: Mapping[Graph, tuple[float, ...]] = field(default_factory=dict)  # by graph, by node; empty where times do not matter

    def eager_peak_bytes(self, captured: Captured) -> int:
        if self.saved is not None:
            return self.saved.eager_peak_bytes
        sizes = self.temporaries[captured.graph]
        return eager_peak_bytes(captured.graph, sizes, round_to=self.granule_bytes, held_by_eager=captured.gradients)


def _budget_of(saved: Plan) -> Budget:
    """What the programs beside that of a saved plan keep to: its peak, where it was made under a limit."""
    return Budget() if saved.trade is None else Budget(saved.peak_bytes)


def _as_saved(saved: Plan, graphs: tuple[Graph, ...]) -> Plan:
    """The saved plan for the one of these graphs, which compute the same, that it is of. Raises FormatError where it is of none."""
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
    raise FormatError("the saved plan was changed: its graph is not what the program was rewritten to; leave `plan` out to make a new one")


def _provenance(device: str) -> Provenance:
    return Provenance(
        lowtide=version("lowtide"),
        torch=torch.__version__,
        device=device,
        python=platform.python_version(),
        threads=torch.get_num_threads(),
    )
