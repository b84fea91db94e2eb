"""Where the parts run: a GPU, or this machine's CPU in its place, on which a part does all that it would do, on less."""

from __future__ import annotations

import copy
import fcntl
import os
import signal
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from bench.coverage.subject import scalar_loss
from bench.models.workload import Workload
from lowtide.cost.profiler import interleaved_us, measure_memory

LOCK = Path(tempfile.gettempdir()) / "lowtide_bench_on_gpu.lock"
PLACES = Path(tempfile.gettempdir()) / "lowtide_bench_on_gpu"  # in it a file for each part that runs, named after its group of processes

Call = Callable[[], Any]
Row = dict[str, Any]
_held: list[None] = []  # by how many that this process is in


@contextmanager
def locked() -> Iterator[None]:
    """One process at a time, however often it asks."""
    with open(LOCK, "a") as file:
        if not _held:
            fcntl.flock(file, fcntl.LOCK_EX)
        _held.append(None)
        try:
            yield
        finally:
            _held.pop()


@contextmanager
def still() -> Iterator[None]:
    """The same, and all other parts stand still: their planning takes a host time for which a step would have to wait."""
    with locked():
        others = [int(each.name) for each in PLACES.glob("*") if int(each.name) != os.getpid()] if len(_held) == 1 else []
        for group in others:
            send(group, signal.SIGSTOP)
        try:
            yield
        finally:
            for group in others:
                send(group, signal.SIGCONT)


def send(group: int, what: signal.Signals) -> None:
    """To a part's processes, where there are any."""
    with suppress(ProcessLookupError):
        os.killpg(group, what)


@dataclass(frozen=True)
class Ground:
    """A device, and whether it stands in for a GPU."""

    device: str

    @classmethod
    def here(cls) -> Ground:
        """The GPU where there is one."""
        return cls("cuda" if torch.cuda.is_available() else "cpu")

    @property
    def dry(self) -> bool:
        """Whether the CPU stands in: sizes are small, and what it measures is not kept."""
        return self.device == "cpu"

    @property
    def name(self) -> str:
        """As a table says it."""
        return torch.cuda.get_device_name() if not self.dry else "this CPU, in place of a GPU"

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While all other parts stand still; what of the device's memory this one does not need it gives back at the end."""
        with still():
            yield
            if not self.dry:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()

    def above_bytes(self, call: Call) -> int:
        """The peak of a call above the level at its start, in bytes, as the allocator counts; run once before."""
        with self.alone():
            return measure_memory(call, self.device, warmup=1).above_bytes

    def reserved_bytes(self, call: Call) -> int | None:
        """What the allocator holds of the device after a call from an empty cache; None on a CPU, which tells nothing of the kind."""
        if self.dry:
            return None
        with self.alone():
            torch.cuda.synchronize()
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats()
            call()
            torch.cuda.synchronize()
            return torch.cuda.max_memory_reserved()

    def in_turns_ms(self, calls: dict[str, Call], repeats: int = 10) -> dict[str, float]:
        """The median time of each, in milliseconds, taken in turns."""
        with self.alone():
            times = interleaved_us(calls, 1 if self.dry else repeats, 2, self.device)
        return {name: timing.median_us / 1e3 for name, timing in times.items()}

    def moved(self, made: Workload) -> Workload:
        """A workload on the device."""
        return Workload(made.model.to(self.device), tuple(tensor.to(self.device) for tensor in made.batch), made.loss)

    def subject(self, name: str) -> Workload:
        """A small architecture of the coverage bench, on the device; keyword arguments of its call are bound to the loss's order."""
        from bench.coverage.subjects import SUBJECTS

        torch.manual_seed(0)
        model, batch = next(each for each in SUBJECTS if each.name == name).build()
        keys = list(batch) if isinstance(batch, dict) else []
        given = tuple(batch.values()) if isinstance(batch, dict) else tuple(batch)

        def loss(model: nn.Module, *items: Any) -> torch.Tensor:
            return scalar_loss(model, **dict(zip(keys, items, strict=True))) if keys else scalar_loss(model, *items)

        return self.moved(Workload(model, given, loss))


def twin(made: Workload) -> Workload:
    """The same workload again, on tensors of its own."""
    return Workload(copy.deepcopy(made.model), tuple(tensor.clone() for tensor in made.batch), made.loss)
