"""Eager PyTorch and lowtide side by side, on the same workload: peaks by the allocator's own count, times interleaved."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

import torch
from torch import nn

from lowtide.api.step import Step
from lowtide.capture.batches import positional_and_keyword
from lowtide.capture.results import loss_of
from lowtide.cost.profiler import interleaved_us, measure_memory
from lowtide.errors import LowtideError


class Workload(NamedTuple):
    model: nn.Module
    batch: Any
    loss: Callable[..., Any] | None
    optimizer: torch.optim.Optimizer | None


@dataclass(frozen=True)
class Comparison:
    """What a step takes either way. Peaks have what is resident (`resident_bytes`), as a plan's have."""

    resident_bytes: int
    eager_measured_peak_bytes: int
    measured_peak_bytes: int
    promised_peak_bytes: int
    eager_us: float
    us: float
    time_ratio: float

    @property
    def saving(self) -> float:
        """The measured saving, a share of eager's whole peak."""
        return 1 - self.measured_peak_bytes / self.eager_measured_peak_bytes

    def figures(self) -> dict[str, float]:
        return asdict(self) | {"saving": self.saving}

    def __str__(self) -> str:
        mib = 2**20
        return (
            f"measured peak: eager {self.eager_measured_peak_bytes / mib:.2f} MiB, lowtide {self.measured_peak_bytes / mib:.2f} MiB "
            f"({self.saving:.1%} saved; promised {self.promised_peak_bytes / mib:.2f} MiB)\n"
            f"measured time: eager {self.eager_us / 1e3:.1f} ms, lowtide {self.us / 1e3:.1f} ms a step (ratio {self.time_ratio:.3f})"
        )


def workload_of(function: Callable[[], Any]) -> Workload:
    """What a user's function returned: (model, batch, loss, optimizer), or (model, batch) to infer. Raises LowtideError otherwise."""
    if not callable(function):
        raise LowtideError(f"expected a function that returns (model, batch, loss, optimizer), got a {type(function).__name__}")
    parts = function()
    if not isinstance(parts, tuple) or len(parts) not in (2, 4) or not isinstance(parts[0], nn.Module):
        what = type(parts).__name__ if not isinstance(parts, tuple) else f"a tuple of {', '.join(type(item).__name__ for item in parts)}"
        raise LowtideError(f"expected (model, batch, loss, optimizer), or for inference (model, batch); got {what}")
    if len(parts) == 2:
        return Workload(*parts, None, None)
    if (parts[2] is None) != (parts[3] is None):
        raise LowtideError("expected both a loss and an optimizer, or for inference neither; got only one of them")
    return Workload(*parts)


def eager_step(workload: Workload) -> Callable[[], Any]:
    args, kwargs = positional_and_keyword(workload.batch)
    model, loss, optimizer = workload.model, workload.loss, workload.optimizer
    if loss is None or optimizer is None:
        return torch.no_grad()(lambda: model(*args, **kwargs))

    def step() -> Any:
        optimizer.zero_grad()
        result = loss(model, *args, **kwargs)
        loss_of(result).backward()
        optimizer.step()
        return result.detach() if isinstance(result, torch.Tensor) else None

    return step


def compare(eager: Workload, optimized: Workload, step: Step, repeats: int = 5) -> Comparison:
    """Measure eager PyTorch on one workload, and a step on its twin.

    Both train on; the first step of each, which makes optimizer state, is not counted.
    """
    args, kwargs = positional_and_keyword(optimized.batch)
    plain = eager_step(eager)
    device = str(next(iter(optimized.model.parameters()), torch.empty(0)).device)
    plain(), step(*args, **kwargs)
    if eager.optimizer is not None:
        eager.optimizer.zero_grad()
    memory = measure_memory(plain, device)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it trains is what is wanted here
        own = step.measure(*args, **kwargs)
    times = interleaved_us({"eager": plain, "lowtide": lambda: step(*args, **kwargs)}, repeats, 1, device)
    return Comparison(
        own.resident_bytes,
        own.resident_bytes + memory.above_bytes,
        own.peak_bytes,
        step.plan.peak_bytes,
        times["eager"].median_us,
        times["lowtide"].median_us,
        times["lowtide"].ratio_to(times["eager"]),
    )
