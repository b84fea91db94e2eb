"""Schedules of requests, run on PyTorch's allocator: tensors that come and go, each full of a number of its own while it lives."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import strategies as st

from lowtide.api.step_memory import directory
from lowtide.problems.placement import PlaceProblem
from lowtide.runtime.arena import native
from lowtide.runtime.arena.allocator import OUTLIVES, Allocator, ArenaMemory, Recorded, Script

Schedule = list[tuple[str, int]]  # ("make", bytes) or ("drop", which of those that live, modulo their number)


@dataclass(frozen=True)
class FirstFit:
    """Addresses in the order of requests: each at the lowest place that is free."""

    offsets: tuple[int, ...]
    arena_bytes: int
    lower_bound_bytes: int

    @classmethod
    def of(cls, problem: PlaceProblem) -> FirstFit:
        offsets: list[int] = []
        for new in range(problem.buffer_count):
            meets = [old for old in range(new) if problem.start[new] < problem.end[old] and problem.start[old] < problem.end[new]]
            at = 0
            for low, high in sorted((offsets[old], offsets[old] + int(problem.size_bytes[old])) for old in meets):
                if at + problem.size_bytes[new] <= low:
                    break
                at = max(at, high)
            offsets.append(at)
        arena = max((at + int(size) for at, size in zip(offsets, problem.size_bytes, strict=True)), default=0)
        return cls(tuple(offsets), arena, problem.lower_bound_bytes)


def skip_without_arenas() -> None:
    """Skip the test where there can be none, or no compiler for them."""
    if sys.platform != "linux":
        pytest.skip("arenas are for Linux")
    try:
        native.load(directory())
    except native.NativeError as why:
        pytest.skip(str(why))


class Tensors:
    """Runs schedules. Raises AssertionError where a tensor does not hold what was written to it."""

    def __init__(self) -> None:
        self.alive: list[tuple[torch.Tensor, int]] = []
        self._serial = 0

    def run(self, schedule: Schedule) -> None:
        for what, number in schedule:
            self._make(number) if what == "make" else self._drop(number)

    def check(self) -> None:
        """All that live, at once."""
        for tensor, number in self.alive:
            assert (tensor.numpy() == number).all(), f"a tensor of {tensor.nbytes} bytes was written by somebody else"

    def clear(self) -> None:
        self.check()
        self.alive.clear()

    def _make(self, nbytes: int) -> None:
        self._serial = self._serial % 255 + 1
        tensor = torch.empty(nbytes, dtype=torch.uint8)
        tensor.numpy()[:] = self._serial  # by numpy: torch's own operators might ask for memory too
        self.alive.append((tensor, self._serial))

    def _drop(self, which: int) -> None:
        if self.alive:
            tensor, number = self.alive.pop(which % len(self.alive))
            assert (tensor.numpy() == number).all(), f"a tensor of {tensor.nbytes} bytes was written by somebody else"


def empty(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8)


def script_of(allocator: Allocator, *requests: tuple[int, int]) -> tuple[Script, ArenaMemory]:
    """(bytes, offset) of each request."""
    sizes, offsets = (np.array(each, np.int64) for each in zip(*requests, strict=True))
    script = Script(allocator, sizes, offsets)
    return script, ArenaMemory(allocator, script.arena_bytes)


def planned(allocator: Allocator, recorded: Recorded) -> tuple[Script, ArenaMemory]:
    """First-fit addresses of what was recorded, and an arena for them."""
    dying = np.flatnonzero(recorded.died >= 0)
    found = FirstFit.of(PlaceProblem.of(-(-recorded.size_bytes[dying] // 64) * 64, recorded.born[dying], recorded.died[dying]))
    offsets = np.full(len(recorded.size_bytes), OUTLIVES)
    offsets[dying] = found.offsets
    return Script(allocator, recorded.size_bytes, offsets), ArenaMemory(allocator, found.arena_bytes)


def recorded(allocator: Allocator, schedule: Schedule, tensors: Tensors) -> Recorded:
    _, found = allocator.record(lambda: tensors.run(schedule))
    assert found is not None
    return found


def mapped(address: int) -> bool:
    """Whether the process has memory there."""
    limits = [line.split()[0].split("-") for line in Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()]
    return any(int(low, 16) <= address < int(high, 16) for low, high in limits)


def resident_bytes(address: int) -> int:
    """What the system holds of the mapping at an address."""
    found = None
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        name, _, rest = line.partition(" ")
        if "-" in name and not name.endswith(":"):
            low, high = (int(limit, 16) for limit in name.split("-"))
            found = low <= address < high
        elif found and name == "Rss:":
            return int(rest.split()[0]) * 1024
    raise AssertionError(f"nothing is mapped at {address:#x}")


_SIZES = st.one_of(st.sampled_from([1, 64, 65, 256, 256, 1000, 1000]), st.integers(1, 3000))
_EVENTS = st.one_of(st.tuples(st.just("make"), _SIZES), st.tuples(st.just("drop"), st.integers(0, 30)))
schedules = st.lists(_EVENTS, max_size=40)


@st.composite
def deviations(draw: st.DrawFn, schedule: Schedule) -> Schedule:
    """The schedule with a few events left out, put in or replaced."""
    changed = list(schedule)
    for _ in range(draw(st.integers(0, 4))):
        at = draw(st.integers(0, len(changed)))
        changed[at : at + draw(st.integers(0, 2))] = draw(st.lists(_EVENTS, max_size=2))
    return changed
