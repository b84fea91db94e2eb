"""What a step takes beside what its caller holds: an arena, CUDA graphs; and what PyTorch's allocator will have of the device for it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeAlias
from weakref import WeakKeyDictionary

from lowtide.api.arena import ArenaReport, StepArena
from lowtide.api.variant import Variant
from lowtide.base.stages import Stages
from lowtide.cuda.forecast import device_memory
from lowtide.plan.plan import Plan
from lowtide.runtime.arena.arena import Arena
from lowtide.runtime.graphs.capturable import graph_bytes
from lowtide.runtime.graphs.steps import GraphReport, StepGraphs


@dataclass(frozen=True)
class StepMemory:
    """One for a step and for its steps for other shapes."""

    step_arena: StepArena | None = None  # None where none was asked for
    graphs: StepGraphs | None = None
    _on_device: WeakKeyDictionary[Plan, tuple[int | None, int | None]] = field(default_factory=WeakKeyDictionary)

    @property
    def arena(self) -> Arena | None:
        return None if self.step_arena is None else self.step_arena.arena

    @property
    def has_graphs(self) -> bool:
        """Whether a call may be one."""
        return self.graphs is not None and self.graphs.device is not None

    def arena_report(self) -> ArenaReport | None:
        return None if self.step_arena is None else self.step_arena.report()

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
