"""`Run(graph="auto")`: whether a step may be a CUDA graph, by all that is asked of it beside."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from lowtide.api.arena import StepArena
from lowtide.api.variant import Variant
from lowtide.errors import CaptureError, StepError
from lowtide.runtime.graphs.device import CudaGraphs, GraphDevice
from lowtide.runtime.graphs.steps import StepGraphs

DEVICES: dict[str, Callable[[torch.device], GraphDevice]] = {"cuda": CudaGraphs}  # by type, what captures there


@dataclass(frozen=True)
class GraphWish:
    """What a user wants, and for which steps."""

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
