"""The ordering problem, bare: nodes, tensors and their bytes as integer arrays, with no graph and no torch in sight.

A tensor here is a storage: a block of bytes that one node makes, or that is there from the start (its producer is -1).

- A tensor that a node makes lives from the start of that node to the end of the last node that reads it; one that nobody
  reads lives during the node that makes it.
- A tensor that is there from the start and not kept is *donated*: it lives from the start to the end of the last node that reads it;
  one that nobody reads is freed before the first step.
- A kept tensor (an output of the program) lives to the end of the last step.
- What the caller holds throughout, whatever the order, is one constant: `resident_bytes`.
- A node may *take over* the memory of a tensor that dies at it, in place of new memory for its first output.

`OrderProblem.of` builds a problem, of one `Task` a node, by checks that share no code with any solver; `files` reads it;
`cost.memory` says what an order costs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, NoReturn, TypeVar

import numpy as np
from numpy.typing import NDArray

from lowtide.base.kernels import kernel
from lowtide.errors import FormatError

LIMIT_BYTES = 2**62  # of all sizes together: sums of them then never overflow an int64
_SHOWN = 8  # of a list in a message


@dataclass(frozen=True, slots=True)
class Task:
    """One node of an ordering problem: tensors and other nodes by index."""

    name: str
    makes: tuple[int, ...] = ()
    reads: tuple[int, ...] = ()  # distinct, none that the node makes
    after: tuple[int, ...] = ()  # nodes that come before this one for other reasons than the tensors it reads
    workspace_bytes: int = 0
    takes: tuple[tuple[int, int], ...] = ()  # (tensor, the caller's index for it): makes[0] may take over its memory, the preferred first


def checked_producers(tensor_bytes: Sequence[int], tasks: Sequence[Task], kept: Sequence[int], resident_bytes: int) -> list[int]:
    """[m] the node that makes each tensor, -1 where none does; raises FormatError where tensors or sizes are wrong."""
    _check_sizes(tensor_bytes, tasks, resident_bytes)
    _check_known("the list of kept tensors", "tensor", kept, len(tensor_bytes))
    producer = [-1] * len(tensor_bytes)
    for index, task in enumerate(tasks):
        where = _where(index, tasks)
        _check_known(f"{where}: makes", "tensor", task.makes, len(tensor_bytes))
        _check_known(f"{where}: reads", "tensor", task.reads, len(tensor_bytes))
        for tensor in task.makes:
            if producer[tensor] >= 0:
                other = _where(producer[tensor], tasks)
                raise FormatError(f"{where}: expected to make tensors that no other node makes, got tensor {tensor} of {other}")
            producer[tensor] = index
        if task.takes:
            _check_takes(where, task, tensor_bytes)
    return producer


def checked_predecessors(producer: Sequence[int], tasks: Sequence[Task]) -> list[list[int]]:
    """[n] the distinct nodes before each node, ascending; raises FormatError where they form a cycle."""
    preds = []
    for index, task in enumerate(tasks):
        if task.after:
            _check_known(f"{_where(index, tasks)}: after", "node", task.after, len(tasks))
        before = {producer[tensor] for tensor in task.reads}
        before.update(task.after)
        before.discard(-1)
        preds.append(sorted(before))
    # Most problems are written in an order that is right already, which proves that there is no cycle.
    if any(before and before[-1] >= index for index, before in enumerate(preds)):
        _check_acyclic(preds, tasks)
    return preds


def _check_sizes(tensor_bytes: Sequence[int], tasks: Sequence[Task], resident_bytes: int) -> None:
    """Every size lies in [0, LIMIT_BYTES], and so does the sum of all."""
    for tensor, nbytes in enumerate(tensor_bytes):
        if not 0 <= nbytes <= LIMIT_BYTES:
            _refuse_bytes(f"tensor {tensor}: bytes", nbytes, _made_by(tensor, tasks))
    for index, task in enumerate(tasks):
        if task.workspace_bytes:
            _check_bytes(f"{_where(index, tasks)}: workspace_bytes", task.workspace_bytes)
    _check_bytes("resident_bytes", resident_bytes)
    workspace_bytes = max((task.workspace_bytes for task in tasks), default=0)
    _check_bytes("the sum of all tensors, resident_bytes and the largest workspace", sum(tensor_bytes) + resident_bytes + workspace_bytes)


def _check_bytes(what: str, nbytes: int) -> None:
    if not 0 <= nbytes <= LIMIT_BYTES:
        _refuse_bytes(what, nbytes)


def _refuse_bytes(what: str, nbytes: int, remark: str = "") -> NoReturn:
    shown = str(nbytes) if abs(nbytes) < 10**30 else "a number of more than 30 digits"
    raise FormatError(f"{what}: expected 0 to 2**62 bytes, got {shown}{remark}")


def _made_by(tensor: int, tasks: Sequence[Task]) -> str:
    """Which node makes a tensor, for people who know nodes by name and tensors not at all."""
    return next((f", made by {_where(index, tasks)}" for index, task in enumerate(tasks) if tensor in task.makes), "")


def _check_known(where: str, noun: str, ids: Sequence[int], count: int) -> None:
    for id_ in ids:
        if not 0 <= id_ < count:
            raise FormatError(f"{where}: expected a {noun} from 0 to {count - 1}, got {id_}")
    if len(set(ids)) < len(ids):
        twice = next(id_ for id_, count in Counter(ids).items() if count > 1)
        raise FormatError(f"{where}: expected each {noun} once, got {noun} {twice} twice")


def _check_takes(where: str, task: Task, tensor_bytes: Sequence[int]) -> None:
    """What may be taken over is read by the node and as large as its first output, which exists."""
    if not task.makes:
        raise FormatError(f"{where} may take over memory but makes no tensor: expected at least one in `makes`")
    candidates = [tensor for tensor, _ in task.takes]
    unread = set(candidates) - set(task.reads)
    if unread or len(set(candidates)) < len(candidates):
        reads = f"{list(task.reads[:_SHOWN])}{' and more' * (len(task.reads) > _SHOWN)}"
        raise FormatError(f"{where}: expected reuses of distinct tensors that it reads {reads}, got {candidates[:_SHOWN]}")
    for tensor, slot in task.takes:
        if tensor_bytes[tensor] != tensor_bytes[task.makes[0]]:
            expected = f"{tensor_bytes[task.makes[0]]} bytes as its first output (tensor {task.makes[0]}) has"
            raise FormatError(f"{where}: expected a reuse of {expected}, got tensor {tensor} of {tensor_bytes[tensor]} bytes")
        if not 0 <= slot < 2**31:
            raise FormatError(f"{where}: expected the index of a reuse from 0 to 2**31 - 1, got {slot}")


def _check_acyclic(preds: Sequence[Sequence[int]], tasks: Sequence[Task]) -> None:
    """Runs nodes as their predecessors are done: whatever is left over holds a cycle."""
    waiting = [len(before) for before in preds]
    succs: list[list[int]] = [[] for _ in preds]
    for node, before in enumerate(preds):
        for pred in before:
            succs[pred].append(node)
    ready = [node for node, count in enumerate(waiting) if count == 0]
    while ready:
        for node in succs[ready.pop()]:
            waiting[node] -= 1
            if waiting[node] == 0:
                ready.append(node)
    if any(waiting):
        cycle = _cycle(preds, waiting)
        raise FormatError(f"nodes wait for one another in a cycle: {' after '.join(_where(node, tasks) for node in cycle)}")


def _cycle(preds: Sequence[Sequence[int]], waiting: Sequence[int]) -> list[int]:
    """Nodes of one cycle, each after the next, first and last the same; the first few where it is longer."""
    node = next(node for node, count in enumerate(waiting) if count)
    path: dict[int, None] = {}
    while node not in path:  # each waiting node has a waiting predecessor, so this walk comes back to its own path
        path[node] = None
        node = next(pred for pred in preds[node] if waiting[pred])
    trail = list(path)
    return [*trail[trail.index(node) :], node][:_SHOWN]


def _where(index: int, tasks: Sequence[Task]) -> str:
    return f"node {index} ({tasks[index].name})"


Ints = NDArray[np.int32]
Bytes = NDArray[np.int64]
T = TypeVar("T", bound=np.generic)


class Rows(NamedTuple):
    """Rows of integers of unequal length, laid end to end: row i is `ids[ptr[i]:ptr[i + 1]]`."""

    ptr: Ints  # [rows + 1]
    ids: Ints  # [entries]

    @classmethod
    def of(cls, lists: Sequence[Sequence[int]]) -> Rows:
        """Lists laid end to end."""
        lengths = np.fromiter(map(len, lists), np.int64, len(lists))
        return cls(offsets(lengths), np.fromiter(chain.from_iterable(lists), np.int32, int(lengths.sum())))

    def row(self, index: int) -> list[int]:
        entries: list[int] = self.ids[self.ptr[index] : self.ptr[index + 1]].tolist()
        return entries

    def lists(self) -> list[list[int]]:
        return [self.row(index) for index in range(len(self.ptr) - 1)]

    def chosen(self, rows: Ints) -> Rows:
        lengths = np.where(rows < 0, 0, self.ptr[rows + 1] - self.ptr[rows])
        ptr = offsets(lengths)
        return Rows(ptr, self.ids[np.repeat(self.ptr[rows] - ptr[:-1], lengths) + np.arange(ptr[-1])])

    def frozen(self) -> Rows:
        """The same, from now on read-only."""
        return Rows(frozen(self.ptr), frozen(self.ids))


class OrderArrays(NamedTuple):
    """An `OrderProblem` as kernels take it."""

    preds: Rows
    succs: Rows
    reads: Rows
    readers: Rows
    outputs_of: Rows
    takes: Rows
    take_slots: Ints
    take_output: Ints
    producer: Ints
    tensor_bytes: Bytes
    made_bytes: Bytes
    workspace_bytes: Bytes
    own_bytes: Bytes
    lasting_bytes: Bytes
    uses: Ints
    kept: NDArray[np.bool_]


@dataclass(frozen=True, eq=False)
class OrderProblem:
    """n nodes that make and read m tensors, to be put in the order of least peak memory. Its arrays are read-only."""

    names: tuple[str, ...]  # [n] of nodes, for messages: not always unique
    tensor_bytes: Bytes  # [m]
    producer: Ints  # [m] the node that makes each tensor, -1 where it is there from the start
    kept: NDArray[np.bool_]  # [m] lives to the end
    read_ptr: Ints  # [n + 1] rows of distinct tensors that each node touches, less those that it makes
    read_ids: Ints
    pred_ptr: Ints  # [n + 1] rows of distinct nodes that come before each node: data, hazards and control alike, ascending
    pred_ids: Ints
    workspace_bytes: Bytes  # [n] memory that a node needs only while it runs
    take_ptr: Ints  # [n + 1] rows of tensors whose memory the node's first output may take over, the preferred first
    take_ids: Ints
    take_slots: Ints  # aligned with take_ids: the caller's own index of that candidate (its position in `Node.inplace`)
    take_output: Ints  # [n] the tensor that takes over, -1 where the node may not
    resident_bytes: int  # held throughout, and in no array

    @classmethod
    def of(cls, tensor_bytes: Sequence[int], tasks: Sequence[Task], *, kept: Iterable[int] = (), resident_bytes: int = 0) -> OrderProblem:
        """The problem of `tasks` over tensors of the given sizes; predecessors through tensors are found, `Task.after` adds to them.

        Raises FormatError, which names the node, for any of these:

        - a tensor or node that is unknown or repeated, a tensor made twice, a cycle
        - sizes that are negative or add up to more than 2**62 bytes
        - a reuse of a tensor that the node does not read or of another size
        """
        kept = tuple(kept)
        producer = checked_producers(tensor_bytes, tasks, kept, resident_bytes)
        preds = checked_predecessors(producer, tasks)
        reads, before = Rows.of([task.reads for task in tasks]).frozen(), Rows.of(preds).frozen()
        takes = Rows.of([[tensor for tensor, _ in task.takes] for task in tasks]).frozen()
        return cls(
            names=tuple(task.name for task in tasks),
            tensor_bytes=frozen(np.array(tensor_bytes, np.int64)),
            producer=frozen(np.array(producer, np.int32)),
            kept=frozen(np.isin(np.arange(len(tensor_bytes)), np.array(kept, np.int64))),
            read_ptr=reads.ptr,
            read_ids=reads.ids,
            pred_ptr=before.ptr,
            pred_ids=before.ids,
            workspace_bytes=frozen(np.array([task.workspace_bytes for task in tasks], np.int64)),
            take_ptr=takes.ptr,
            take_ids=takes.ids,
            take_slots=frozen(np.array([slot for task in tasks for _, slot in task.takes], np.int32)),
            take_output=frozen(np.array([task.makes[0] if task.takes else -1 for task in tasks], np.int32)),
            resident_bytes=resident_bytes,
        )

    @property
    def node_count(self) -> int:
        return len(self.names)

    @property
    def tensor_count(self) -> int:
        return len(self.tensor_bytes)

    @property
    def reads(self) -> Rows:
        """By node: the tensors that it touches and does not make."""
        return Rows(self.read_ptr, self.read_ids)

    @property
    def preds(self) -> Rows:
        """By node: the nodes that come before it."""
        return Rows(self.pred_ptr, self.pred_ids)

    @property
    def takes(self) -> Rows:
        """By node: the tensors that its first output may take over."""
        return Rows(self.take_ptr, self.take_ids)

    @cached_property
    def succs(self) -> Rows:
        """By node: the nodes that come after it, ascending."""
        return _transposed(self.preds, self.node_count)

    @cached_property
    def readers(self) -> Rows:
        """By tensor: the nodes that read it, ascending."""
        return _transposed(self.reads, self.tensor_count)

    @cached_property
    def outputs_of(self) -> Rows:
        """By node: the tensors that it makes, ascending."""
        present = np.count_nonzero(self.producer < 0)
        ids = np.argsort(self.producer, kind="stable")[present:]
        counts = np.bincount(self.producer[ids], minlength=self.node_count)
        return Rows(frozen(offsets(counts)), frozen(ids.astype(np.int32)))

    @cached_property
    def made_bytes(self) -> Bytes:
        """[n] the bytes of all that each node makes."""
        return self.sum_by_row(self.outputs_of, self.tensor_bytes)

    @cached_property
    def uses(self) -> Ints:
        """[m] how many nodes read each tensor, and one more where it is kept: its memory is free once they are all done."""
        return frozen((np.diff(self.readers.ptr) + self.kept).astype(np.int32))

    @cached_property
    def start_bytes(self) -> int:
        """The bytes of tensors that live before the first step, without `resident_bytes`."""
        return int(self.tensor_bytes[(self.producer < 0) & (self.uses > 0)].sum())

    @cached_property
    def arrays(self) -> OrderArrays:
        return OrderArrays(*(getattr(self, name) for name in OrderArrays._fields))

    @cached_property
    def own_bytes(self) -> Bytes:
        """[n] the bytes of all that each node makes, and its workspace."""
        return frozen(self.made_bytes + self.workspace_bytes)

    @cached_property
    def lasting_bytes(self) -> Bytes:
        """[n] the bytes of what each node makes and others read, or that is kept."""
        return self.sum_by_row(self.outputs_of, np.where(self.uses > 0, self.tensor_bytes, 0))

    @staticmethod
    def sum_by_row(rows: Rows, weights: Bytes) -> Bytes:
        """[rows] the sum of `weights[id]` over each row."""
        running = np.concatenate([[0], np.cumsum(weights[rows.ids], dtype=np.int64)])
        return frozen(running[rows.ptr[1:]] - running[rows.ptr[:-1]])


def _transposed(rows: Rows, columns: int) -> Rows:
    """By each number from 0 to `columns` - 1: the rows that hold it, ascending."""
    return Rows(*turned(rows.ptr, rows.ids, columns)[:2]).frozen()


@kernel
def turned(ptr: Any, ids: Any, columns: Any) -> tuple[Ints, Ints, Ints]:
    """Rows and columns of a sparse matrix exchanged, by counting, many times faster than sorting; and where in `ids` each entry was."""
    starts = np.zeros(columns + 1, np.int32)
    for column in ids:
        starts[column + 1] += 1
    for column in range(columns):
        starts[column + 1] += starts[column]
    fill, rows, entries = starts[:-1].copy(), np.empty(len(ids), np.int32), np.empty(len(ids), np.int32)
    for row in range(len(ptr) - 1):
        for entry in range(ptr[row], ptr[row + 1]):
            at = fill[ids[entry]]
            rows[at], entries[at], fill[ids[entry]] = row, entry, at + 1
    return starts, rows, entries


def offsets(lengths: NDArray[Any]) -> Ints:
    """[rows + 1] where each row of such lengths starts, and where the last one ends."""
    return np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)


def frozen(array: NDArray[T]) -> NDArray[T]:
    """`array` itself, from now on read-only."""
    array.setflags(write=False)
    return array
