"""What a sequence has sent to the host so far, and what it may do next: `remat` keeps this book while it writes."""

from __future__ import annotations

from collections.abc import Container
from functools import cached_property

from lowtide.errors import CheckError
from lowtide.ir.graph import Graph, Node, Storage, Value
from lowtide.remat.offload import Base, bases, offloadable_storages


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
