"""The ordering problem, bare: nodes, tensors and their bytes as integer arrays, with no graph and no torch in sight.

A tensor here is a storage: a block of bytes that one node makes, or that is there from the start (its producer is -1).

- A tensor that a node makes lives from the start of that node to the end of the last node that reads it; one that nobody
  reads lives during the node that makes it.
- A tensor that is there from the start and not kept is *donated*: it lives from the start to the end of the last node that reads it;
  one that nobody reads is freed before the first step.
- A kept tensor (an output of the program) lives to the end of the last step.
- What the caller holds throughout, whatever the order, is one constant: `resident_bytes`.
- A node may *take over* the memory of a tensor that dies at it, in place of new memory for its first output.

`OrderProblem.of` builds and checks a problem; `problem_json` reads and writes it; `cost.memory` says what an order costs.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import numpy as np
from numpy.typing import NDArray

from lowtide.base.kernels import kernel
from lowtide.problems.order_check import Task, checked_predecessors, checked_producers

Ints = NDArray[np.int32]
Bytes = NDArray[np.int64]
Item = TypeVar("Item", bound=np.generic)


class Rows(NamedTuple):
    """Rows of integers of unequal length, laid end to end: row i is `ids[ptr[i]:ptr[i + 1]]`."""

    ptr: Ints  # [rows + 1]
    ids: Ints  # [entries]


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
        reads, takes = _rows([task.reads for task in tasks]), _rows([[tensor for tensor, _ in task.takes] for task in tasks])
        before, slots = _rows(preds), _rows([[slot for _, slot in task.takes] for task in tasks]).ids
        return cls(
            names=tuple(task.name for task in tasks),
            tensor_bytes=_frozen(np.array(tensor_bytes, np.int64)),
            producer=_frozen(np.array(producer, np.int32)),
            kept=_frozen(np.isin(np.arange(len(tensor_bytes)), np.array(kept, np.int64))),
            read_ptr=reads.ptr,
            read_ids=reads.ids,
            pred_ptr=before.ptr,
            pred_ids=before.ids,
            workspace_bytes=_frozen(np.array([task.workspace_bytes for task in tasks], np.int64)),
            take_ptr=takes.ptr,
            take_ids=takes.ids,
            take_slots=slots,
            take_output=_frozen(np.array([task.makes[0] if task.takes else -1 for task in tasks], np.int32)),
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
        return Rows(_offsets(counts), _frozen(ids.astype(np.int32)))

    @cached_property
    def made_bytes(self) -> Bytes:
        """[n] the bytes of all that each node makes."""
        return self.sum_by_row(self.outputs_of, self.tensor_bytes)

    @cached_property
    def uses(self) -> Ints:
        """[m] how many nodes read each tensor, and one more where it is kept: its memory is free once they are all done."""
        return _frozen((np.diff(self.readers.ptr) + self.kept).astype(np.int32))

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
        return _frozen(self.made_bytes + self.workspace_bytes)

    @cached_property
    def lasting_bytes(self) -> Bytes:
        """[n] the bytes of what each node makes and others read, or that is kept."""
        return self.sum_by_row(self.outputs_of, np.where(self.uses > 0, self.tensor_bytes, 0))

    @staticmethod
    def sum_by_row(rows: Rows, weights: Bytes) -> Bytes:
        """[rows] the sum of `weights[id]` over each row."""
        running = np.concatenate([[0], np.cumsum(weights[rows.ids], dtype=np.int64)])
        return _frozen(running[rows.ptr[1:]] - running[rows.ptr[:-1]])


def _rows(lists: Sequence[Sequence[int]]) -> Rows:
    """`lists` laid end to end."""
    lengths = np.fromiter(map(len, lists), np.int64, len(lists))
    return Rows(_offsets(lengths), _frozen(np.fromiter(chain.from_iterable(lists), np.int32, int(lengths.sum()))))


def _transposed(rows: Rows, columns: int) -> Rows:
    """By each number from 0 to `columns` - 1: the rows that hold it, ascending."""
    ptr, ids = _turned(rows.ptr, rows.ids, columns)
    return Rows(_frozen(ptr), _frozen(ids))


@kernel
def _turned(ptr: Any, ids: Any, columns: Any) -> tuple[Ints, Ints]:
    """Rows and columns of a sparse matrix exchanged, by counting: many times faster than sorting."""
    starts = np.zeros(columns + 1, np.int32)
    for column in ids:
        starts[column + 1] += 1
    for column in range(columns):
        starts[column + 1] += starts[column]
    fill, turned = starts[:-1].copy(), np.empty(len(ids), np.int32)
    for row in range(len(ptr) - 1):
        for entry in range(ptr[row], ptr[row + 1]):
            turned[fill[ids[entry]]] = row
            fill[ids[entry]] += 1
    return starts, turned


def _offsets(lengths: NDArray[np.int64]) -> Ints:
    """[rows + 1] where each row starts, and where the last one ends."""
    return _frozen(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))


def _frozen(array: NDArray[Item]) -> NDArray[Item]:
    """`array` itself, from now on read-only."""
    array.setflags(write=False)
    return array
