"""Block problems: the forward and the backward pass of one block as a small remat problem of its own.

Between the two passes stands one more node, the boundary: the rest of the step in one run. It makes what flows into the backward pass from
there and reads what the forward pass hands on. What the block takes from blocks before it is there throughout and counts nothing, as those
blocks answer for it. Blocks whose problems are equal number for number share one plan.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.problems.order import Bytes, Ints, OrderProblem, Rows
from lowtide.remat.blocks.find import Blocks
from lowtide.remat.problem import RematProblem, rows_of

_DIGITS = 3  # of a run's time that have to agree for two blocks to be equal


@dataclass(frozen=True, eq=False)
class BlockProblem:
    """A block as a problem: first come the nodes of its forward pass, then the boundary, then those of its backward pass."""

    problem: RematProblem
    nodes: Ints  # [n] of the whole problem, by node of this one; -1 for the boundary
    tensors: Ints  # [m] of the whole problem, by tensor of this one
    boundary: int  # the node between the two passes
    incoming_bytes: int  # what the boundary makes
    outgoing: NDArray[np.bool_]  # [m] made by the forward pass and wanted by the boundary
    pinned_bytes: int  # of masks and all else that is made once and wanted by the backward pass: they wait for it whatever is chosen
    key: bytes  # equal for equal problems

    @cached_property
    def once_us(self) -> float:
        return float(self.problem.cost_us.sum())

    @cached_property
    def sequence(self) -> Ints:
        return np.arange(len(self.nodes), dtype=np.int32)


def block_problems(problem: RematProblem, blocks: Blocks) -> list[BlockProblem]:
    position_of = np.full(problem.problem.node_count, -1, np.int64)
    position_of[blocks.sequence] = np.arange(len(blocks.sequence))
    return [_BlockCut(problem, blocks, block, position_of).block_problem() for block in range(blocks.count)]


class _BlockCut:
    """One block being cut out."""

    def __init__(self, problem: RematProblem, blocks: Blocks, block: int, position_of: NDArray[np.int64]) -> None:
        self.whole, self.blocks, self.position_of = problem, blocks, position_of
        self.begin, self.end = int(blocks.starts[block]), int(blocks.starts[block + 1])  # of the forward pass
        self.late, self.last = int(blocks.ends[block + 1]), int(blocks.ends[block])  # of the backward pass
        forward, backward = blocks.forward_of(block), blocks.backward_of(block)
        self.boundary = len(forward)
        self.nodes = np.concatenate([forward, [-1], backward]).astype(np.int32)
        base = problem.problem
        self.reads, self.makes, self.takes = (_gathered(rows, self.nodes) for rows in (base.reads, base.outputs_of, base.takes))
        touched = np.concatenate([self.reads.ids, self.makes.ids])
        self.sorted, first = np.unique(touched, return_index=True)
        self.tensors = touched[np.sort(first)]  # in the order in which they are met
        self.number = np.argsort(np.argsort(first))  # by tensor in `sorted`, where it is met
        self.made_at, self.read = blocks.made_at[self.tensors], blocks.read_at[self.tensors]
        self.by_forward = (self.made_at >= self.begin) & (self.made_at < self.end)
        self.by_backward = (self.made_at >= self.late) & (self.made_at < self.last)
        self.incoming = (self.made_at >= blocks.boundary) & (self.made_at < self.late)
        self.made_here = self.by_forward | self.by_backward | self.incoming
        self.outgoing = self.by_forward & self.read_between(self.end, self.late)

    def read_between(self, begin: int, end: int) -> NDArray[np.bool_]:
        """Whether runs from one position to before another read these tensors."""
        readers = self.whole.problem.readers
        between = np.zeros(len(self.tensors), np.bool_)
        for index in np.flatnonzero(self.by_forward & (self.read >= begin)):
            positions = self.position_of[_row(readers, self.tensors[index])]
            between[index] = bool(((positions >= begin) & (positions < end)).any())
        return between

    def block_problem(self) -> BlockProblem:
        base = self.whole.problem
        pinned = self.by_forward & (self.read >= self.blocks.boundary) & ~self.whole.repeatable[base.producer[self.tensors]]
        sizes = np.where(self.made_here, base.tensor_bytes[self.tensors], 0)
        problem = self.problem(sizes)
        return BlockProblem(
            problem=problem,
            nodes=self.nodes,
            tensors=self.tensors,
            boundary=self.boundary,
            incoming_bytes=int(sizes[self.incoming].sum()),
            outgoing=self.outgoing,
            pinned_bytes=int(base.tensor_bytes[self.tensors[pinned]].sum()),
            key=_key(problem, self.boundary),
        )

    def problem(self, sizes: Bytes) -> RematProblem:
        whole, base, own, count = self.whole, self.whole.problem, self.nodes, len(self.nodes)
        reads = _with_row(self.local_rows(self.reads), self.boundary, np.flatnonzero(self.outgoing))
        makes = _with_row(self.local_rows(self.makes), self.boundary, np.flatnonzero(self.incoming))
        takes = self.local_rows(self.takes)
        producer = np.full(len(self.tensors), -1, np.int32)
        producer[makes.ids] = np.repeat(np.arange(count), np.diff(makes.ptr))
        taken = np.where(own < 0, -1, base.take_output[own])
        outlives = ~self.by_forward & (self.read >= self.last)
        arrays: dict[str, Any] = {
            "tensor_bytes": sizes,
            "producer": producer,
            "kept": ~self.made_here | base.kept[self.tensors] | outlives,
            "read_ptr": reads.ptr,
            "read_ids": reads.ids,
            "pred_ptr": np.zeros(count + 1, np.int32),
            "pred_ids": np.zeros(0, np.int32),
            "workspace_bytes": np.where(own < 0, 0, base.workspace_bytes[own]),
            "take_ptr": takes.ptr,
            "take_ids": takes.ids,
            "take_slots": np.zeros_like(takes.ids),
            "take_output": np.where(taken < 0, -1, self.local(np.maximum(taken, 0))).astype(np.int32),
        }
        for array in arrays.values():
            array.setflags(write=False)  # as of every problem: kernels are compiled for such arrays
        return RematProblem(
            problem=OrderProblem(names=("",) * count, resident_bytes=0, **arrays),
            cost_us=np.where(own < 0, 0.0, whole.cost_us[own]),
            is_view=np.zeros(count, np.bool_),
            repeatable=(own >= 0) & whole.repeatable[own],
            limits=rows_of([self.limits_of(node) if limited else () for node, limited in zip(own.tolist(), self.limited(), strict=True)]),
        )

    def local(self, tensors: Ints) -> Ints:
        """Their numbers in this problem; of those that are not in it, any."""
        return self.number[np.minimum(np.searchsorted(self.sorted, tensors), len(self.sorted) - 1)].astype(np.int32)

    def local_rows(self, rows: Rows) -> Rows:
        return Rows(rows.ptr, self.local(rows.ids))

    def limited(self) -> list[bool]:
        """By node of this problem, whether anything writes over what it reads."""
        own, ptr = self.nodes, self.whole.limits.ptr
        limited: list[bool] = ((own >= 0) & (ptr[own + 1] > ptr[own])).tolist()
        return limited

    def limits_of(self, node: int) -> list[int]:
        """The nodes of this problem once which have run the node may not be repeated; the boundary stands for those of other blocks."""
        limits = set()
        for position in self.position_of[_row(self.whole.limits, node)].tolist():
            if self.begin <= position < self.end:
                limits.add(position - self.begin)
            elif self.late <= position < self.last:
                limits.add(self.boundary + 1 + position - self.late)
            elif 0 <= position < self.late:
                limits.add(self.boundary)
        return sorted(limits)


def _row(rows: Rows, index: Any) -> Ints:
    return rows.ids[rows.ptr[index] : rows.ptr[index + 1]]


def _gathered(rows: Rows, picked: Ints) -> Rows:
    """Some of the rows, one after another; an empty one for -1."""
    lengths = np.where(picked < 0, 0, rows.ptr[picked + 1] - rows.ptr[picked])
    ptr = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    return Rows(ptr, rows.ids[np.repeat(rows.ptr[picked] - ptr[:-1], lengths) + np.arange(ptr[-1])])


def _with_row(rows: Rows, index: int, row: NDArray[np.intp]) -> Rows:
    """The rows with this one in the place of an empty one."""
    ptr = rows.ptr.copy()
    ptr[index + 1 :] += len(row)
    return Rows(ptr, np.insert(rows.ids, rows.ptr[index], row).astype(np.int32))


def _key(problem: RematProblem, boundary: int) -> bytes:
    base = problem.problem
    costs = np.array([float(f"{cost:.{_DIGITS}g}") for cost in problem.cost_us])
    arrays = (
        base.tensor_bytes, base.producer, base.kept, *base.reads, *base.takes, base.take_output, base.workspace_bytes, costs,
        problem.repeatable, *problem.limits,
    )  # fmt: skip
    return b"/".join([str(boundary).encode(), *(array.tobytes() for array in arrays)])
