"""Random sequences with recomputation and swapping, what they take by brute force, and a machine whose copies are late."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.ir.graph import Graph, Kind, Node, Storage
from lowtide.ir.operators.nodes import is_view, repeatable
from lowtide.remat.entries import Codes, EntryKind
from lowtide.remat.offload import movable_storages, storable
from lowtide.runtime.copies import StreamedMemory


def random_sequence(graph: Graph, rng: random.Random, again: float = 0.2, away: float = 0.4, *, swap_state: bool = False) -> list[int]:
    """All nodes in program order; between them some run again, and some storages to the host and back, the caller's with `swap_state`."""
    return _Writer(graph, rng, again, away, swap_state).sequence()


class _Writer:
    """Keeps book of what is where, so that the sequence is right."""

    def __init__(self, graph: Graph, rng: random.Random, again: float, away: float, swap_state: bool) -> None:
        self.graph, self.rng, self.likely_again, self.likely_away = graph, rng, again, away
        counted = movable_storages(graph)
        self.number = {storage: index for index, storage in enumerate(counted)}
        self.codes = Codes(len(graph.nodes), len(counted))
        self.may_go = {storage for storage, may in zip(counted, storable(graph, swap_state=swap_state), strict=True) if may}
        self.makers = _makers(graph)
        self.offloaded = self.may_go & {value.storage for value in graph.inputs}
        self.here: set[Storage] = set(self.offloaded)
        self.stored: set[Storage] = set()
        self.pending: set[Storage] = set()
        self.version: dict[Storage, int] = {}
        self.entries: list[int] = []

    def sequence(self) -> list[int]:
        for index, node in enumerate(self.graph.nodes):
            if is_view(node):
                continue
            for value in node.inputs:
                if value.storage in self.makers and self.rng.random() < self.likely_again:
                    self.again(self.makers[value.storage])
            for before, _ in node.writes:
                if before.storage in self.pending:
                    self.drop(before.storage)
                self.may_go.discard(before.storage)
            self.run(index, node)
            self.version.update({after.storage: after.version for _, after in node.writes})
            self.move()
        for storage in self.ordered(self.pending):
            self.drop(storage)
        for storage in self.ordered(self.offloaded - self.here):
            self.load(storage)
        return self.entries

    def run(self, index: int, node: Node) -> None:
        for value in (*node.inputs, *(before for before, _ in node.writes)):
            self.want(value.storage)
        self.entries.append(index)
        self.here.update(value.storage for value in node.outputs if value is not None)

    def want(self, storage: Storage) -> None:
        """Have it there: what is away can be made again, or loaded."""
        if storage in self.here or (storage not in self.makers and storage not in self.offloaded):
            return
        if storage in self.makers and self.rng.random() < 0.3:
            self.again(self.makers[storage])
        if storage not in self.here:
            self.load(storage)

    def again(self, index: int) -> None:
        """Run a node once more where that may be."""
        node = self.graph.nodes[index]
        copy = repeatable(node)
        if copy is None or any(value.version != self.version.get(value.storage, 0) for value in copy.inputs):
            return
        if not {value.storage for value in node.outputs if value is not None} & self.pending:
            self.run(index, copy)

    def move(self) -> None:
        """A few copies to the host and back."""
        for storage in self.ordered(self.may_go):
            if self.rng.random() >= self.likely_away:
                continue
            if storage not in self.here:
                if storage in self.stored and self.rng.random() < 0.2:
                    self.load(storage)
            elif storage not in self.stored:
                self.entries.append(self.codes.store(self.number[storage]))
                self.stored.add(storage)
                self.pending.add(storage)
            elif self.rng.random() < 0.5:
                self.drop(storage)

    def drop(self, storage: Storage) -> None:
        self.entries.append(self.codes.drop(self.number[storage]))
        self.pending.discard(storage)
        self.here.discard(storage)

    def load(self, storage: Storage) -> None:
        self.entries.append(self.codes.load(self.number[storage]))
        self.here.add(storage)

    def ordered(self, storages: set[Storage]) -> list[Storage]:
        return sorted(storages, key=self.number.__getitem__)


def footprints(graph: Graph, entries: Sequence[int]) -> list[int]:
    """The bytes alive at each entry, with all that could be offloaded and without what else is resident.

    From the first word of `remat.entries` alone, nobody working in place.
    """
    counted = movable_storages(graph)
    codes = Codes(len(graph.nodes), len(counted))
    made: dict[Storage, list[tuple[int, int]]] = {storage: [] for storage in counted}  # by copy: when it is made, when it is read last
    for storage in {value.storage for value in graph.inputs} & made.keys():
        made[storage].append((-1, -1))
    for place, entry in enumerate(entries):
        deed, index = codes.read(entry)
        node = graph.nodes[index] if deed is EntryKind.RUN else None
        if node is not None and place != entries.index(entry):
            node = repeatable(node)
        touched = (*node.inputs, *(before for before, _ in node.writes)) if node else ()
        reads = {value.storage for value in touched} if node else {counted[index]} if deed is not EntryKind.LOAD else set()
        makes = (
            {value.storage for value in node.outputs if value} - reads if node else {counted[index]} if deed is EntryKind.LOAD else set()
        )
        for storage in reads & made.keys():
            made[storage][-1] = (made[storage][-1][0], place)
        for storage in makes & made.keys():
            made[storage].append((place, place))
    given = {value.storage for value in graph.inputs if value.storage.kind.caller_owned}
    for storage in ({value.storage for value in graph.outputs} | given) & made.keys():
        made[storage][-1] = (made[storage][-1][0], len(entries))
    lives = [(start, end, storage.nbytes) for storage, copies in made.items() for start, end in copies]
    return [sum(nbytes for start, end, nbytes in lives if start <= place <= end) for place in range(len(entries))]


def _makers(graph: Graph) -> dict[Storage, int]:
    """Of what nodes make: who first."""
    given = {value.storage for value in graph.inputs}
    found: dict[Storage, int] = {}
    for index, node in enumerate(graph.nodes):
        for value in node.outputs:
            if value is not None and value.storage not in given and value.storage.kind is not Kind.SCALAR:
                found.setdefault(value.storage, index)
    return found


@dataclass(eq=False)
class LateStream:
    """Work that is done only when somebody waits for it."""

    name: str
    log: list[tuple[str, ...]]
    work: list[Callable[[], None]] = field(default_factory=list)
    given: int = 0  # how much work it was given in all
    knows: LateEvent | None = None  # the latest moment of the computing stream that it waits for

    def record_event(self) -> LateEvent:
        self.log.append((self.name, "record"))
        return LateEvent(self, self.given)

    def wait_event(self, event: LateEvent) -> None:
        self.log.append((self.name, "wait", event.stream.name))
        if self.name == "compute":
            event.happen()  # operators run when they are called: so what they wait for is done now
        else:
            self.give(event.happen)
        if event.stream.name == "compute":
            self.knows = event

    def give(self, work: Callable[[], None]) -> None:
        self.work.append(work)
        self.given += 1

    def run_until(self, count: int) -> None:
        while self.work and self.given - len(self.work) < count:
            self.work.pop(0)()


@dataclass(eq=False)
class LateEvent:
    """All work that a stream had been given by then is done."""

    stream: LateStream
    count: int

    def happen(self) -> None:
        self.stream.run_until(self.count)


class LateStreams:
    """A machine without streams, made to look like one whose copies run as late as they may.

    What is copied is not held on to, as a GPU would not: memory that is freed too early is noticed, and a target holds nonsense until
    its copy runs.
    """

    def __init__(self) -> None:
        self.log: list[tuple[str, ...]] = []
        self.compute = LateStream("compute", self.log)
        self.made: list[LateStream] = []
        self.copied_bytes = 0
        self.pinned_bytes = 0

    def computing(self) -> LateStream:
        return self.compute

    def copying(self) -> LateStream:
        self.made.append(LateStream(("to host", "from host")[len(self.made)], self.log))
        return self.made[-1]

    def capturing(self) -> bool:
        return False

    def pinned(self, nbytes: int) -> torch.Tensor:
        self.pinned_bytes += nbytes
        return torch.full((nbytes,), 0xFF, dtype=torch.uint8)

    def wait(self, stream: LateStream) -> Callable[[], None]:
        return lambda: stream.run_until(stream.given)

    def let_go(self) -> None:
        self.log.append(("let go",))

    def copy(self, stream: LateStream, target: torch.Tensor, source: torch.Tensor) -> None:
        self.log.append((stream.name, "copy"))
        assert target.dtype == source.dtype == torch.uint8
        assert target.shape == source.shape
        assert stream.knows is not None, "a copy that may run before what was computed"
        stream.knows = None  # the next copy needs to wait for a later moment
        if stream is self.made[1]:
            target.fill_(0xFF)
        ends = [StorageWeakRef(each.untyped_storage()) for each in (target, source)]
        starts = [each.untyped_storage().data_ptr() for each in (target, source)]
        addresses, nbytes = (target.data_ptr(), source.data_ptr()), target.numel()

        def move() -> None:
            there = [torch.UntypedStorage._new_with_weak_ptr(end.cdata) for end in ends]
            same = [storage is not None and storage.data_ptr() == ptr for storage, ptr in zip(there, starts, strict=True)]
            assert all(same), "memory was freed before the copy of it was done"
            ctypes.memmove(*addresses, nbytes)
            self.copied_bytes += nbytes

        stream.give(move)


def idle_bytes(memory: StreamedMemory) -> int:
    """The pinned memory that is kept and not in use now."""
    return sum(size * len(buffers) for size, buffers in memory._idle.items())


def swapping(sequence: Callable[[Graph], Sequence[int]], written: list[Any]) -> Callable[[Graph], tuple[Graph, ...]]:
    """In the place of `equal_graphs`: each captured graph as a sequence writes it; what was written is added to a list."""
    from lowtide.remat.write_out import rematerialise

    def equal_graphs(graph: Graph) -> tuple[Graph, ...]:
        written.append(rematerialise(graph, sequence(graph)))
        return (written[-1].graph,)

    return equal_graphs
