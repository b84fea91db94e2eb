"""What of an operator's arguments a device's cache still holds when it runs, by the order in which a graph runs.

A cache of so many bytes keeps what was touched last. What is larger than all of it goes through and leaves nothing behind.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.ir.graph import Node, Storage
from lowtide.ir.operators.nodes import is_view


def cold_shares(nodes: Sequence[Node], cache_bytes: int) -> dict[Node, float]:
    """By node, the share of the bytes it reads that come from memory: 0 of one that reads nothing."""
    cache = _Cache(cache_bytes)
    found: dict[Node, float] = {}
    for node in nodes:
        if is_view(node):
            continue
        reads = {value.storage: _nbytes(value.storage) for value in node.inputs}
        cold_bytes = sum(nbytes for storage, nbytes in reads.items() if storage not in cache.held)
        found[node] = cold_bytes / max(1, sum(reads.values()))
        for storage in dict.fromkeys((*reads, *(value.storage for value in node.results))):
            cache.touch(storage)
    return found


class _Cache:
    def __init__(self, room_bytes: int) -> None:
        self.held: dict[Storage, int] = {}  # the one that was touched longest ago first
        self._room_bytes = room_bytes

    def touch(self, storage: Storage) -> None:
        self._room_bytes += self.held.pop(storage, 0) - _nbytes(storage)
        self.held[storage] = _nbytes(storage)
        while self._room_bytes < 0:
            self._room_bytes += self.held.pop(next(iter(self.held)))


def _nbytes(storage: Storage) -> int:
    return storage.nbytes if isinstance(storage.nbytes, int) else 0
