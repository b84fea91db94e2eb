"""Rematerialisation and swapping: computing a storage once more, or fetching it back, in place of keeping it (MAGIS, section 5.2).

A remat sequence names nodes to run, each at least once, some of them again; with swapping there are stores, drops and loads of storages
among them (`remat.entries`). A run reads of each storage what its latest run or load made. Written out
as a graph, the first run of a node makes the values that it always made, and every further run and every load is a node of its own, whose
results are values and storages of their own: which copy a reader reads is then said by values, as everything is.

Views are not in the sequence. A view is taken of whatever copy of its base is the present one, right before the first reader that asks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Container, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeVar

from lowtide.errors import CheckError
from lowtide.ir.graph import Graph, Node, Storage, Value, arguments
from lowtide.ir.operators.nodes import is_transfer, is_view, repeatable
from lowtide.remat.entries import Codes, EntryKind
from lowtide.remat.offload import Base, bases, drop, drop_offloaded, load, movable_storages, offloadable_storages, store
from lowtide.rewrite.base import Rewritten


class HostBook:
    """By storage of the graph: its copy on the host, and what became of it. Positions are those in the sequence, for messages."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.position = -1  # the present one
        self.offloadable = frozenset(offloadable_storages(graph))
        self.there: dict[Storage, Value] = {}  # on the host
        self.stored: dict[Storage, int] = {}  # the positions of stores whose drop is still to come
        self.dropped: dict[Storage, int] = {}  # the positions of drops
        self.offloaded: dict[Storage, tuple[Node, ...]] = {}  # the caller's own: the latest drop, after which comes the next load
        self.written: dict[Storage, int] = {}  # positions of the first writes: what is on the host is no longer true

    @cached_property
    def bases(self) -> dict[Storage, Base]:
        """What stands for each storage that can be stored."""
        return bases(self.graph)

    def note_writes(self, node: Node) -> None:
        """What is copied to the host now, or is to come back from there, is not written."""
        for before, _ in node.writes:
            self.check_settled(before.storage, "which writes it")
            self.written.setdefault(before.storage, self.position)

    def note_store(self, storage: Storage, node: Node) -> None:
        self.there[storage], self.stored[storage] = node.results[0], self.position

    def note_drop(self, storage: Storage, node: Node) -> None:
        """A copy is done, and what it is of is gone."""
        if storage in self.offloadable:
            self.offloaded[storage] = (node,)
        self.stored.pop(storage, None)
        self.dropped[storage] = self.position

    def base(self, storage: Storage, deed: str) -> Base:
        """What stands for a storage that is to be stored, dropped or loaded."""
        if storage not in self.bases:
            raise CheckError(
                f"sequence: expected at position {self.position} to {deed} a storage that can be, got {storage.name}: see `storable`"
            )
        return self.bases[storage]

    def copy(self, storage: Storage, deed: str) -> Value:
        if storage not in self.there:
            raise CheckError(
                f"sequence: expected {storage.name} stored before position {self.position}, which is to {deed} it; got no store of it"
            )
        return self.there[storage]

    def check_settled(self, storage: Storage | None, what: str) -> None:
        """While a copy to the host is under way, what is copied stays: nothing ends its life but its drop."""
        if storage in self.stored:
            stored = f"{storage.name}, which position {self.stored[storage]} stores"
            raise CheckError(f"sequence: expected {stored}, dropped before position {self.position}, {what}; got no drop")

    def check_unwritten(self, storage: Storage, deed: str) -> None:
        """What has been written stays: a copy on the host would be of before, or would have to be made anew."""
        if storage in self.written:
            where = f"position {self.written[storage]} writes it, position {self.position} is to {deed} it"
            raise CheckError(f"sequence: expected {storage.name} not written before it is moved; {where}")

    def absence(self, storage: Storage) -> str:
        return f"it dropped at position {self.dropped[storage]}" if storage in self.dropped else "no run of its maker"

    def check_new(self, storage: Storage) -> None:
        """A storage is stored once, as it was made or given."""
        if storage in self.there:
            raise CheckError(f"sequence: expected {storage.name} stored once, got it stored again at position {self.position}")
        self.check_unwritten(storage, "store")

    def check_end(self, here: Container[Storage]) -> None:
        """In the end every copy is done, and what is offloaded is there."""
        self.position += 1
        for storage in self.stored:
            self.check_settled(storage, "the end")
        for storage in self.offloaded:
            if storage not in here:
                raise CheckError(
                    f"sequence: expected {storage.name}, which is the caller's, loaded by the end; got {self.absence(storage)}"
                )


T = TypeVar("T")


@dataclass(frozen=True)
class Rematerialised:
    """The graph in the order of its sequence, what became of the old nodes, and of which old node each new one is a copy."""

    rewritten: Rewritten
    origins: tuple[int, ...]  # by new node: the index of the old one; -1 for a store, drop or load
    recomputed: tuple[int, ...]  # indices of the new nodes that repeat what had been computed before, views apart

    @property
    def graph(self) -> Graph:
        """The new graph; its program order is the sequence."""
        return self.rewritten.graph

    @cached_property
    def transfers(self) -> tuple[int, ...]:
        """Indices of the new nodes that store, drop and load."""
        return tuple(index for index, node in enumerate(self.graph.nodes) if is_transfer(node))

    def of_origins(self, items: Sequence[T], otherwise: T) -> tuple[T, ...]:
        """By new node: the item of the old node that it is a copy of; `otherwise` for a store, drop or load."""
        return tuple(items[origin] if origin >= 0 else otherwise for origin in self.origins)


def rematerialise(graph: Graph, sequence: Sequence[int]) -> Rematerialised:
    """The graph that does what the entries of `sequence` say, one after another; nodes that only make views are not among them.

    Raises CheckError naming the node where a run reads what is not there, repeats what is random or writes, or is missing; naming the
    storage and the position in the sequence where one is stored, dropped or loaded that cannot be.
    """
    writer = _GraphWriter(graph)
    for position, entry in enumerate(sequence):
        writer.enter(position, entry)
    return writer.finished()


class _GraphWriter:
    """The new graph as far as it is written, and which copy of everything is the present one."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.views = {value: index for index, node in enumerate(graph.nodes) if is_view(node) for value in node.outputs if value}
        self.returned: defaultdict[Storage, list[Value]] = defaultdict(list)  # views among the graph's outputs, by old storage
        for value in graph.outputs:
            if value in self.views:
                self.returned[value.storage].append(value)
        self.present: dict[Value, Value] = {value: value for value in graph.inputs}  # the latest copy of each old value
        self.storage: dict[Storage, Storage] = {value.storage: value.storage for value in graph.inputs}  # and of each old storage
        self.first: dict[Node, Node] = {}  # by old node
        self.nodes: list[Node] = []
        self.origins: list[int] = []
        self.recomputed: list[int] = []
        self.taken = {value.name for node in graph.nodes for value in node.results} | {value.name for value in graph.inputs}
        self.taken |= {value.storage.name for node in graph.nodes for value in node.results} | {each.name for each in self.storage}
        self.copies: defaultdict[tuple[str, str], int] = defaultdict(int)
        self.movable = movable_storages(graph)
        self.codes = Codes(len(graph.nodes), len(self.movable))
        self.host = HostBook(graph)

    def enter(self, position: int, entry: int) -> None:
        self.host.position = position
        try:
            deed, index = self.codes.read(entry)
        except IndexError as error:
            raise CheckError(f"sequence: at position {position}: {error}") from error
        if deed is EntryKind.RUN:
            self.run(index)
        else:
            {EntryKind.STORE: self.store, EntryKind.DROP: self.drop, EntryKind.LOAD: self.load}[deed](self.movable[index])

    def run(self, index: int) -> None:
        """Write a node that makes or writes bytes."""
        node = self.graph.nodes[index]
        if is_view(node):
            raise CheckError(f"sequence: expected no node that only makes views, got {self.described(index)}")
        if node not in self.first:
            self.host.note_writes(node)
            after = tuple(self.first[before] for before in node.after if before in self.first)
            if len(after) < len(node.after):
                raise CheckError(f"sequence: expected {self.described(index)} after the nodes that its control edges name")
            self.take_returned_views(node)
            self.put(index, node if after == node.after else replace(node, after=after))
            return
        again = repeatable(node)
        if again is None:
            raise CheckError(f"sequence: expected {self.described(index)} once, since it is random or writes; got it again")
        for value in node.outputs if self.host.stored else ():
            self.host.check_settled(value.storage if value else None, "which makes it again")
        self.recomputed.append(self.put(index, replace(again, after=())))

    def take_returned_views(self, writer: Node) -> None:
        """Views that the graph returns are taken in the end, but of what is written over: before that."""
        for before, _ in writer.writes:
            for value in self.returned[before.storage]:
                if value.version == before.version:
                    self.now(value, -1)

    def store(self, storage: Storage) -> None:
        base = self.host.base(storage, "store")
        self.host.check_new(storage)
        node = store(self.here(storage, "store"), self.name(base.value.name, "host"), base.source)
        self.append(node)
        self.host.note_store(storage, node)

    def drop(self, storage: Storage) -> None:
        here, there, base = self.here(storage, "drop"), self.host.copy(storage, "drop"), self.host.base(storage, "drop")
        self.host.check_unwritten(storage, "drop")
        offloaded = storage in self.host.offloadable
        self.append(drop_offloaded(here, there, self.name(base.value.name, "gone")) if offloaded else drop(here, there, base.source))
        self.host.note_drop(storage, self.nodes[-1])
        del self.storage[storage]

    def load(self, storage: Storage) -> None:
        """Write the start of a copy to the device, which is the present one from there on."""
        there, base = self.host.copy(storage, "load"), self.host.base(storage, "load")
        self.host.check_settled(storage, "which loads it")
        if storage in self.host.offloadable and storage in self.storage:
            raise CheckError(
                f"sequence: expected {storage.name} dropped before position {self.host.position} loads it: it is the caller's own"
            )
        node = load(there, base.value, self.name(base.value.name, "back"), base.source, self.host.offloaded.get(storage, ()))
        self.append(node)
        self.present[base.value] = node.results[0]
        self.storage[storage] = node.results[0].storage

    def append(self, node: Node) -> None:
        self.nodes.append(node)
        self.origins.append(-1)

    def here(self, storage: Storage, deed: str) -> Value:
        base = self.host.base(storage, deed)
        if storage not in self.storage:
            where = f"at position {self.host.position} to {deed} it"
            raise CheckError(f"sequence: expected {storage.name} to be there {where}, got {self.host.absence(storage)}")
        return self.present[base.value]

    def put(self, index: int, node: Node) -> int:
        """Append a copy of node `index`, of the form `node`, that reads the present copies of its inputs; the position where it stands."""
        old = self.graph.nodes[index]
        inputs = {value: self.now(value, index) for value in (*node.inputs, *(before for before, _ in node.writes))}
        outputs = self.results(old, inputs)
        changed = outputs != node.outputs or any(known is not now for known, now in inputs.items())
        writes = tuple((inputs[before], self.written_over(inputs[before], before, after)) for before, after in node.writes)
        copy = _substituted(node, inputs, outputs, writes) if changed else node
        self.present.update({after: new for (_, after), (_, new) in zip(node.writes, writes, strict=True)})
        self.first.setdefault(old, copy)
        self.nodes.append(copy)
        self.origins.append(index)
        return len(self.nodes) - 1

    def written_over(self, now: Value, before: Value, after: Value) -> Value:
        """The next version of what is written, on the copy that is written."""
        if now.storage is before.storage:
            return after
        return replace(now, name=self.name(after.name, "back"), version=now.version + 1)

    def results(self, old: Node, inputs: Mapping[Value, Value]) -> tuple[Value | None, ...]:
        """What one more run of `old` gives: its own values the first time, then new ones in new storages; a view's lie in its base."""
        again = old in self.first
        lying = {known.storage: now.storage for known, now in inputs.items()}
        copies: list[Value | None] = []
        for value in old.outputs:
            if value is None:
                copies.append(None)
                continue
            if value.storage not in lying:
                lying[value.storage] = replace(value.storage, name=self.name(value.storage.name, "again")) if again else value.storage
            storage = lying[value.storage]
            same = storage is value.storage and not again
            copies.append(value if same else replace(value, name=self.name(value.name, "again"), storage=storage))
            self.storage[value.storage] = storage
        self.present.update({value: new for value, new in zip(old.outputs, copies, strict=True) if value and new})
        return tuple(copies)

    def now(self, value: Value, reader: int) -> Value:
        """The present copy of a value; a view is taken anew where its base is another copy by now."""
        copy = self.present.get(value)
        if copy is not None and copy.storage is self.storage.get(value.storage):
            return copy
        if value not in self.views:
            why = self.host.absence(value.storage)
            raise CheckError(f"sequence: expected what {self.described(reader)} reads ({value.name}) to be there, got {why}")
        view = self.graph.nodes[self.views[value]]
        self.put(self.views[value], replace(view, after=()) if view.after else view)
        return self.present[value]

    def finished(self) -> Rematerialised:
        """All that was written, without views that nobody reads any more."""
        outputs = tuple(self.now(value, -1) for value in self.graph.outputs)
        for index, node in enumerate(self.graph.nodes):
            if node not in self.first and not is_view(node):
                raise CheckError(f"sequence: expected every node, got no {self.described(index)}")
        self.host.check_end(self.storage)
        read = set(outputs)
        remaining = []
        for position in reversed(range(len(self.nodes))):
            node = self.nodes[position]
            if not is_view(node) or any(value in read for value in node.results):
                read.update(node.inputs)
                remaining.append(position)
        remaining.reverse()
        return self.assembled(remaining, outputs)

    def assembled(self, remaining: Sequence[int], outputs: tuple[Value, ...]) -> Rematerialised:
        new_place = {position: at for at, position in enumerate(remaining)}
        became: dict[Node, list[Node]] = {node: [] for node in self.graph.nodes}
        for position in remaining:
            if self.origins[position] >= 0:
                became[self.graph.nodes[self.origins[position]]].append(self.nodes[position])
        return Rematerialised(
            Rewritten(
                replace(self.graph, nodes=tuple(self.nodes[position] for position in remaining), outputs=outputs),
                {old: tuple(new) for old, new in became.items() if new != [old]},
            ),
            tuple(self.origins[position] for position in remaining),
            tuple(new_place[position] for position in self.recomputed if position in new_place),
        )

    def name(self, old: str, suffix: str) -> str:
        """A name that nothing has: "relu_3_again", "relu_3_again2"."""
        while True:
            self.copies[old, suffix] += 1
            count = self.copies[old, suffix]
            new = f"{old}_{suffix}{count if count > 1 else ''}"
            if new not in self.taken:
                self.taken.add(new)
                return new

    def described(self, index: int) -> str:
        if index < 0:
            return "the graph's result"
        node = self.graph.nodes[index]
        where = f" at {node.source.file}:{node.source.line}" if node.source else ""
        return f"node {index} ({node.op}){where}"


def _substituted(
    node: Node, inputs: Mapping[Value, Value], outputs: tuple[Value | None, ...], writes: tuple[tuple[Value, Value], ...]
) -> Node:
    return replace(
        node,
        **arguments(node, inputs.__getitem__),
        outputs=outputs,
        writes=writes,
        inplace=tuple((inputs[value], op) for value, op in node.inplace if value in inputs),
    )
