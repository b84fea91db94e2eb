"""The one definition of memory: what lives at each step of an order, and the peak.

At each step: the bytes of all live storages and the workspace of the node that runs. `problems.order` says how long a storage lives; here
a graph becomes such a problem, and an order is played through it.

A node takes over the memory of the first of its candidates that dies at it: that no node reads later and nobody keeps. What it
takes over ends where the taker starts, so that at every step the bytes of the tensors alive and the workspace add up to the footprint.
"""

from __future__ import annotations

import operator
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lowtide.base.kernels import kernel
from lowtide.errors import CheckError, of_kind
from lowtide.ir.edges import predecessors
from lowtide.ir.graph import NOTHING_HELD, Graph, HeldStorages, Kind, Node, Storage, Value
from lowtide.ir.operators.nodes import homes_of, offloaded_storages, writes_in_place
from lowtide.ir.operators.row import DROP, LOAD
from lowtide.ir.sizes import pinned_block_bytes
from lowtide.plan.snapshot import LiveTensor, Snapshot, storage_specs
from lowtide.problems.order import Bytes, Ints, OrderProblem, Task


class Lifetimes(NamedTuple):
    """Each tensor lives over the steps `[start, end)`."""

    start: Ints  # [m]
    end: Ints  # [m]


@dataclass(frozen=True, eq=False)
class Footprint:
    footprint_bytes: Bytes  # [n] by step, with what is resident
    reuses: Ints  # [n] by node: the caller's index of the candidate whose memory it takes over (in `Node.inplace`), or -1
    lifetimes: Lifetimes
    peak_bytes: int  # with what is resident
    peak_step: int  # the first at the peak, -1 where there are no steps


def order_problem(
    graph: Graph,
    workspace_bytes: Sequence[int] | None = None,
    *,
    round_to: int = 1,
    eager: bool = False,
    held_storages: HeldStorages = NOTHING_HELD,
    offloadable: Sequence[Storage] = (),
) -> OrderProblem:
    """The ordering problem of a graph; its tensor i is `counted_storages(graph)[i]`, its node i is `graph.nodes[i]`.

    Inputs that the caller owns are resident, other inputs are donated, and outputs are kept. Those in `offloadable` are tensors, too,
    behind all others: there from the start, and kept. Sizes are rounded up to `round_to` bytes,
    as the device's allocator does. `workspace_bytes` is by node, 0 for all where left out; for a node with a body it holds what the body
    needs beside the node's own inputs and outputs.

    Of the reuses that nodes permit, those remain that memory allows: of a storage of as many bytes, neither kept nor the caller's,
    and that the node reads in no other layout. With `eager`, only those that the user's own program does (by operators like
    `aten.relu_.default`): the others are the planner's own freedom. What it lets go late is among `held_storages` until then.

    Raises CheckError where a storage has a symbolic size or `workspace_bytes` another length than the nodes.
    """
    if workspace_bytes is not None and len(workspace_bytes) != len(graph.nodes):
        raise CheckError(f"expected workspace_bytes of {len(graph.nodes)} nodes, got {len(workspace_bytes)}")
    tasks = _Tasks(graph, eager, held_storages, offloadable)
    spaces = [0] * len(graph.nodes) if workspace_bytes is None else workspace_bytes
    return OrderProblem.of(
        [storage_bytes(storage, round_to) for storage in tasks.tensor_of],
        [tasks.of(index, space, before) for index, (space, before) in enumerate(zip(spaces, predecessors(graph), strict=True))],
        kept=sorted(tasks.kept),
        resident_bytes=sum(storage_bytes(storage, round_to) for storage in resident_storages(graph) if storage not in tasks.tensor_of),
    )


def resident_storages(graph: Graph) -> tuple[Storage, ...]:
    """The storages that the caller holds throughout, each once: of parameters, buffers, state, batch, constants and Python numbers.

    What is offloaded is not among them.
    """
    offloaded = offloaded_storages(graph)
    return tuple(dict.fromkeys(value.storage for value in graph.inputs if _is_resident(value.storage) and value.storage not in offloaded))


def counted_storages(graph: Graph) -> tuple[Storage, ...]:
    """The storages whose life the order decides: donated and offloaded inputs, then what the nodes make, in program order.

    Copies in the host's memory are not among them: they are no memory of the device.
    """
    return tuple(_makers(graph))


def storage_bytes(storage: Storage, round_to: int = 1) -> int:
    """The size of a storage, rounded up to a multiple of `round_to`. Raises CheckError where it is symbolic."""
    return -(-_exact_bytes(storage) // round_to) * round_to


def simulate(problem: OrderProblem, order: ArrayLike) -> Footprint:
    """Plays an order of node indices through the problem, in O(n + edges). Raises CheckError unless it is a topological order."""
    steps = checked_order(problem, order)
    footprint_bytes, reuses, start, end = _play(
        steps, *problem.reads, *problem.outputs_of, *problem.takes, problem.take_slots, problem.take_output, problem.tensor_bytes,
        problem.made_bytes, problem.workspace_bytes, problem.uses, problem.kept, problem.start_bytes,
    )  # fmt: skip
    footprint_bytes += problem.resident_bytes
    peak_step = int(footprint_bytes.argmax()) if len(steps) else -1
    peak_bytes = int(footprint_bytes[peak_step]) if len(steps) else problem.resident_bytes + problem.start_bytes
    return Footprint(footprint_bytes, reuses, Lifetimes(start, end), peak_bytes, peak_step)


def lifetimes(problem: OrderProblem, order: ArrayLike) -> Lifetimes:
    """The steps `[start, end)` over which each tensor lives; one whose memory is taken over ends where the taker starts.

    Empty, `[0, 0)`, for a donated tensor that nobody reads. Raises CheckError unless `order` is a topological order.
    """
    return simulate(problem, order).lifetimes


def checked_order(problem: OrderProblem, order: ArrayLike) -> Ints:
    """A copy of `order` as an array. Raises CheckError, naming step and node, unless it is a topological order of the problem's nodes."""
    steps = np.array(order, np.int32).reshape(-1)
    if len(steps) != problem.node_count:
        raise CheckError(f"expected an order of {problem.node_count} nodes, got one of {len(steps)}")
    step = _first_misplaced(steps, *problem.preds)
    if step >= 0:
        node = int(steps[step])
        name = problem.names[node] if 0 <= node < problem.node_count else "unknown"
        raise CheckError(f"order: expected at step {step} a node that has not run and whose predecessors have, got node {node} ({name})")
    return steps


class _Tasks:
    """The tasks of a graph's nodes: storages numbered, and who makes and keeps them."""

    def __init__(self, graph: Graph, eager: bool, held_storages: HeldStorages, offloadable: Sequence[Storage]) -> None:
        self.maker_of = _makers(graph) | dict.fromkeys(offloadable, -1)
        self.tensor_of = {storage: tensor for tensor, storage in enumerate(self.maker_of)}
        kept = (*(value.storage for value in graph.outputs), *offloadable, *_given_back(graph))
        self.kept = {self.tensor_of[storage] for storage in kept if storage in self.tensor_of}
        self.nodes = graph.nodes
        self.eager, self.summed = eager, held_storages.summed
        self.late_storages = _held_at(graph, held_storages.until)  # by node: storages that are not let go before it has run

    def of(self, index: int, workspace_bytes: int, after: tuple[int, ...]) -> Task:
        node = self.nodes[index]
        written = [before for before, _ in node.writes]
        touched = [value.storage for value in (*node.outputs, *node.inputs, *written) if value is not None]
        touched += [storage for storage in self.late_storages.get(node, ()) if self.maker_of.get(storage, index) < index]
        counted = [storage for storage in dict.fromkeys(touched) if storage in self.tensor_of]
        return Task(
            name=" ".join([node.op, *(value.name for value in node.results[:1])]),
            makes=tuple(self.tensor_of[storage] for storage in counted if self.maker_of[storage] == index),
            reads=tuple(self.tensor_of[storage] for storage in counted if self.maker_of[storage] != index),
            after=after,
            workspace_bytes=workspace_bytes,
            takes=self._takes(index) if node.inplace else (),
        )

    def _takes(self, index: int) -> tuple[tuple[int, int], ...]:
        node = self.nodes[index]
        output = node.outputs[0] if node.outputs else None
        if output is None or self.maker_of.get(output.storage) != index:
            return ()
        slots: dict[int, int] = {}  # by tensor: two candidates may be views of one storage
        free = not self.eager or output.name in self.summed
        for slot, (value, overload) in enumerate(node.inplace):
            if (free or overload == node.op or writes_in_place(overload)) and self._may_take(node, value, output):
                slots.setdefault(self.tensor_of[value.storage], slot)
        return tuple(slots.items())

    def _may_take(self, node: Node, value: Value, output: Value) -> bool:
        tensor = self.tensor_of.get(value.storage, -1)
        if tensor < 0 or tensor in self.kept or value.storage.kind.caller_owned:
            return False
        if value.storage.device != output.storage.device or _exact_bytes(value.storage) != _exact_bytes(output.storage):
            return False
        return all(_layout(other) == _layout(value) for other in node.inputs if other.storage is value.storage)


def _held_at(graph: Graph, until: Mapping[str, str]) -> dict[Node, list[Storage]]:
    nodes = {node.results[0].name: node for node in graph.nodes if node.results}
    storages: dict[Node, list[Storage]] = {}
    for storage in counted_storages(graph):
        if (node := nodes.get(until.get(storage.name, ""))) is not None:
            storages.setdefault(node, []).append(storage)
    return storages


def _makers(graph: Graph) -> dict[Storage, int]:
    """The node that makes each counted storage, the first to put a value on it; -1 for donated inputs."""
    given, offloaded = {value.storage for value in graph.inputs}, offloaded_storages(graph)
    inputs = (value.storage for value in graph.inputs if value.storage in offloaded or not _is_resident(value.storage))
    makers = {storage: -1 for storage in inputs if storage.kind is not Kind.HOST}
    for index, node in enumerate(graph.nodes):
        for value in node.outputs:
            if value is not None and value.storage not in given and value.storage.kind is not Kind.HOST:
                makers.setdefault(value.storage, index)
    return makers


def _given_back(graph: Graph) -> Iterator[Storage]:
    """What loads make of offloaded storages and nobody drops again."""
    dropped = {value.storage for node in graph.nodes if node.op == DROP for value in node.inputs}
    loaded = (value.storage for node in graph.nodes if node.op == LOAD for value in node.results)
    return (storage for storage in loaded if storage.kind.caller_owned and storage not in dropped)


def _is_resident(storage: Storage) -> bool:
    return storage.kind.caller_owned or storage.kind is Kind.SCALAR


def _exact_bytes(storage: Storage) -> int:
    try:
        return operator.index(storage.nbytes)
    except TypeError as error:
        raise CheckError(
            f"storage {storage.name}: expected a size in bytes, got {storage.nbytes}: give its dimensions values first"
        ) from error


def _layout(value: Value) -> tuple[object, ...]:
    return value.dtype, value.shape, value.stride, value.offset


@kernel
def _first_misplaced(order: Any, pred_ptr: Any, pred_ids: Any) -> int:
    """The first step whose node is unknown, has run before, or comes before one of its predecessors; -1 where all is well."""
    done = np.zeros(len(order), np.bool_)
    for step in range(len(order)):
        node = order[step]
        if node < 0 or node >= len(order) or done[node]:
            return step
        for entry in range(pred_ptr[node], pred_ptr[node + 1]):
            if not done[pred_ids[entry]]:
                return step
        done[node] = True
    return -1


@kernel
def _play(
    order: Any, read_ptr: Any, read_ids: Any, made_ptr: Any, made_ids: Any, take_ptr: Any, take_ids: Any, take_slots: Any,
    take_output: Any, tensor_bytes: Any, made_bytes: Any, workspace_bytes: Any, uses: Any, kept: Any, start_bytes: Any,
) -> tuple[NDArray[np.int64], NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:  # fmt: skip
    """Footprint by step without what is resident, reuses by node, and start and end by tensor."""
    n, m = len(order), len(tensor_bytes)
    footprint_bytes, reuses = np.empty(n, np.int64), np.full(n, -1, np.int32)
    start, end = np.zeros(m, np.int32), np.zeros(m, np.int32)
    left = uses.copy()
    live_bytes = start_bytes
    for step in range(n):
        node = order[step]
        footprint_bytes[step] = live_bytes + made_bytes[node] + workspace_bytes[node]
        live_bytes += made_bytes[node]
        for entry in range(made_ptr[node], made_ptr[node + 1]):
            tensor = made_ids[entry]
            start[tensor], end[tensor] = step, step + 1
            if left[tensor] == 0:
                live_bytes -= tensor_bytes[tensor]
        for entry in range(read_ptr[node], read_ptr[node + 1]):
            tensor = read_ids[entry]
            end[tensor] = step + 1
            left[tensor] -= 1
            if left[tensor] == 0:
                live_bytes -= tensor_bytes[tensor]
        for entry in range(take_ptr[node], take_ptr[node + 1]):
            if left[take_ids[entry]] == 0:
                footprint_bytes[step] -= tensor_bytes[take_output[node]]
                reuses[node] = take_slots[entry]
                end[take_ids[entry]] = step
                break
    for tensor in range(m):
        if kept[tensor]:
            end[tensor] = n
    return footprint_bytes, reuses, start, end


@dataclass(frozen=True, eq=False)
class MemoryProfile:
    """Memory over the steps of an order: at each, the bytes of the tensors alive and the running node's workspace are the footprint."""

    footprint_bytes: Bytes  # [n] by step, with what is resident
    workspace_bytes: tuple[int, ...]  # by step
    resident_bytes: int
    peak_bytes: int
    peak_step: int  # the first at the peak, -1 where there are no steps
    tensors: tuple[LiveTensor, ...]  # resident inputs, donated inputs, then what the nodes make, in program order

    def at(self, step: int) -> tuple[LiveTensor, ...]:
        """The tensors that live at a step and have bytes, the largest first, then those of longest standing."""
        alive = [tensor for tensor in self.tensors if tensor.start <= step < tensor.end and tensor.nbytes]
        return tuple(sorted(alive, key=lambda tensor: (-tensor.nbytes, tensor.start)))

    def snapshot(self, graph: Graph, order: Sequence[int]) -> Snapshot | None:
        """The first step at the peak, of the graph and order that this is the profile of; None where there are no steps."""
        if self.peak_step < 0:
            return None
        step = self.peak_step
        return Snapshot.of(graph, step, graph.nodes[order[step]], self.workspace_bytes[step], self.at(step))


def pinned_bytes(graph: Graph, order: Sequence[int]) -> int:
    """The bytes of all buffers on the host that a graph's copies are given, as `runtime.copies` makes them: powers of two.

    A buffer is a copy's from its store to its last use, and then there for the next one of its size. What lies there between steps has
    memory of its own, counted as the same allocator makes it.
    """
    nodes = [graph.nodes[index] for index in order]
    last = {value.storage: step for step, node in enumerate(nodes) for value in node.inputs if value.storage.kind is Kind.HOST}
    used, most, homes = Counter[int](), Counter[int](), homes_of(graph)
    for step, node in enumerate(nodes):
        for storage in {value.storage for value in (*node.results, *node.inputs) if value.storage.kind is Kind.HOST} - homes:
            size = _pinned(storage)
            if storage not in {value.storage for value in node.inputs}:
                used[size] += 1
                most[size] = max(most[size], used[size])
            if last.get(storage, step) == step:
                used[size] -= 1
    return sum(size * count for size, count in most.items()) + home_bytes(graph)


def home_bytes(graph: Graph) -> int:
    return sum(map(_pinned, homes_of(graph)))


def _pinned(storage: Storage) -> int:
    return pinned_block_bytes(of_kind(int, storage.nbytes))


def profile_of(graph: Graph, problem: OrderProblem, order: Sequence[int], footprint: Footprint, *, round_to: int = 1) -> MemoryProfile:
    """Memory over the steps of an order, from its problem and what it costs there."""
    return MemoryProfile(
        footprint_bytes=footprint.footprint_bytes,
        workspace_bytes=tuple(problem.workspace_bytes[list(order)].tolist()),
        resident_bytes=problem.resident_bytes,
        peak_bytes=footprint.peak_bytes,
        peak_step=footprint.peak_step,
        tensors=tuple(_live(graph, footprint, round_to)),
    )


def _live(graph: Graph, footprint: Footprint, round_to: int) -> list[LiveTensor]:
    """Every storage that the problem knows of: the caller's own live throughout."""
    known, (start, end) = storage_specs(graph), footprint.lifetimes
    spans = [(storage, 0, len(graph.nodes)) for storage in resident_storages(graph)]
    spans += zip(counted_storages(graph), start.tolist(), end.tolist(), strict=True)
    return [LiveTensor.of(known[storage], storage_bytes(storage, round_to), first, last) for storage, first, last in spans]
