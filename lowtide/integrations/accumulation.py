"""The batches between two updates of the parameters, and the steps that serve them: one for each number of batches.

On a CPU a step has an arena, as pages would come anew in each step otherwise. Frameworks say when something else than training begins:
then its memory is let go. Of several steps one has it at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lowtide.api.optimize import optimize
from lowtide.api.options import Run, Shapes, Training
from lowtide.api.step import Step
from lowtide.capture.batches import BATCHES
from lowtide.capture.optimizers.wrappers import torch_optimizer
from lowtide.errors import CaptureError
from lowtide.planning.request import Limit, MemoryLimits


@dataclass(frozen=True)
class FrameworkOptions:
    """What a user asks of `lowtide.optimize` by way of a framework."""

    memory: MemoryLimits = None
    dynamic: Mapping[Any, Any] | str | None = None  # of one batch, as `optimize` takes it
    further: Mapping[str, Any] = field(default_factory=dict)

    def for_count(self, count: int, *, on_cpu: bool) -> dict[str, Any]:
        """The arguments for a step over so many batches: each has lengths of its own. On a GPU an arena is for limits alone."""
        dynamic = self.dynamic
        if isinstance(dynamic, Mapping):
            dynamic = {key: axes for at in range(count) for key, axes in _of_batch(dynamic, at)}
        shapes, run = self.further.get("shapes", Shapes()), self.further.get("run", Run())
        run = replace(run, arena="auto") if run.arena == "limit" and on_cpu else run
        return {**self.further, "memory": self.memory, "shapes": replace(shapes, dynamic=dynamic), "run": run}

    def within_bytes_of(self, step: Step) -> FrameworkOptions:
        """The same with as many bytes as a share is of this step's own peak: every other step keeps to them, too."""
        limit = Limit.of(self.memory)
        return replace(self, memory=limit.fixed(step.plan.eager_peak_bytes).given) if limit.is_of_memory else self


def _of_batch(dynamic: Mapping[Any, Any], at: int) -> list[tuple[str, dict[Any, Any]]]:
    """What is said of a batch, for the one at this position of a window: its dimensions get names of their own."""
    entries = []
    for argument, axes in dynamic.items():
        path = f"[{at}][{argument!r}]"
        entries.append((path, {dim: _named(extents, f"{argument}_{dim}", at) for dim, extents in axes.items()}))
    return entries


def _named(extents: Any, name: str, at: int) -> Any:
    if isinstance(extents, str):
        return f"{extents}_{at}"
    given = list(extents)
    own = given.pop(0) if given and isinstance(given[0], str) else name
    return (f"{own}_{at}", *given)


@dataclass
class FrameworkSteps:
    model: nn.Module
    optimizer: torch.optim.Optimizer
    options: FrameworkOptions
    loss_name: str  # what the user wrote in the place of a loss
    by_count: dict[int, Step] = field(default_factory=dict)  # of batches
    latest: Step | None = None

    @classmethod
    def of(cls, model: nn.Module, optimizer: Any, options: FrameworkOptions, loss_name: str) -> FrameworkSteps:
        """No step yet; `optimizer` may be a framework's wrapper."""
        return cls(model, torch_optimizer(optimizer), options, loss_name)

    def are_of(self, model: nn.Module, optimizer: Any) -> bool:
        return self.model is model and self.optimizer is torch_optimizer(optimizer)

    def run(self, batches: Sequence[Any], **program: Any) -> tuple[list[Any], Any]:
        """One update of the parameters: what `loss` returned for each batch, and what `after_backward` did, or None.

        `program` are `loss`, `after_backward` and `scaler` as `optimize` takes them. Those of the first update of so many batches count.
        Raises CaptureError, which says where in the framework its remedy is.
        """
        try:
            return self._run(batches, program)
        except CaptureError as error:
            if (where := self._where(str(error))) is None:
                raise
            raise CaptureError(f"{error} ({where})") from error.__cause__

    def _where(self, sentence: str) -> str | None:
        """What stands for the functions of `lowtide.optimize` that a sentence names."""
        if "after_backward" in sentence:
            return f"loss() is {self.loss_name} here; Training(after_backward=...) is for lowtide.optimize in a loop of your own"
        return f"loss() is {self.loss_name} here" if "loss()" in sentence else None

    def _run(self, batches: Sequence[Any], program: Mapping[str, Any]) -> tuple[list[Any], Any]:
        count = len(batches)
        if self.latest is not self.by_count.get(count):
            self.empty_arena()
        if count not in self.by_count:
            on_cpu = all(parameter.device.type == "cpu" for parameter in self.model.parameters())
            further = self.options.for_count(count, on_cpu=on_cpu)
            training = Training(program["after_backward"], BATCHES, program["scaler"])
            self.by_count[count] = optimize(
                self.model, list(batches), loss=program["loss"], optimizer=self.optimizer, training=training, **further
            )
            if len(self.by_count) == 1:
                self.options = self.options.within_bytes_of(self.by_count[count])
        self.latest = self.by_count[count]
        returned = self.latest(*batches)
        return (returned[0], returned[1]) if isinstance(returned, tuple) else (returned, None)

    def empty_arena(self) -> None:
        """Let the memory go that was kept for the next update."""
        if self.latest is not None:
            self.latest.empty_arena()
