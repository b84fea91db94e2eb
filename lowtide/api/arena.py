"""`Run(arena="always")`: whether a step gets an arena, and what it tells about it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache

import torch

from lowtide.base.folders import directory
from lowtide.base.messages import warn
from lowtide.base.stages import Stages
from lowtide.cuda import native as cuda_native
from lowtide.placement import Auto, Placer, place
from lowtide.placement.base import warm_up
from lowtide.runtime.arena import native
from lowtide.runtime.arena.allocator import Allocator, BusyError, Counts
from lowtide.runtime.arena.arena import Arena

QUICK = Auto(max_nodes=10_000)  # seconds, where most training steps take a tenth of one: the second step waits for it
_MIB = 2**20


@dataclass(frozen=True)
class ArenaReport:
    """What a step's arena does."""

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
