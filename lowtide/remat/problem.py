"""Schedules with recomputation and swapping as plain sequences of integers. `remat.cost` says what they cost.

A *remat sequence* runs every node that makes or writes bytes at least once, and some again; views are not in it (`remat.write_out` takes
them where they are read). A run reads the latest copy of each tensor, so a copy lives from the run that makes it to the last run that
reads it before the tensor is made anew: no lifetime is decided, all of them follow. A sequence is right if each run finds its inputs made,
and what a node repeats to read has not been written over since (`limits`).

Between the runs a tensor may be stored to the host, dropped, and loaded again: further entries, numbered as `remat.entries` says. A store
reads the tensor, a drop is the last reader of its copy, a load makes it anew.

One price a node for searches, where a step has two clocks: the host issues operators in order, the device runs them in order.

Neither sum is the time of a step: that is simulated (`cost.time_kernel`). But whatever a sequence is, it takes at least the sum of what its
runs take the device, and at least the sum of what they take the host; so also any mean of both. A price that is such a mean adds up, and a
bound made of it holds. Where the device is busy throughout, its time is what recomputation costs; where it waits for the host, the host's.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lowtide.cost.device import Device
from lowtide.cost.memory import order_problem
from lowtide.ir.graph import Graph, Node, Storage, Value
from lowtide.ir.operators.nodes import is_view, repeatable
from lowtide.ir.operators.row import DROP, LOAD, SAVE, STORE
from lowtide.problems.order import Bytes, Ints, OrderProblem, Rows
from lowtide.remat.entries import Codes, Lane, RematArrays, Times
from lowtide.remat.offload import between_steps, offloadable_storages, storable
from lowtide.remat.state import records

_HOST_ALONE, _DEVICE_ALONE = 0.5, 1.5  # times as long as the host takes: from where on the one or the other is all that counts


class FirstRunOrder(NamedTuple):
    """By node those that first run before it and those that do so behind it, as rows; views, which are in no sequence, have none behind."""

    pred_ptr: Ints
    pred_ids: Ints
    succ_ptr: Ints
    succ_ids: Ints


class Clocks(NamedTuple):
    """What a run of each node takes, by both clocks."""

    device_us: Times  # [n]
    issue_us: Times  # [n] of the host, with views

    def price_us(self, repeatable: NDArray[np.bool_]) -> Times:
        """[n] what a run counts for. What may run again decides for which clock it is."""
        on_device, on_host = float(self.device_us[repeatable].sum()), float(self.issue_us[repeatable].sum())
        if on_device >= _DEVICE_ALONE * on_host:
            return self.device_us
        share = max(0.0, (on_device / on_host - _HOST_ALONE) / (_DEVICE_ALONE - _HOST_ALONE))
        return share * self.device_us + (1 - share) * self.issue_us


def with_views(graph: Graph, issue_us: Sequence[float]) -> list[float]:
    """By node, with what it takes to issue the views of what it makes; those of what the caller owns are counted at their first reader."""
    times_us = [0.0 if is_view(node) else us for node, us in zip(graph.nodes, issue_us, strict=True)]
    maker: dict[Value, int] = {}
    waiting: dict[Value, float] = {}
    for index, node in enumerate(graph.nodes):
        before_us = sum(waiting.pop(value, 0.0) for value in node.inputs)
        results = [value for value in node.outputs if value is not None]
        at = next((maker[value] for value in node.inputs if value in maker), None) if is_view(node) else index
        if is_view(node):
            before_us += issue_us[index]
        if at is not None:
            times_us[at] += before_us
            maker.update(dict.fromkeys(results, at))
        elif results:
            waiting[results[0]] = before_us
    return times_us


_SOON = 10  # times as long as a launch: what is copied before is quick
_NO_ROOM = 0.02  # share of the bytes that may go
_CALLS = 3  # of torch's for a copy or a wait: each takes the host about what an operator does


@dataclass(frozen=True, eq=False)
class Links:
    """What copies to the host and back take."""

    storable: NDArray[np.bool_]  # [m] may be stored
    store_us: Times  # [m]
    load_us: Times  # [m]
    issue_us: float = 0.0  # what each takes the host, and each wait for one

    @classmethod
    def of(cls, problem: OrderProblem, storable: Sequence[bool], device: Device) -> Links:
        """By tensor, over a device's links. What is quick to copy and makes no room to speak of is not worth an entry."""
        nbytes, may_go = problem.tensor_bytes, np.array(storable, np.bool_)
        store_us = np.array([device.store_us(each) for each in nbytes.tolist()], np.float64)
        load_us = np.array([device.load_us(each) for each in nbytes.tolist()], np.float64)
        worth = may_go & ((store_us > _SOON * device.launch_us) | (nbytes > _negligible_bytes(nbytes[may_go])))
        return cls(worth, store_us, load_us, _CALLS * device.issue_us)

    @classmethod
    def none(cls, tensors: int) -> Links:
        return cls(np.zeros(tensors, np.bool_), np.zeros(tensors), np.zeros(tensors))


def _negligible_bytes(sizes: NDArray[np.signedinteger[Any]]) -> int:
    """The size up to which all tensors together are a small share of these."""
    rising, counts = np.unique(sizes, return_counts=True)
    up_to = np.cumsum(rising * counts)
    return int(rising[up_to <= _NO_ROOM * sizes.sum()].max(initial=0))


class Copies(NamedTuple):
    """Nodes of the graph that copy what lies on the host between steps."""

    lanes: Ints  # [n] see `entries.Lane`
    us: Times  # [n] what they take a link

    @classmethod
    def of(cls, graph: Graph, device: Device | None) -> Copies | None:
        lanes = np.zeros(len(graph.nodes), np.int32)
        for index, node in between_steps(graph):
            lanes[index] = _LANES[node.op]
        if not lanes.any():
            return None
        us, copying = np.zeros(len(lanes)), np.flatnonzero((lanes == Lane.LOAD) | (lanes == Lane.SAVE)).tolist()
        if device is None:
            return cls(lanes, us)
        for index in copying:
            nbytes = int(graph.nodes[index].inputs[0].storage.nbytes)
            us[index] = device.load_us(nbytes) if lanes[index] == Lane.LOAD else device.store_us(nbytes)
        return cls(lanes, us)


_LANES = {LOAD: Lane.LOAD, STORE: Lane.SAVE, SAVE: Lane.SAVE, DROP: Lane.DROP}


@dataclass(frozen=True, eq=False)
class RematProblem:
    """An ordering problem whose nodes may run more than once, and what a run costs. Its arrays are read-only."""

    problem: OrderProblem
    cost_us: Times  # [n] what a run counts for in sums
    is_view: NDArray[np.bool_]  # [n] makes no bytes and writes none: in no sequence
    repeatable: NDArray[np.bool_]  # [n] may run again
    limits: Rows  # by node: the nodes that write over what it reads; it is not repeated once one of them has run
    links: Links | None = None  # to the host and back; None where nothing is swapped
    writes: Rows | None = None  # by node: the offloaded tensors that it writes; None where nothing is offloaded
    plain: RematProblem | None = None  # the same without links, and with nothing offloaded
    copies: Copies | None = None  # of state that lies on the host between steps; None where there is none
    clocks: Clocks | None = None  # of a step; None where there is one alone, and a run takes what it counts for

    @classmethod
    def of(
        cls,
        graph: Graph,
        cost_us: Sequence[float],
        workspace_bytes: Sequence[int] | None = None,
        *,
        round_to: int = 1,
        swap: Device | None = None,
        swap_state: bool = False,
        known: OrderProblem | None = None,
        issue_us: Sequence[float] = (),
    ) -> RematProblem:
        """The problem of a graph whose nodes take `cost_us`, and whose storages may be swapped over the links of `swap`.

        With `swap_state`, state that the caller lends may be offloaded, too. `known` is the ordering problem in which nothing is, if the
        caller has it. On a device beside the host nodes take the host `issue_us`, views too. Other arguments and errors as for
        `order_problem`.
        """
        swap_state = swap_state and swap is not None
        offloadable = offloadable_storages(graph) if swap_state else ()
        if known is None:
            known = order_problem(graph, workspace_bytes, round_to=round_to)
        problem = order_problem(graph, workspace_bytes, round_to=round_to, offloadable=offloadable) if offloadable else known
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
        once = handed_over(graph)
        may_run_again = [each is not None and node not in once for each, node in zip(again, graph.nodes, strict=True)]
        may_repeat = np.array(may_run_again, np.bool_) & ~views & makes
        clocks = Clocks(np.array(cost_us, np.float64), np.array(with_views(graph, issue_us), np.float64)) if issue_us else None
        return cls(
            problem=problem,
            cost_us=np.array(cost_us, np.float64) if clocks is None else clocks.price_us(may_repeat),
            is_view=views,
            repeatable=may_repeat,
            limits=Rows.of(rows),
            links=None if swap is None else Links.of(problem, storable(graph, swap_state=swap_state)[: problem.tensor_count], swap),
            writes=_writes(graph, offloadable, problem.tensor_count) if swap_state else None,
            plain=cls.of(graph, cost_us, workspace_bytes, round_to=round_to, known=known, issue_us=issue_us) if swap_state else None,
            copies=Copies.of(graph, swap),
            clocks=clocks,
        )

    @cached_property
    def without_links(self) -> RematProblem:
        """The problem of the same sequences where nothing is swapped."""
        return self.plain or (self if self.links is None else replace(self, links=None))

    @property
    def lanes(self) -> Ints:
        """By node: its `entries.Lane`."""
        return np.zeros(self.problem.node_count, np.int32) if self.copies is None else self.copies.lanes

    @property
    def codes(self) -> Codes:
        """What the entries of this problem's sequences mean."""
        return Codes(self.problem.node_count, self.problem.tensor_count)

    def sequence_of(self, order: ArrayLike) -> Ints:
        """An order of all nodes as a sequence: without the views."""
        steps = np.asarray(order, np.int32)
        return steps[~self.is_view[steps]]

    @cached_property
    def facts(self) -> RematArrays:
        problem, links = self.problem, self.links or Links.none(self.problem.tensor_count)
        offloaded = links.storable & problem.kept & (problem.producer < 0)
        clocks = self.clocks or Clocks(self.cost_us, np.zeros(len(self.cost_us)))
        return RematArrays(
            self.cost_us,
            *clocks,
            np.array([links.issue_us]),
            self.repeatable,
            *self.limits,
            *problem.reads,
            *problem.outputs_of,
            *problem.takes,
            problem.take_output,
            problem.tensor_bytes,
            problem.made_bytes,
            problem.workspace_bytes,
            problem.kept,
            problem.producer,
            links.storable,
            offloaded,
            links.store_us,
            links.load_us,
            pinned_powers(problem.tensor_bytes),
            *(self.writes or Rows.of([()] * problem.node_count)),
            self.lanes,
            np.zeros(problem.node_count) if self.copies is None else self.copies.us,
        )

    @cached_property
    def records(self) -> tuple[NDArray[Any], NDArray[Any], Ints]:
        """The same as eviction takes it: to be copied."""
        return records(self.facts)

    @cached_property
    def first_run_order(self) -> FirstRunOrder:
        """Which nodes of sequences first run before which."""
        base = self.problem
        before: list[set[int]] = []
        rows = np.split(base.pred_ids, base.pred_ptr[1:-1])
        for row in (each.tolist() for each in rows):  # nodes are numbered as they may run
            before.append({node for pred in row for node in (before[pred] if self.is_view[pred] else (pred,))})
        behind: list[list[int]] = [[] for _ in before]
        for node in np.flatnonzero(~self.is_view).tolist():
            for pred in before[node]:
                behind[pred].append(node)
        return FirstRunOrder(*Rows.of([sorted(each) for each in before]), *Rows.of(behind))

    def by_bytes(self, power: float) -> NDArray[np.float64]:
        """[m] what the bytes of each tensor count for in eviction's scores."""
        if power not in self._by_bytes:
            self._by_bytes[power] = np.array([float(max(1, size)) ** power for size in self.problem.tensor_bytes.tolist()])
        return self._by_bytes[power]

    @cached_property
    def _by_bytes(self) -> dict[float, NDArray[np.float64]]:
        return {}


def pinned_powers(tensor_bytes: Bytes) -> Ints:
    """[m] two to the power of these are the bytes of the buffer that a copy takes on the host: `runtime.copies` makes no others."""
    return np.array([max(size - 1, 0).bit_length() for size in tensor_bytes.tolist()], np.int32)


def handed_over(graph: Graph) -> set[Node]:
    """Nodes that make what the program leaves, and that others wait for: it is there from then on, and is not made again."""
    left, awaited = {value.storage for value in graph.outputs}, {before for node in graph.nodes for before in node.after}
    return {node for node in awaited if not left.isdisjoint(value.storage for value in node.results)}


def _writes(graph: Graph, offloaded: Sequence[Storage], tensors: int) -> Rows:
    """By node: the numbers of the offloaded storages that it writes, which are the last of so many tensors."""
    number = {storage: tensors - len(offloaded) + position for position, storage in enumerate(offloaded)}
    return Rows.of([sorted({number[before.storage] for before, _ in node.writes if before.storage in number}) for node in graph.nodes])
