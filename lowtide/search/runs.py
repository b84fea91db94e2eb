"""Schedules with recomputation and swapping as plain sequences: what they cost, in one pass over integer arrays.

A sequence of *runs* holds every node that makes or writes bytes at least once, and some again; views are not in it (`rewrite.remat` takes
them where they are read). A run reads the latest copy of each tensor, so a copy lives from the run that makes it to the last run that
reads it before the tensor is made anew: no lifetime is decided, all of them follow. A sequence is right if each run finds its inputs made,
and what a node repeats to read has not been written over since (`limits`).

Between the runs a tensor may be stored to the host, dropped, and loaded again: further entries, numbered as `ir.sequence` says. A store
reads the tensor, a drop is the last reader of its copy, a load makes it anew. Three streams run side by side: operators, one after
another; copies to the host; copies from the host. A copy starts when its link is free and the operators before it are done; a drop waits
for its store, a run for the loads that it reads.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numba import njit
from numpy.typing import ArrayLike, NDArray

from lowtide.cost.device import Device
from lowtide.cost.memory import order_problem
from lowtide.ir.graph import Graph, Storage
from lowtide.ir.ops import is_view, repeatable
from lowtide.ir.problem import Bytes, Ints, OrderProblem, Rows
from lowtide.ir.sequence import Codes, Deed
from lowtide.rewrite.swap import lendable_storages, storable
from lowtide.search.evict_state import records

Times = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Links:
    """What copies to the host and back take."""

    storable: NDArray[np.bool_]  # [m] may be stored
    store_us: Times  # [m]
    load_us: Times  # [m]

    @classmethod
    def of(cls, problem: OrderProblem, storable: Sequence[bool], device: Device) -> Links:
        """By tensor, over a device's links. What takes not much longer to copy than to launch is not worth an entry."""
        sizes = problem.tensor_bytes.tolist()
        store_us = np.array([device.store_us(nbytes) for nbytes in sizes], np.float64)
        load_us = np.array([device.load_us(nbytes) for nbytes in sizes], np.float64)
        return cls(np.array(storable, np.bool_) & (store_us > 10 * device.launch_us), store_us, load_us)

    @classmethod
    def none(cls, tensors: int) -> Links:
        """Over which nothing goes."""
        return cls(np.zeros(tensors, np.bool_), np.zeros(tensors), np.zeros(tensors))


@dataclass(frozen=True, eq=False)
class RunProblem:
    """An ordering problem whose nodes may run more than once, and what a run costs. Its arrays are read-only."""

    problem: OrderProblem
    cost_us: Times  # [n] of one run
    is_view: NDArray[np.bool_]  # [n] makes no bytes and writes none: in no sequence
    repeatable: NDArray[np.bool_]  # [n] may run again
    limits: Rows  # by node: the nodes that write over what it reads; it is not repeated once one of them has run
    links: Links | None = None  # to the host and back; None where nothing is swapped
    writes: Rows | None = None  # by node: the lent tensors that it writes; None where nothing is lent
    plain: RunProblem | None = None  # the same without links and without what is lent

    @classmethod
    def of(
        cls,
        graph: Graph,
        cost_us: Sequence[float],
        workspace_bytes: Sequence[int] | None = None,
        *,
        round_to: int = 1,
        swap: Device | None = None,
        lend: bool = False,
    ) -> RunProblem:
        """The problem of a graph whose nodes take `cost_us`, and whose storages may be swapped over the links of `swap`.

        With `lend`, what the caller can lend is among them. Other arguments and errors as for `order_problem`.
        """
        lend = lend and swap is not None
        lendable = lendable_storages(graph) if lend else ()
        problem = order_problem(graph, workspace_bytes, round_to=round_to, lendable=lendable)
        again = [repeatable(node) for node in graph.nodes]
        views = np.array([is_view(node) for node in graph.nodes], np.bool_)
        writers = {(before.storage, before.version): index for index, node in enumerate(graph.nodes) for before, _ in node.writes}
        rows = [
            sorted({writers[value.storage, value.version] for value in node.inputs if (value.storage, value.version) in writers} - {index})
            if node is not None
            else []
            for index, node in enumerate(again)
        ]
        makes = np.diff(problem.outputs_of.ptr) > 0
        return cls(
            problem=problem,
            cost_us=np.array(cost_us, np.float64),
            is_view=views,
            repeatable=np.array([node is not None for node in again], np.bool_) & ~views & makes,
            limits=_rows(rows),
            links=None if swap is None else Links.of(problem, storable(graph, lend=lend)[: problem.tensor_count], swap),
            writes=_writes(graph, lendable, problem.tensor_count) if lend else None,
            plain=cls.of(graph, cost_us, workspace_bytes, round_to=round_to) if lend else None,
        )

    @property
    def without_links(self) -> RunProblem:
        """The problem of the same sequences where nothing is swapped."""
        return self.plain or replace(self, links=None)

    @property
    def codes(self) -> Codes:
        """What the entries of this problem's sequences mean."""
        return Codes(self.problem.node_count, self.problem.tensor_count)

    def runs_of(self, order: ArrayLike) -> Ints:
        """An order of all nodes as a sequence of runs: without the views."""
        steps = np.asarray(order, np.int32)
        return steps[~self.is_view[steps]]

    @cached_property
    def facts(self) -> Facts:
        """All that kernels want to know."""
        problem, links = self.problem, self.links or Links.none(self.problem.tensor_count)
        return Facts(
            self.cost_us, self.repeatable, *self.limits, *problem.reads, *problem.outputs_of, *problem.takes, problem.take_output,
            problem.tensor_bytes, problem.made_bytes, problem.workspace_bytes, problem.kept, problem.producer,
            links.storable, links.store_us, links.load_us, *(self.writes or _rows([()] * problem.node_count)),
        )  # fmt: skip

    @cached_property
    def records(self) -> tuple[NDArray[Any], NDArray[Any], Ints]:
        """The same as eviction takes it: to be copied."""
        return records(self.facts)


class Facts(NamedTuple):
    """A `RunProblem` as kernels take it."""

    cost_us: Times
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
    storable: NDArray[np.bool_]
    store_us: Times
    load_us: Times
    write_ptr: Ints
    write_ids: Ints


def _rows(rows: Sequence[Sequence[int]]) -> Rows:
    lengths = np.array([len(row) for row in rows], np.int32)
    return Rows(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32), np.array([each for row in rows for each in row], np.int32))


def _writes(graph: Graph, lent: Sequence[Storage], tensors: int) -> Rows:
    """By node: the numbers of the lent storages that it writes, which are the last of so many tensors."""
    number = {storage: tensors - len(lent) + place for place, storage in enumerate(lent)}
    return _rows([sorted({number[before.storage] for before, _ in node.writes if before.storage in number}) for node in graph.nodes])


@dataclass(frozen=True, eq=False)
class Cost:
    """What a sequence costs."""

    footprint_bytes: NDArray[np.int64]  # by entry, with what is resident
    peak_bytes: int
    time_us: float


def cost_of(problem: RunProblem, runs: Ints) -> Cost:
    """The footprint of a sequence, entry by entry, and its time."""
    footprint = _play(runs, problem.facts)
    footprint += problem.problem.resident_bytes
    peak = int(footprint.max(initial=problem.problem.resident_bytes))
    return Cost(footprint, peak, float(_time_us(runs, problem.facts)))


def first_wrong(problem: RunProblem, runs: Ints) -> int:
    """The first place at which an entry is wrong, -1 where none is.

    A run is wrong that lacks an input, repeats what may not be, or comes after what wrote over its inputs, or that makes anew what has
    been stored and not yet dropped; a store of what is not there; a drop without a store, or of what is not there; a load of what was never
    dropped. What is lent is there at the start, in one copy: it is loaded only while it is away, and neither stored nor dropped once it has
    been written. The end is wrong where something has been stored and not dropped, since nobody would wait for that copy, or lent and is
    not there.
    """
    return int(_first_wrong(runs, problem.facts))


@njit(cache=True)
def _first_wrong(runs: Any, facts: Any) -> int:
    n, m = len(facts.repeatable), len(facts.producer)
    done, there, dropped = np.zeros(n, np.bool_), facts.producer < 0, np.zeros(m, np.bool_)
    stored, pending, written = np.zeros(m, np.bool_), np.zeros(m, np.bool_), np.zeros(m, np.bool_)
    lent = facts.storable & facts.kept & (facts.producer < 0)
    for place in range(len(runs)):
        code = runs[place]
        if code < 0 or code >= n + 3 * m:
            return place
        if code >= n:
            deed, tensor = (code - n) % 3, (code - n) // 3
            if deed == _STORE:
                if not there[tensor] or stored[tensor] or not facts.storable[tensor] or written[tensor]:
                    return place
                stored[tensor] = pending[tensor] = True
            elif deed == _DROP:
                if not there[tensor] or not stored[tensor] or written[tensor]:
                    return place
                there[tensor], pending[tensor], dropped[tensor] = False, False, True
            else:
                if not dropped[tensor] or (lent[tensor] and there[tensor]):
                    return place
                there[tensor] = True
            continue
        for entry in range(facts.read_ptr[code], facts.read_ptr[code + 1]):
            if not there[facts.read_ids[entry]]:
                return place
        if done[code]:
            if not facts.repeatable[code]:
                return place
            for entry in range(facts.limit_ptr[code], facts.limit_ptr[code + 1]):
                if done[facts.limit_ids[entry]]:
                    return place
        for entry in range(facts.made_ptr[code], facts.made_ptr[code + 1]):
            if pending[facts.made_ids[entry]]:
                return place
            there[facts.made_ids[entry]] = True
        for entry in range(facts.write_ptr[code], facts.write_ptr[code + 1]):
            if pending[facts.write_ids[entry]]:
                return place
            written[facts.write_ids[entry]] = True
        done[code] = True
    return len(runs) if pending.any() or (lent & ~there).any() else -1


_STORE, _DROP, _LOAD = (int(deed) - 1 for deed in (Deed.STORE, Deed.DROP, Deed.LOAD))  # of the entries from n on


@njit(cache=True, nogil=True)
def _play(runs: Any, facts: Any) -> NDArray[np.int64]:
    """Footprint by entry without what is resident. Backwards to find the last reader of each copy, then forwards."""
    count, n, m = len(runs), len(facts.made_bytes), len(facts.tensor_bytes)
    last = np.full(m, -1, np.int32)  # of the copy that a backward sweep is in: the entry that reads it last
    dead = np.zeros(count, np.int64)  # bytes that are let go after each entry
    taken = np.zeros(count, np.int64)  # bytes that its first output finds in the memory of an input that dies there
    live = np.int64(0)
    for tensor in range(m):
        if facts.kept[tensor]:
            last[tensor] = count
    for place in range(count - 1, -1, -1):
        code, freed = runs[place], np.int64(0)
        if code >= n:
            tensor = (code - n) // 3
            if last[tensor] < 0:
                freed = facts.tensor_bytes[tensor]
                last[tensor] = place
            if (code - n) % 3 == _LOAD:
                last[tensor] = -1
            dead[place] = freed
            continue
        for entry in range(facts.made_ptr[code], facts.made_ptr[code + 1]):
            tensor = facts.made_ids[entry]
            if last[tensor] < 0:
                freed += facts.tensor_bytes[tensor]
            last[tensor] = -1
        for entry in range(facts.take_ptr[code], facts.take_ptr[code + 1]):
            if last[facts.take_ids[entry]] < 0:
                taken[place] = facts.tensor_bytes[facts.take_output[code]]
                break
        for entry in range(facts.read_ptr[code], facts.read_ptr[code + 1]):
            tensor = facts.read_ids[entry]
            if last[tensor] < 0:
                last[tensor] = place
                freed += facts.tensor_bytes[tensor]
        dead[place] = freed
    for tensor in range(m):
        if facts.producer[tensor] < 0 and last[tensor] >= 0:
            live += facts.tensor_bytes[tensor]
    footprint = np.empty(count, np.int64)
    for place in range(count):
        code = runs[place]
        if code >= n:
            if (code - n) % 3 == _LOAD:
                live += facts.tensor_bytes[(code - n) // 3]
            footprint[place] = live
        else:
            live += facts.made_bytes[code]
            footprint[place] = live + facts.workspace_bytes[code] - taken[place]
        live -= dead[place]
    return footprint


@njit(cache=True, nogil=True)
def _time_us(runs: Any, facts: Any) -> float:
    """When the last operator is done: three streams side by side."""
    n, m = len(facts.made_bytes), len(facts.tensor_bytes)
    clock, to_host, from_host = 0.0, 0.0, 0.0
    stored, arrived = np.zeros(m), np.zeros(m)
    for place in range(len(runs)):
        code = runs[place]
        if code < n:
            for entry in range(facts.read_ptr[code], facts.read_ptr[code + 1]):
                clock = max(clock, arrived[facts.read_ids[entry]])
            clock += facts.cost_us[code]
            for entry in range(facts.made_ptr[code], facts.made_ptr[code + 1]):
                arrived[facts.made_ids[entry]] = 0.0
            continue
        deed, tensor = (code - n) % 3, (code - n) // 3
        if deed == _STORE:
            to_host = max(to_host, clock, arrived[tensor]) + facts.store_us[tensor]
            stored[tensor] = to_host
        elif deed == _DROP:
            clock = max(clock, stored[tensor])
        else:
            from_host = max(from_host, clock) + facts.load_us[tensor]
            arrived[tensor] = from_host
    for tensor in range(m):
        if facts.kept[tensor]:
            clock = max(clock, arrived[tensor])
    return clock
