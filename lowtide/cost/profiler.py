"""Measures what a callable takes: its peak of memory, as the allocator counts it, and its time.

    takes   any callable without arguments
    leaves  bytes above the level at its start, microseconds by the wall clock

On CPU the allocator's own record is read through torch.profiler: every allocation and free by the calling thread, and by the autograd
threads that work for it, in order. On CUDA the caching allocator keeps the highest level itself. Time is never taken while memory is
recorded: recording slows a call down.
"""

from __future__ import annotations

import functools
import gc
import os
import platform
import statistics
import time
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import _profiler_enabled
from torch._C._profiler import _EventType
from torch.autograd.profiler import profile, record_function  # torch.profiler's own imports inductor, which takes a second

from lowtide.errors import LowtideError

Call = Callable[[], object]

_MARK = "lowtide::measured"


@dataclass(frozen=True)
class Measured:
    """What a call took from the allocator, counted from the level at its start."""

    above_bytes: int  # the highest level during the call; at least 0
    end_bytes: int  # the level when it returned, its result still held; negative if it freed more than it kept


@dataclass(frozen=True)
class Timing:
    """The times of one callable, in the order they were taken."""

    samples_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        return statistics.median(self.samples_us)

    @property
    def min_us(self) -> float:
        return min(self.samples_us)

    def ratio_to(self, base: Timing) -> float:
        """Median of the ratios to `base`, round by round: what slowed down a whole round of `interleaved_us` cancels out."""
        return statistics.median(mine / theirs for mine, theirs in zip(self.samples_us, base.samples_us, strict=True))


@dataclass(frozen=True)
class Measurement:
    """Peak of memory and time of one callable on one device."""

    device: str
    above_bytes: int  # the peak, counted from what was held when the call began
    end_bytes: int  # what was held more when it returned
    median_us: float
    min_us: float
    repeats: int

    def __str__(self) -> str:
        peak = f"peak {self.above_bytes / 2**20:.2f} MiB above the start"
        return f"{peak}, {self.median_us / 1e3:.3f} ms (median of {self.repeats}) on {self.device}"


def measure(call: Call, device: str = "cpu", repeats: int = 5, warmup: int = 1) -> Measurement:
    """Peak memory and time of `call`, which runs `warmup + repeats + 2` times; a training step trains as many steps.

    The peak is counted above the level at the start (`above_bytes`). It excludes what the caller holds: parameters, optimizer state and
    batch. `Step.measure` counts the whole peak of a step.

    Memory is measured last: what is made once and kept (optimizer state) exists by then, and is not counted.
    """
    timing = time_us(call, repeats, warmup, device)
    memory = measure_memory(call, device, warmup=1)
    return Measurement(device, memory.above_bytes, memory.end_bytes, timing.median_us, timing.min_us, repeats)


def measure_memory(call: Call, device: str = "cpu", warmup: int = 0) -> Measured:
    """The highest allocator level during one run of `call` above the level at its start, and the level it leaves.

    Counted is what the calling thread and autograd's own threads do; a thread that `call` starts itself is not seen on CPU. Nor are, on
    CPU, frees of blocks that are older than the recording. A call that lets such blocks go (a step that drops the last one's gradients) is
    to run `warmup` times before the run that counts, within the recording: what those runs leave is known.

    Raises LowtideError when a profiler is already running on this thread, ValueError for a device that is
    neither CPU nor CUDA, or fewer than 0 warm-ups.
    """
    if warmup < 0:
        raise ValueError(f"expected warmup >= 0, got {warmup}")
    return measure_memory_of_each([call] * (warmup + 1), device)[-1]


def measure_memory_of_each(calls: Iterable[Call], device: str = "cpu", *, collect: bool = True) -> list[Measured]:
    """`peak_bytes` of each of many calls in one recording. `calls` may make each call on demand: none is held once it has run.

    Garbage is collected first, so that what it frees does not fall into the recording; `collect=False` for calls that meet none.
    """
    measured = _peaks_on_cuda if _is_cuda(device) else _peaks_on_cpu
    if collect:
        gc.collect()
    return measured(calls, device)


def time_us(call: Call, repeats: int = 10, warmup: int = 2, device: str = "cpu") -> Timing:
    """Wall-clock times of `repeats` runs of `call`, after `warmup` runs that do not count; each waits for the device to finish."""
    return interleaved_us({"": call}, repeats, warmup, device)[""]


def interleaved_us(calls: dict[str, Call], repeats: int = 10, warmup: int = 2, device: str = "cpu") -> dict[str, Timing]:
    """Times of several callables taken in turns, so that a machine that slows down slows all of them; every other round runs backwards.

    Compare two with `times["a"].ratio_to(times["b"])`. Raises ValueError for fewer than 1 repeat or fewer than 0 warm-ups.
    """
    if repeats < 1 or warmup < 0:
        raise ValueError(f"expected repeats >= 1 and warmup >= 0, got repeats={repeats}, warmup={warmup}")
    wait: Callable[[], None] = (lambda: torch.cuda.synchronize(device)) if _is_cuda(device) else (lambda: None)
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(warmup):
        for call in calls.values():
            call()
    gc.collect()
    for turn in range(repeats):
        for name in reversed(calls) if turn % 2 else calls:
            samples[name].append(_once_us(calls[name], wait))
    return {name: Timing(tuple(taken)) for name, taken in samples.items()}


def device_name(device: str = "cpu") -> str:
    """What the device is called by its maker, with what decides which kernels run: "Intel(R) Xeon(R) Processor, AVX512"."""
    if _is_cuda(device):
        return torch.cuda.get_device_name(device)
    return f"{_processor()}, {torch.backends.cpu.get_cpu_capability()}"


def _once_us(call: Call, wait: Callable[[], None]) -> float:
    wait()
    start = time.perf_counter_ns()
    result = call()
    wait()
    taken_us = (time.perf_counter_ns() - start) / 1e3
    del result  # held until here: letting it go is the caller's time, not the call's
    return taken_us


def _peaks_on_cuda(calls: Iterable[Call], device: str) -> list[Measured]:
    """Ask the caching allocator for its highest level after each call."""
    peaks = []
    for call in calls:
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = call()
        torch.cuda.synchronize(device)
        after, peak = torch.cuda.memory_allocated(device), torch.cuda.max_memory_allocated(device)
        peaks.append(Measured(peak - before, after - before))
        del call, result  # before the next call is made
    return peaks


def _peaks_on_cpu(calls: Iterable[Call], device: str) -> list[Measured]:
    """Run each call between two marks in one recording, then cut the record at the marks."""
    if _profiler_enabled():
        raise LowtideError("expected no profiler on this thread, found one running: memory cannot be recorded twice; stop it, then measure")
    count = 0
    with _silence(), profile(use_cpu=True, profile_memory=True, use_kineto=True) as session:
        for call in calls:
            with record_function(_MARK):
                result = call()
            count += 1
            del call, result  # before the next call is made
    return _cut(_recorded(session), count)


@contextmanager
def _silence() -> Iterator[None]:
    """Kineto reports the start and stop of every session on stderr unless told otherwise, once, before the first one of the process."""
    if "KINETO_LOG_LEVEL" in os.environ:
        yield
        return
    os.environ["KINETO_LOG_LEVEL"] = "6"
    try:
        yield
    finally:
        del os.environ["KINETO_LOG_LEVEL"]


def _recorded(session: Any) -> list[Any]:
    """The events of a finished session, in the order of recording. No public name leads to single blocks: only this place looks."""
    results = session.kineto_results
    roots = [] if results is None else results.experimental_event_tree()
    events, ahead = [], list(reversed(roots))
    while ahead:
        events.append(event := ahead.pop())
        ahead += reversed(event.children)
    return events


def _cut(events: list[Any], count: int) -> list[Measured]:
    """What happened to the CPU allocator's level within each of `count` marks. Raises LowtideError if the record lacks any."""
    marks = sorted((event.start_time_ns, event.end_time_ns) for event in events if event.name == _MARK)
    if len(marks) != count:
        raise LowtideError(
            f"expected {count} marked calls in the record of torch {torch.__version__}'s profiler, got {len(marks)}: "
            "a measured call may not start or stop a profiler itself"
        )
    changes = _changes([event for event in events if event.tag == _EventType.Allocation])
    times_ns = [time_ns for time_ns, _ in changes]
    return [_level(nbytes for _, nbytes in changes[bisect_left(times_ns, start) : bisect_right(times_ns, end)]) for start, end in marks]


def _changes(allocations: list[Any]) -> list[tuple[int, int]]:
    """(time in ns, bytes allocated or, below 0, freed) on CPU, in order of time; within one nanosecond in the order of recording.

    The free of a block that is older than the recording is left out: torch knows the sizes of blocks only while it records, so such a free
    is missing, or has the size of another block, long gone, that was once recorded at the same address.
    """
    blocks: dict[int, int] = {}
    changes = []
    for event in sorted(allocations, key=lambda event: event.start_time_ns):
        block = event.extra_fields
        if block.device.type != "cpu":
            continue
        if block.alloc_size > 0:
            blocks[block.ptr] = block.alloc_size
            changes.append((event.start_time_ns, block.alloc_size))
        elif block.ptr in blocks:
            changes.append((event.start_time_ns, -blocks.pop(block.ptr)))
    return changes


def _level(changes_bytes: Iterable[int]) -> Measured:
    """The highest and the last level that a series of allocations (positive) and frees (negative) reaches from 0."""
    level = peak = 0
    for change in changes_bytes:
        level += change
        peak = max(peak, level)
    return Measured(peak, level)


def _is_cuda(device: str) -> bool:
    kind = torch.device(device).type
    if kind not in ("cpu", "cuda"):
        raise ValueError(f"expected a CPU or CUDA device, got {device!r}: no other allocator can be measured")
    return kind == "cuda"


@functools.cache
def _processor() -> str:
    """The processor's name. Linux tells it in a file only, other systems through Python."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
