"""What a program that repeats one step makes PyTorch's caching allocator reserve: by its simulation, or by that of a GPU."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from lowtide.cuda.segments import CachingAllocator
from lowtide.problems.placement import PlaceProblem


@dataclass(frozen=True)
class First:
    """A step that runs once, before the others."""

    step: PlaceProblem
    staying: frozenset[int]  # of its buffers, those that live to its end and are never freed


@dataclass(frozen=True)
class Replay:
    """What a program that repeats one step made the allocator reserve."""

    reserved_bytes: int  # MR of MODeL's section 5.4, at its peak over all steps
    live_bytes: int  # RS: the most alive while that much was reserved
    reserved_by_step: tuple[int, ...]  # after each
    settled: bool  # whether the last step left the allocator as it had found it: then all further ones will

    @property
    def fragmentation(self) -> float:
        """(MR - RS) / MR."""
        return (self.reserved_bytes - self.live_bytes) / self.reserved_bytes if self.reserved_bytes else 0.0


class Allocator(Protocol):
    """What a replay asks of an allocator: the simulated one, or that of a GPU (`bench.cuda_device`)."""

    peak: tuple[int, int]

    @property
    def reserved_bytes(self) -> int: ...

    def malloc(self, nbytes: int) -> int: ...

    def free(self, address: int) -> None: ...

    def layout(self) -> tuple[tuple[int, int, int], ...]: ...


def replay(
    resident: Sequence[int], step: PlaceProblem, *, repeats: int = 8, first: First | None = None, allocator: Allocator | None = None
) -> Replay:
    """Requests the `resident` bytes, one after the other, and then runs the step `repeats` times, after `first` where there is one.

    At each step of the problem, buffers that start there are requested, in their order, and then those that end after it are freed.
    Buffers that live to the end (results, and gradients in eager PyTorch) are freed when the next repetition starts: `zero_grad` comes
    first in a step, and the caller holds the results until then.
    """
    allocator = CachingAllocator() if allocator is None else allocator
    there = [allocator.malloc(nbytes) for nbytes in resident if nbytes]
    if first is not None:
        there += _run(allocator, first.step, _events(first.step), first.staying)
    events, reserved = _events(step), []
    before, after = (), allocator.layout()
    for _ in range(repeats):
        _run(allocator, step, events)
        reserved.append(allocator.reserved_bytes)
        before, after = after, allocator.layout()
    for address in there:
        allocator.free(address)
    return Replay(*allocator.peak, tuple(reserved), before == after)


def _run(allocator: Allocator, step: PlaceProblem, events: Sequence[tuple[int, bool]], staying: Collection[int] = ()) -> list[int]:
    """One repetition, at whose end all is freed but what stays: the addresses of that."""
    held: dict[int, int] = {}
    for buffer, begins in events:
        if begins:
            held[buffer] = allocator.malloc(int(step.size_bytes[buffer]))
        else:
            allocator.free(held.pop(buffer))
    for buffer, address in held.items():  # now, which is the same as before the next repetition's first request
        if buffer not in staying:
            allocator.free(address)
    return [address for buffer, address in held.items() if buffer in staying]


def _events(step: PlaceProblem) -> list[tuple[int, bool]]:
    """Buffers in the order in which they are requested (True) and freed (False); those that live to the last step are never freed."""
    living = np.flatnonzero((step.size_bytes > 0) & (step.start < step.end)).tolist()
    last = int(step.end.max(initial=0))
    begins = [(int(step.start[each]), 0, each) for each in living]
    ends = [(int(step.end[each]) - 1, 1, each) for each in living if step.end[each] < last]
    return [(each, not after) for _, after, each in sorted(begins + ends)]
