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
from functools import cache
from pathlib import Path
from typing import IO, Any

import torch
from torch import nn

from bench.coverage.subject import scalar_loss
from bench.models.workload import Workload
from lowtide.cost.profiler import interleaved_us, measure_memory

LOCK = Path(tempfile.gettempdir()) / "lowtide_bench_on_gpu.lock"
PLACES = Path(tempfile.gettempdir()) / "lowtide_bench_on_gpu"  # in it a file for each part that runs, named after its group of processes

Call = Callable[[], Any]
Row = dict[str, Any]
_held: list[None] = []  # not empty while this process has the lock


@cache
def _lock_file() -> IO[str]:
    """Opened once, before anything is captured: a program that opens files is no step."""
    return open(LOCK, "a")


@contextmanager
def locked() -> Iterator[None]:
    """One process at a time, however often it asks. A capture that lasts meanwhile may put the list back to what it was before."""
    if _held:
        yield
        return
    file = _lock_file()
    fcntl.flock(file, fcntl.LOCK_EX)
    _held.append(None)
    try:
        yield
    finally:
        _held.clear()
        fcntl.flock(file, fcntl.LOCK_UN)


@contextmanager
def still() -> Iterator[None]:
    """The same, and all other parts stand still: their planning takes a host time for which a step would have to wait."""
    within = bool(_held)
    with locked():
        others = [] if within else [int(each.name) for each in PLACES.glob("*") if _is_anothers(each)]
        for group in others:
            send(group, signal.SIGSTOP)
        try:
            yield
        finally:
            for group in others:
                send(group, signal.SIGCONT)


def take_place() -> IO[str]:
    """This process stands still for others from here on, for as long as the file is open."""
    PLACES.mkdir(parents=True, exist_ok=True)
    file = open(PLACES / str(os.getpid()), "a")  # noqa: SIM115 - it stays open
    fcntl.flock(file, fcntl.LOCK_SH)
    return file


def _is_anothers(place: Path) -> bool:
    """Whether a part still runs there, and it is not this one; what one that ended has left is let go: its number may be anybody's now."""
    if int(place.name) == os.getpid():
        return False
    with suppress(FileNotFoundError), open(place) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
        place.unlink(missing_ok=True)
    return False


def send(group: int, what: signal.Signals) -> None:
    """To a part's processes, where there are any."""
    with suppress(ProcessLookupError):
        os.killpg(group, what)


@dataclass(frozen=True)
class Ground:
    """A device, and whether it stands in for a GPU."""

    device: str
    dry: bool  # whether something stands in for a GPU: sizes are small, and what it measures is not kept

    @classmethod
    def here(cls) -> Ground:
        """The GPU where there is one; the null device (`tests/null_cuda`) stands in for one."""
        if torch.cuda.is_available():
            return cls("cuda", os.environ.get("NULL_CUDA") == "1")
        return cls("cpu", True)

    @property
    def on_gpu(self) -> bool:
        """Whether programs run as on a GPU, be it one that computes nothing."""
        return self.device == "cuda"

    @property
    def computes_nothing(self) -> bool:
        """Whether numbers mean nothing here."""
        return self.on_gpu and self.dry

    @property
    def name(self) -> str:
        """As a table says it."""
        if not self.dry:
            return torch.cuda.get_device_name()
        return "the null device, in place of a GPU" if self.on_gpu else "this CPU, in place of a GPU"

    @contextmanager
    def alone(self) -> Iterator[None]:
        """While all other parts stand still; what of the device's memory this one does not need it gives back at the end."""
        with still():
            yield
            if self.on_gpu:
                torch.cuda.synchronize()
                torch.cuda.empty_cache()

    def above_bytes(self, call: Call, let_go: Call = lambda: None) -> int:
        """The peak of a call above the level at its start, in bytes, as the allocator counts; run once before.

        `let_go` gives back what a call keeps for the next one, such as an arena, which is the call's as well.
        """
        with self.alone():
            if not self.on_gpu:
                return measure_memory(call, self.device, warmup=1).above_bytes
            call()
            let_go()
            return measure_memory(call, self.device).above_bytes

    def reserved_bytes(self, call: Call) -> int | None:
        """What the allocator holds of the device after a call from an empty cache; None on a CPU, which tells nothing of the kind."""
        if not self.on_gpu:
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
        if (config := getattr(model, "config", None)) is not None and hasattr(config, "use_cache"):
            config.use_cache = False  # as people train
        keys = list(batch) if isinstance(batch, dict) else []
        given = tuple(batch.values()) if isinstance(batch, dict) else tuple(batch)

        def loss(model: nn.Module, *items: Any) -> torch.Tensor:
            return scalar_loss(model, **dict(zip(keys, items, strict=True))) if keys else scalar_loss(model, *items)

        return self.moved(Workload(model, given, loss))


def twin(made: Workload) -> Workload:
    """The same workload again, on tensors of its own."""
    return Workload(copy.deepcopy(made.model), tuple(tensor.clone() for tensor in made.batch), made.loss)
