"""Whether anything is left to chance when three streams run as they like: a machine that notes what comes after what.

Two accesses to the same bytes, one of which writes, are a race where neither stream waits for the other between them. A run without races
has the same numbers in every order that its waits allow, so that no order has to be tried.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

Clock = dict[str, int]  # by stream: how much of its work is done by then
_NO_ACCESS = {"empty", "empty_strided", "set_", "detach", "resize_"}


@dataclass(eq=False)
class ClockedStream:
    """Work that is done when it is given, and what it comes after."""

    name: str
    clock: Clock = field(default_factory=dict)

    def record_event(self) -> ClockedEvent:
        return ClockedEvent(dict(self.clock))

    def wait_event(self, event: ClockedEvent) -> None:
        self.clock = later(self.clock, event.clock)


@dataclass(frozen=True)
class ClockedEvent:
    clock: Clock


@dataclass(frozen=True)
class Access:
    """Of bytes from `begin` to `end`, as the work of so late a moment of a stream."""

    stream: str
    at: int
    begin: int
    end: int
    writes: bool


def later(one: Clock, other: Clock) -> Clock:
    return {name: max(one.get(name, 0), other.get(name, 0)) for name in {*one, *other}}


class ClockedStreams:
    """In the place of `CudaStreams`; `races` are pairs of accesses that nothing orders."""

    def __init__(self) -> None:
        self.compute = ClockedStream("compute")
        self.made: list[ClockedStream] = []
        self.host: Clock = {}  # what the host has waited for
        self.accesses: list[Access] = []
        self.races: list[tuple[Access, Access]] = []

    def computing(self) -> ClockedStream:
        return self.compute

    def copying(self) -> ClockedStream:
        self.made.append(ClockedStream(f"copies {len(self.made)}"))
        return self.made[-1]

    def capturing(self) -> bool:
        return False

    def pinned(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8)

    def wait(self, stream: ClockedStream) -> Callable[[], None]:
        def waits() -> None:
            self.host = later(self.host, stream.clock)

        return waits

    def let_go(self) -> None:
        for stream in (self.compute, *self.made):
            self.wait(stream)()

    def copy(self, stream: ClockedStream, target: torch.Tensor, source: torch.Tensor) -> None:
        self.work(stream, reads=[source], writes=[target])
        ctypes.memmove(target.data_ptr(), source.data_ptr(), target.numel())

    def work(self, stream: ClockedStream, reads: list[torch.Tensor], writes: list[torch.Tensor]) -> None:
        """Give a stream work, and look for what it may run beside."""
        clock = stream.clock = later(stream.clock, self.host)
        clock[stream.name] = clock.get(stream.name, 0) + 1
        for tensors, writing in ((reads, False), (writes, True)):
            for tensor in tensors:
                storage = tensor.untyped_storage()
                begin, end = storage.data_ptr(), storage.data_ptr() + storage.nbytes()
                mine = Access(stream.name, clock[stream.name], begin, end, writing)
                for other in self.accesses:
                    beside = other.begin < end and begin < other.end and (other.writes or writing)
                    if beside and clock.get(other.stream, 0) < other.at:
                        self.races.append((other, mine))
                self.accesses.append(mine)

    @property
    def work_given(self) -> Counter[str]:
        return Counter(each.stream for each in self.accesses)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Operators that run meanwhile are work of the computing stream. What came before is done."""
        self.let_go()
        self.accesses.clear()
        with _Operators(self):
            yield


class _Operators(TorchDispatchMode):
    def __init__(self, streams: ClockedStreams) -> None:
        super().__init__()
        self.streams = streams

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func._schema.name.partition("::")[2] in _NO_ACCESS or func.is_view:
            return result
        reads, writes = list[torch.Tensor](), list[torch.Tensor]()
        for at, argument in enumerate(func._schema.arguments):
            value, alias = args[at] if at < len(args) else (kwargs or {}).get(argument.name), argument.alias_info
            (writes if alias is not None and alias.is_write else reads).extend(_tensors(value))
        self.streams.work(self.streams.compute, reads, [*writes, *_tensors(result)])
        return result


def _tensors(item: Any) -> Iterator[torch.Tensor]:
    if isinstance(item, torch.Tensor):
        yield item
    elif isinstance(item, (list, tuple)):
        for each in item:
            yield from _tensors(each)
