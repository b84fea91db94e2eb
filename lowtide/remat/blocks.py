"""Blocks: where the forward pass of a training step is narrow, found from the integer arrays alone; and each as a small problem of its own.

A sequence, or a *segment* of it where it has several (one for each micro-batch, say), is taken apart at its *forward-backward boundary*,
the position across which most bytes wait. What runs before it is the forward pass, whatever its nodes are; what runs after it, the backward
pass. Of the bytes alive at a position of the forward pass some are read by later forward runs, and some only wait for the backward pass. A
*cut* is a position where the former are few: what comes after needs little of what came before. Two cuts enclose a block, and the block's
backward pass ends with the last run that reads what was made inside it. What a cut hands on includes shortcuts and skips, as they are read
by later forward runs; a network without narrow places has no cuts.

A block problem has one more node between the two passes, the boundary: the rest of the step in one run. It makes what flows into the
backward pass from there and reads what the forward pass hands on. What the block takes from blocks before it is there throughout and counts
nothing, as those blocks answer for it. Blocks whose problems are equal number for number share one plan.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.base.kernels import kernel
from lowtide.problems.order import Bytes, Ints, OrderProblem, Rows
from lowtide.remat.problem import RematProblem

Positions = NDArray[np.int64]

_RISE = 1.25  # between two cuts, what is alive for the forward pass rises by at least this factor over either
_STEEP = 1.5  # a cut hands on at most this many times what the cut before or after it does
_FAR = 0.1  # of the forward pass: what is handed on further than that is a skip
_SEGMENT = 4.0  # between two segments, at most this part of what waits at either's boundary waits
_NEARLY_ALL = 0.98  # of the tensors that ever wait at once
_WORTH = 0.02  # of the bytes at the boundary: where less waits inside of blocks, there is nothing to plan


@dataclass(frozen=True, eq=False)
class Blocks:
    """A sequence taken apart: block b runs forward in `[starts[b], starts[b + 1])` and backward in `[ends[b + 1], ends[b])`."""

    sequence: Ints
    starts: Positions  # [blocks + 1] ascending from the segment's first position to the boundary
    ends: Positions  # [blocks + 1] descending from the segment's end to the boundary
    made_at: Positions  # [m] the position of the run that makes a tensor; -1 for none
    read_at: Positions  # [m] the position of the last run that reads it; -1 for none
    forward_at: Positions  # [m] the same of the forward pass alone

    @property
    def count(self) -> int:
        return len(self.starts) - 1

    @property
    def begin(self) -> int:
        return int(self.starts[0])

    @property
    def end(self) -> int:
        return int(self.ends[0])

    @property
    def boundary(self) -> int:
        return int(self.starts[-1])

    def merged(self, size: int) -> Blocks:
        """So many neighbours made one block, from the start; the last may be smaller."""
        chosen = np.unique(np.append(np.arange(0, self.count, size), self.count))
        return replace(self, starts=self.starts[chosen], ends=self.ends[chosen])

    def forward_of(self, block: int) -> Ints:
        return self.sequence[self.starts[block] : self.starts[block + 1]]

    def backward_of(self, block: int) -> Ints:
        return self.sequence[self.ends[block + 1] : self.ends[block]]


def segments(problem: RematProblem, sequence: Ints) -> list[tuple[int, int]]:
    """Where a sequence falls apart into stretches across whose ends little waits: `[begin, end)` of each, all positions in one of them."""
    waiting = _alive(*_spans(problem, sequence, len(sequence)), problem.problem.tensor_bytes, len(sequence))
    valleys = _valleys(waiting, np.zeros_like(waiting), _SEGMENT)
    bounds = np.unique(np.concatenate([[0], valleys, [len(sequence)]])).tolist()
    return list(pairwise(bounds))


def find_blocks(
    problem: RematProblem, sequence: Ints, segment: tuple[int, int] | None = None, most: int = 64, *, skips: bool = True
) -> Blocks | None:
    """The blocks of a sequence that runs each node once, or of a segment of it; at most so many, None where no two are worth planning.

    Without `skips`, what is handed on over more than a share of the forward pass does not count where cuts are looked for.
    """
    begin, end = segment or (0, len(sequence))
    made_at, read_at = _spans(problem, sequence, len(sequence))
    sizes = problem.problem.tensor_bytes
    read_at = np.where(sizes > 0, read_at, -1)  # numbers bind no block to what reads them
    waiting = _alive(made_at, read_at, sizes, len(sequence))
    boundary = begin + int(np.argmax(waiting[begin : end + 1]))
    starts, forward_at, merged = _starts(problem, sequence, (begin, boundary, end), made_at, read_at, skips=skips)
    if merged > len(starts):  # what the backward pass makes first and reads last may be before that position: where most tensors wait
        count = _alive(made_at, read_at, np.ones_like(sizes), len(sequence))[begin : end + 1]
        earlier = begin + int(np.argmax(count >= _NEARLY_ALL * count.max()))
        other, other_forward_at, _ = _starts(problem, sequence, (begin, earlier, end), made_at, read_at, skips=skips)
        if len(other) > len(starts):
            starts, forward_at, boundary = other, other_forward_at, earlier
    while len(starts) - 1 > most:
        starts = np.append(starts[:-1:2], boundary)
    inside = (made_at >= begin) & (made_at < boundary) & (read_at >= boundary)
    if len(starts) < 3 or sizes[inside].sum() < _WORTH * waiting[boundary]:
        return None
    return Blocks(sequence, starts, _ends(starts, made_at, read_at, forward_at, end), made_at, read_at, forward_at)


def _starts(
    problem: RematProblem, sequence: Ints, bounds: tuple[int, int, int], made_at: Positions, read_at: Positions, *, skips: bool
) -> tuple[Positions, Positions, int]:
    """Where blocks start between a beginning and a boundary, and this; the last forward reads; how many were one with the block before.

    `bounds`: beginning, boundary, and the end of the segment.
    """
    begin, boundary, end = bounds
    sizes = problem.problem.tensor_bytes
    forward_at = np.where(sizes > 0, _spans(problem, sequence, boundary)[1], -1)
    near = (made_at >= begin) & (skips | (forward_at - made_at <= _FAR * (boundary - begin)))
    alive = _alive(made_at, np.where(near, forward_at, -1), sizes, boundary)[begin:]
    # What the backward pass does not read would be kept only for blocks that run forward again: better to cut where it reads all.
    idle = _alive(made_at, np.where(near & (read_at < boundary), forward_at, -1), sizes, boundary)[begin:]
    cuts = begin + _low(_valleys(alive, idle, _RISE), alive)
    unmerged = np.unique(np.concatenate([[begin], cuts, [boundary]])).astype(np.int64)
    starts = _with_backward_pieces(unmerged, made_at, read_at, forward_at, end)
    return starts, forward_at, len(unmerged) - len(starts)


def _spans(problem: RematProblem, sequence: Ints, end: int) -> tuple[Positions, Positions]:
    """By tensor: the position of its maker, and of the last run before position `end` that reads it."""
    base = problem.problem
    position_of = np.full(base.node_count + 1, -1, np.int64)
    position_of[sequence] = np.arange(len(sequence))
    readers = np.repeat(np.arange(base.node_count), np.diff(base.read_ptr))
    positions = position_of[readers]
    read_at = np.full(base.tensor_count, -1, np.int64)
    inside = positions < end
    np.maximum.at(read_at, base.read_ids[inside], positions[inside])
    return position_of[base.producer], read_at


def _alive(made_at: Positions, read_at: Positions, sizes: Bytes, end: int) -> Bytes:
    """[end + 1] the bytes that cross each position: made by a run before it and read by one from there on."""
    crossing = (made_at >= 0) & (read_at > made_at)
    change = np.zeros(end + 2, np.int64)
    np.add.at(change, np.minimum(made_at[crossing], end) + 1, sizes[crossing])
    np.add.at(change, np.minimum(read_at[crossing], end) + 1, -sizes[crossing])
    return np.cumsum(change)[: end + 1]


@kernel
def _valleys(levels: Any, idle: Any, rise: Any) -> Positions:
    """The lowest position of each valley whose walls on both sides are at least `rise` times as high; of equals the least idle."""
    valleys = np.empty(len(levels), np.int64)
    count, low, high, falling = 0, 0, levels[0], True
    for position in range(len(levels)):
        level = levels[position]
        if falling:
            if level < levels[low] or (level == levels[low] and idle[position] < idle[low]):
                low = position
            elif level > rise * levels[low]:
                valleys[count] = low
                count += 1
                falling, high = False, level
        else:
            high = max(high, level)
            if level * rise < high:
                falling, low = True, position
    return valleys[:count]


def _low(cuts: Positions, alive: Bytes) -> Positions:
    """The cuts without those that hand on much more than both their neighbours."""
    handed = np.concatenate([[np.inf], alive[cuts], [np.inf]])
    low: Positions = cuts[alive[cuts] <= _STEEP * np.maximum(handed[:-2], handed[2:])]
    return low


def _with_backward_pieces(starts: Positions, made_at: Positions, read_at: Positions, forward_at: Positions, end: int) -> Positions:
    """The starts without those of blocks whose backward pass is empty: they are one with the block before."""
    ends = _ends(starts, made_at, read_at, forward_at, end)
    empty = ends[1:-1] == ends[2:]  # of every block but the first
    return np.concatenate([starts[:1], starts[1:-1][~empty], starts[-1:]])


def _ends(starts: Positions, made_at: Positions, read_at: Positions, forward_at: Positions, end: int) -> Positions:
    """By block the position behind the last run that reads what was made inside and is handed on to no later block."""
    boundary = starts[-1]
    block_of = np.searchsorted(starts, made_at, side="right") - 1
    inner = (made_at >= starts[0]) & (made_at < boundary) & (read_at >= boundary)
    inner[inner] = forward_at[inner] < starts[block_of[inner] + 1]
    ends = np.full(len(starts), boundary, np.int64)
    np.maximum.at(ends, block_of[inner], np.minimum(read_at[inner] + 1, end))
    ends = np.maximum.accumulate(ends[::-1])[::-1].copy()
    ends[0] = end
    return ends


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
    def __init__(self, problem: RematProblem, blocks: Blocks, block: int, position_of: NDArray[np.int64]) -> None:
        self.whole, self.blocks, self.position_of = problem, blocks, position_of
        self.begin, self.end = int(blocks.starts[block]), int(blocks.starts[block + 1])  # of the forward pass
        self.late, self.last = int(blocks.ends[block + 1]), int(blocks.ends[block])  # of the backward pass
        forward, backward = blocks.forward_of(block), blocks.backward_of(block)
        self.boundary = len(forward)
        self.nodes = np.concatenate([forward, [-1], backward]).astype(np.int32)
        base = problem.problem
        self.reads, self.makes, self.takes = (rows.chosen(self.nodes) for rows in (base.reads, base.outputs_of, base.takes))
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
            positions = self.position_of[readers.row(self.tensors[index])]
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
            limits=Rows.of([self.limits_of(node) if limited else () for node, limited in zip(own.tolist(), self.limited(), strict=True)]),
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
        for position in self.position_of[self.whole.limits.row(node)].tolist():
            if self.begin <= position < self.end:
                limits.add(position - self.begin)
            elif self.late <= position < self.last:
                limits.add(self.boundary + 1 + position - self.late)
            elif 0 <= position < self.late:
                limits.add(self.boundary)
        return sorted(limits)


def _with_row(rows: Rows, index: int, row: NDArray[np.intp]) -> Rows:
    """The rows with this one in the place of an empty one."""
    ptr = rows.ptr.copy()
    ptr[index + 1 :] += len(row)
    return Rows(ptr, np.insert(rows.ids, rows.ptr[index], row).astype(np.int32))


def _key(problem: RematProblem, boundary: int) -> bytes:
    base = problem.problem
    costs = np.array([float(f"{cost:.{_DIGITS}g}") for cost in problem.cost_us])
    arrays = (
        base.tensor_bytes,
        base.producer,
        base.kept,
        *base.reads,
        *base.takes,
        base.take_output,
        base.workspace_bytes,
        costs,
        problem.repeatable,
        *problem.limits,
    )
    return b"/".join([str(boundary).encode(), *(array.tobytes() for array in arrays)])
