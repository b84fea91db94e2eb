"""The ways in which the task is trained. Each makes itself ready in its own process and then takes steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from bench.dynamic.lengths import LONGEST, SHORTEST, bucket
from bench.dynamic.paper import PaperSteps
from bench.dynamic.task import Batch, Task, adamw, loss, model
from bench.in_values import in_values

Step = Callable[[Batch], Any]


@dataclass(frozen=True)
class Trained:
    """A way of training, ready or as good as: the first steps may still compile."""

    step: Step
    compilations: Callable[[], int]
    held_bytes: Callable[[], int]  # by the caller, between steps: parameters and the optimizer's state
    length: Callable[[int], int] = int  # what a batch is padded to, from its longest sample


def trained(name: str, task: Task, limit_bytes: int) -> Trained:
    """One of `VARIANTS`, which keeps the limit where it can."""
    made = model()
    optimizer = adamw(made)

    def held_bytes() -> int:
        state = [each for values in optimizer.state.values() for each in values.values() if isinstance(each, torch.Tensor)]
        held = [each.untyped_storage() for each in (*made.parameters(), *made.buffers(), *state)]
        return sum({storage.data_ptr(): storage.nbytes() for storage in held}.values())

    step, compilations = VARIANTS[name](made, optimizer, task, limit_bytes)
    return Trained(step, compilations, held_bytes, bucket if "powers of two" in name else int)


def _eager(made: Any, optimizer: torch.optim.Optimizer, task: Task, limit_bytes: int) -> tuple[Step, Callable[[], int]]:
    def step(batch: Batch) -> None:
        loss(made, **batch).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    return step, lambda: 0


def _compiled(made: Any, optimizer: torch.optim.Optimizer, task: Task, dynamic: bool) -> tuple[Step, Callable[[], int]]:
    import torch._dynamo
    from torch._dynamo.utils import counters

    torch._dynamo.config.recompile_limit = 64  # type: ignore[attr-defined]
    step, _ = _eager(torch.compile(made, dynamic=dynamic), optimizer, task, 0)
    return step, lambda: int(counters["stats"]["unique_graphs"])


def _lowtide(made: Any, optimizer: torch.optim.Optimizer, task: Task, limit_bytes: int) -> tuple[Step, Callable[[], int]]:
    from lowtide import optimize

    seen: dict[tuple[int, ...], None] = {}
    steps: list[Any] = []

    def step(batch: Batch) -> Any:
        seen[tuple(batch["input_ids"].shape)] = None
        if not steps:
            settings: dict[str, Any] = {"memory": limit_bytes, "on_new_shape": "extend", "progress": False}
            steps.append(optimize(made, batch, loss=loss, optimizer=optimizer, **in_values(**settings)))
        return steps[0](**batch)

    return step, lambda: len(seen)


def _lowtide_dynamic(made: Any, optimizer: torch.optim.Optimizer, task: Task, limit_bytes: int) -> tuple[Step, Callable[[], int]]:
    from lowtide import optimize

    steps: list[Any] = []

    def step(batch: Batch) -> Any:
        if not steps:
            dynamic = {"input_ids": {1: ("length", SHORTEST, LONGEST)}, "labels": {1: "length"}}
            settings: dict[str, Any] = {"memory": limit_bytes, "dynamic": dynamic, "progress": False}
            steps.append(optimize(made, batch, loss=loss, optimizer=optimizer, **in_values(**settings)))
        return steps[0](**batch)

    return step, lambda: len(steps)


def _paper(made: Any, optimizer: torch.optim.Optimizer, task: Task, limit_bytes: int) -> tuple[Step, Callable[[], int]]:
    steps = PaperSteps(made, optimizer, limit_bytes)
    return steps.step, lambda: len(steps.of_shape)


VARIANTS: dict[str, Callable[..., tuple[Step, Callable[[], int]]]] = {
    "eager, dynamic": _eager,
    "torch.compile, dynamic": lambda made, optimizer, task, limit: _compiled(made, optimizer, task, True),
    "torch.compile, powers of two": lambda made, optimizer, task, limit: _compiled(made, optimizer, task, False),
    "lowtide, powers of two": _lowtide,
    "BladeDISC++'s method": _paper,
    "lowtide, dynamic": _lowtide_dynamic,
}
