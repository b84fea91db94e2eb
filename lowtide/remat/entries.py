"""What the entries of a remat sequence mean: the one place that knows their numbers.

A remat sequence is a schedule with recomputation and swapping, as a list of integers. Of a graph of n nodes and m movable storages
(`remat.offload.movable_storages` has their order), an entry

    below n             runs that node
    n + 3 t             stores t: begins to copy storage t to the host
    n + 3 t + 1         drops t: frees its copy on the device, once the store is done
    n + 3 t + 2         loads t: makes a new copy on the device and begins to fill it from the host

A run reads the latest copy of each storage, whether a run made it or a load. A store reads it and a drop is its last reader; a load makes
it anew. So lifetimes follow from the sequence, with swapping as without.

Kernels call `code_of`, `deed_of` and `storage_of`; everything else asks `Codes`, which says the same in Python.

A remat problem as kernels take it stands here, too: arrays by node and by tensor, rows of identifiers laid end to end.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.base.kernels import kernel
from lowtide.problems.order import Bytes, Ints

Times = NDArray[np.float64]


class RematArrays(NamedTuple):
    """A `RematProblem` as kernels take it."""

    cost_us: Times  # what a run counts for in sums
    device_us: Times  # what it takes the device
    issue_us: Times  # and the host, to issue it; 0 where the host itself computes
    handling_us: Times  # [1] what it takes the host to issue a copy, or a wait for one
    repeatable: NDArray[np.bool_]
    limit_ptr: Ints
    limit_ids: Ints
    read_ptr: Ints
    read_ids: Ints
    made_ptr: Ints
    made_ids: Ints
    take_ptr: Ints
    take_ids: Ints
    take_output: Ints
    tensor_bytes: Bytes
    made_bytes: Bytes
    workspace_bytes: Bytes
    kept: NDArray[np.bool_]
    producer: Ints
    storable: NDArray[np.bool_]  # may be stored, dropped and loaded
    offloaded: NDArray[np.bool_]  # of these, the caller's own: there from the start, and again in the end
    store_us: Times
    load_us: Times
    pinned: Ints  # the buffer of a copy on the host is of two to the power of this
    write_ptr: Ints
    write_ids: Ints
    lane: Ints  # of a node: see `Lane`
    copy_us: Times  # what a node of one of the links takes that


class Lane(IntEnum):
    """Where a node runs: those of state that lies on the host between steps run on the links, as entries that swap do."""

    COMPUTE = 0
    LOAD = 1
    SAVE = 2  # stores, too
    DROP = 3  # waits for a save


class EntryKind(IntEnum):
    RUN = -1
    STORE = 0
    DROP = 1
    LOAD = 2


RUN, STORE, DROP, LOAD = map(int, EntryKind)  # for kernels, which are kept by the constants that they read
_KINDS = 3  # of entries for each storage


def _code(deed: Any, storage: Any, nodes: Any) -> Any:
    return nodes + _KINDS * storage + deed


def _deed(code: Any, nodes: Any) -> Any:
    return RUN if code < nodes else (code - nodes) % _KINDS


def _storage(code: Any, nodes: Any) -> Any:
    return (code - nodes) // _KINDS


_inner = kernel(inner=True, borrows=True)
code_of, deed_of, storage_of = _inner(_code), _inner(_deed), _inner(_storage)


@dataclass(frozen=True, slots=True)
class Codes:
    """The meaning of entries for a graph of so many nodes and movable storages."""

    nodes: int
    storages: int

    def store(self, storage: int) -> int:
        return int(_code(STORE, storage, self.nodes))

    def drop(self, storage: int) -> int:
        return int(_code(DROP, storage, self.nodes))

    def load(self, storage: int) -> int:
        return int(_code(LOAD, storage, self.nodes))

    def read(self, entry: int) -> tuple[EntryKind, int]:
        """What an entry does, and the index of its node or storage. Raises IndexError for what is no entry."""
        end = self.store(self.storages)
        if not 0 <= entry < end:
            raise IndexError(f"expected an entry of at least 0 and below {end}, got {entry}")
        deed = EntryKind(_deed(entry, self.nodes))
        return deed, entry if deed is EntryKind.RUN else int(_storage(entry, self.nodes))

    def runs_in(self, sequence: Ints) -> Ints:
        return sequence[sequence < self.nodes]
