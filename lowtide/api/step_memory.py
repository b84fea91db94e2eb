"""What a step takes beside what its caller holds: an arena, CUDA graphs; and what PyTorch's allocator will have of the device for it.

`Run(arena="always")`: whether a step gets an arena, and what it tells about it. `Run(graph="auto")`: whether it may be a CUDA graph.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TypeAlias
from weakref import WeakKeyDictionary

import torch

from lowtide.api.variant import Variant
from lowtide.base.files import directory
from lowtide.base.messages import Stages, warn
from lowtide.cuda import native as cuda_native
from lowtide.cuda.forecast import device_memory
from lowtide.errors import CaptureError, StepError
from lowtide.placement import Auto, Placer, place
from lowtide.placement.base import warm_up
from lowtide.plan.plan import Plan
from lowtide.runtime.arena import native
from lowtide.runtime.arena.allocator import Allocator, BusyError, Counts
from lowtide.runtime.arena.arena import Arena
from lowtide.runtime.graphs.capturable import graph_bytes
from lowtide.runtime.graphs.device import CudaGraphs
from lowtide.runtime.graphs.steps import GraphReport, StepGraphs

QUICK = Auto(max_nodes=10_000)  # seconds, where most training steps take a tenth of one: the second step waits for it
_MIB = 2**20
DEVICES: dict[str, Callable[[torch.device], CudaGraphs]] = {"cuda": CudaGraphs}  # by type, what captures there


@dataclass(frozen=True)
class ArenaReport:
    planned_bytes: int  # that the addresses of the program that ran last need; 0 until there are any
    lower_bound_bytes: int  # no arena for that program is smaller
    recorded_steps: int
    served_steps: int
    steps_without: Mapping[str, int]  # by why: each took all its memory from PyTorch's allocator
    last: Counts  # of the latest step that was served
    live_tensors: int  # tensors that lie in the arena between steps, as something holds what a step made on its way
    absent: str = ""  # why there is no arena at all
    taken_bytes: int = 0  # of the system's memory now; 0 before the first served step, and after `step.empty_arena()`

    @property
    def served_share(self) -> float:
        """The share of the latest served step's requests, by bytes, that the arena gave; 0 before there is any such step."""
        request_bytes = self.last.request_bytes + self.last.elsewhere_bytes
        return self.last.served_bytes / request_bytes if request_bytes else 0.0

    def __str__(self) -> str:
        if self.absent:
            return f"no arena: {self.absent}"
        if not self.served_steps:
            return "arena: no step was served yet; the first of each kind is recorded"
        last = self.last
        pieces = [
            f"arena of {self.planned_bytes / _MIB:.2f} MiB (bound {self.lower_bound_bytes / _MIB:.2f} MiB)",
            f"{last.served} of {last.requests + last.elsewhere} requests and {self.served_share:.2%} of the bytes of the last step",
            *(f"{count} requests {why}" for count, why in self._missed() if count),
            *(f"{count} steps without: {why}" for why, count in self.steps_without.items()),
            *([f"{self.live_tensors} tensors held"] if self.live_tensors else []),
        ]
        return "; ".join(pieces)

    def _missed(self) -> tuple[tuple[int, str], ...]:
        last = self.last
        return (
            (last.outliving, "outlive the step"),
            (last.unexpected, "unexpected"),
            (last.occupied, "where something else still lies"),
            (last.elsewhere, "by other threads"),
        )


@dataclass(frozen=True)
class StepArena:
    """A step's arena, or why it has none."""

    arena: Arena | None
    absent: str = ""

    @classmethod
    def of(cls, device: torch.device, placer: Placer | None, stages: Stages, *, warns: bool = True) -> StepArena:
        """An arena for a step that runs on `device`. Where there can be none, a warning says so once, if it is to."""
        if device.type not in ("cpu", "cuda"):
            return cls._absent(f"arenas are for steps on a CPU or a CUDA device, this one is on {device.type}", warns)
        on_gpu = device.type == "cuda"
        try:
            with stages.stage("arena", "building the planned allocator, or loading it"):
                allocator = Allocator((cuda_native if on_gpu else native).load(directory()), on_gpu=on_gpu)
        except (native.NativeError, BusyError) as why:
            return cls._absent(str(why), warns)
        with stages.stage("compile", "loading compiled kernels, or compiling them for the first time"):
            warm_up(placer or QUICK)
        return cls(Arena(allocator, lambda problem: place(problem, placer or QUICK)))

    @classmethod
    def _absent(cls, why: str, warns: bool) -> StepArena:
        if warns:
            _warn(f"lowtide runs without an arena: {why}")
        return cls(None, why)

    def report(self) -> ArenaReport:
        arena = self.arena
        if arena is None:
            return ArenaReport(0, 0, 0, 0, {}, Counts(), 0, self.absent)
        planned, runs = (arena.planned_bytes, arena.lower_bound_bytes), (arena.recorded_runs, arena.served_runs)
        return ArenaReport(*planned, *runs, dict(arena.runs_without), arena.counts, arena.live_tensors, taken_bytes=arena.nbytes)


@cache
def _warn(sentence: str) -> None:
    """Each sentence once in a process: a program may optimize many steps."""
    warn(sentence)


@dataclass(frozen=True)
class GraphWish:
    word: str  # as `Run` has it
    device: torch.device
    varies: bool = False  # whether the step is one for a range of shapes
    several: bool = False  # whether processes train together

    def why_not(self, limited: bool) -> str:
        """Why a step under a limit, or under none, can be no graph, whatever its program is; "" where it can."""
        if self.device.type not in DEVICES:
            return f"CUDA graphs are for steps on a CUDA device, this one is on {self.device.type}"
        if self.several:
            return "steps of several processes meet at each call, which a CUDA graph does not"
        return "a limit over a range of shapes has no room for copies of batches: leave one of them out" if limited and self.varies else ""

    def counts(self, limited: bool) -> bool:
        """Whether a limit has to hold with a graph's copies. Raises ValueError where there has to be a graph and can be none."""
        if self.word == "never":
            return False
        why = self.why_not(limited)
        if why and self.word == "always":
            raise ValueError(f"graph: {why}")
        return not why

    def check(self, variant: Variant) -> None:
        """Raises CaptureError where there has to be a graph of a program, and can be none."""
        if self.word == "always" and variant.capturable.refusal:
            raise CaptureError(f"graph: no CUDA graph can do what the step does: {variant.capturable.refusal}")

    def graphs(self, arena: StepArena | None, limited: bool) -> StepGraphs | None:
        """What captures a step, or says why nothing does; None where it was not asked for. Raises StepError for "always"."""
        if self.word == "never":
            return None
        why = self.why_not(limited)
        if not why and limited and (arena is None or arena.arena is None):
            missing = 'Run(arena="never")' if arena is None else arena.absent
            why = f"under a limit a CUDA graph lies in the step's arena, and there is none: {missing}"
        if why and self.word == "always":
            raise StepError(f"graph: {why}")
        return StepGraphs(None if why else DEVICES[self.device.type](self.device), self.word, why)


@dataclass(frozen=True)
class StepMemory:
    step_arena: StepArena | None = None  # None where none was asked for
    graphs: StepGraphs | None = None
    _on_device: WeakKeyDictionary[Plan, tuple[int | None, int | None]] = field(default_factory=WeakKeyDictionary)

    @property
    def arena(self) -> Arena | None:
        return None if self.step_arena is None else self.step_arena.arena

    @property
    def has_graphs(self) -> bool:
        return self.graphs is not None and self.graphs.device is not None

    def graph_report(self, variant: Variant) -> GraphReport | None:
        """`variant` is what most steps run."""
        if self.graphs is None:
            return None
        graph = variant.decision.graph
        return self.graphs.report(graph_bytes(graph) if self.has_graphs and not graph.dimensions else 0)

    def empty(self) -> None:
        if self.graphs is not None:
            self.graphs.let_go()
        if self.arena is not None:
            self.arena.empty()

    def on_device(self, plan: Plan, *, is_planned_only: bool) -> Plan:
        """The plan with what PyTorch's allocator will count and reserve. A step that is only planned would have an arena."""
        if plan not in self._on_device:
            copies_bytes = max(1, graph_bytes(plan.graph)) if self.has_graphs and not plan.graph.dimensions else None
            arena = self.arena is not None or is_planned_only
            self._on_device[plan] = device_memory(plan, arena=arena, copies_bytes=copies_bytes) or (None, None)
        allocated_bytes, reserved_bytes = self._on_device[plan]
        return dataclasses.replace(plan, allocated_bytes=allocated_bytes, reserved_bytes=reserved_bytes)


NewMemory: TypeAlias = Callable[[Stages, bool], StepMemory]  # for a step under a limit, or under none
