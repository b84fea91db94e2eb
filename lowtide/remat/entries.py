"""What the entries of a schedule with recomputation and swapping mean.

A sequence is a list of integers. Of a graph of n nodes and m movable storages (`remat.offload.movable_storages` has their order), an entry

    below n             runs that node
    n + 3 t             stores t: begins to copy storage t to the host
    n + 3 t + 1         drops t: its copy on the device is let go, once the store is done
    n + 3 t + 2         loads t: makes a new copy on the device and begins to fill it from the host

A run reads the latest copy of each storage, whether a run made it or a load. A store reads it and a drop is its last reader; a load makes
it anew. So lifetimes follow from the sequence, with swapping as without.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum


class Deed(IntEnum):
    """What an entry does."""

    RUN = 0
    STORE = 1
    DROP = 2
    LOAD = 3


@dataclass(frozen=True, slots=True)
class Codes:
    """The meaning of entries for a graph of so many nodes and movable storages."""

    nodes: int
    storages: int

    def store(self, storage: int) -> int:
        """The entry that stores a storage."""
        return self.nodes + 3 * storage

    def drop(self, storage: int) -> int:
        """The entry that drops a storage."""
        return self.nodes + 3 * storage + 1

    def load(self, storage: int) -> int:
        """The entry that loads a storage."""
        return self.nodes + 3 * storage + 2

    def read(self, entry: int) -> tuple[Deed, int]:
        """What an entry does, and the index of its node or storage. Raises IndexError for what is no entry."""
        if 0 <= entry < self.nodes:
            return Deed.RUN, entry
        if not self.nodes <= entry < self.nodes + 3 * self.storages:
            raise IndexError(f"expected an entry of at least 0 and below {self.nodes + 3 * self.storages}, got {entry}")
        storage, deed = divmod(entry - self.nodes, 3)
        return Deed(deed + 1), storage
