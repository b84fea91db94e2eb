"""Whole schedules for deep networks, planned block by block: checkpoints at block boundaries, and the dynamic programme over the chain.

A repeated block is planned once. What comes out is a sequence for each limit; what it really costs is for the caller to see, as
the chain's own sums leave out what crosses blocks in ways of its own, and eviction repairs what does not fit.

The block plan of a segment has its blocks, the options of each, and the sequence that a plan of steps stands for.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, islice

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lowtide.problems.order import Ints, OrderProblem, Rows, Task
from lowtide.remat.blocks import BlockProblem, Blocks, block_problems, find_blocks, segments
from lowtide.remat.chain import BACKWARD, FORWARD, HAND_ON, Chain, ChainTable, Step
from lowtide.remat.cost import price_of
from lowtide.remat.options import REPEATED, SINGLE, Option, OptionEffort, forward_twice, option_of, options_of
from lowtide.remat.problem import RematProblem
from lowtide.remat.pruning import prompt, pruned

KnownOptions = dict[tuple[bytes, OptionEffort, bool], list[Option]]  # by block, how far was looked, and whether it was made of smaller ones


@dataclass(frozen=True, eq=False)
class BlockPlan:
    """The blocks of a segment, and what can be done with each."""

    problem: RematProblem
    blocks: Blocks
    block_problems: list[BlockProblem]
    options: list[list[Option]]  # by block; equal blocks share theirs

    @classmethod
    def of(cls, problem: RematProblem, blocks: Blocks, known: KnownOptions, finer: BlockPlan | None = None) -> BlockPlan:
        """Every distinct block planned once, where it is not in `known`; with what was found for the blocks of `finer` inside."""
        own = block_problems(problem, blocks)
        repeats = Counter(each.key for each in own)
        keys = [(each.key, REPEATED if repeats[each.key] > 1 else SINGLE, finer is not None) for each in own]
        for block, (each, key) in enumerate(zip(own, keys, strict=True)):
            if key not in known:
                known[key] = options_of(each, finer.inside(blocks, block) if finer else (), key[1])
        return cls(problem, blocks, own, [known[key] for key in keys])

    def inside(self, coarser: Blocks, block: int) -> list[list[Option]]:
        """The options of the blocks that a coarser one is made of."""
        first, last = np.searchsorted(self.blocks.starts, coarser.starts[block : block + 2])
        return self.options[first:last]

    def checkpointed(self, size: int) -> list[Step]:
        """Blocks in groups of so many: all but the last group only hand on, and run forward again before the group's backward pass."""
        groups = [range(start, min(start + size, self.blocks.count)) for start in range(0, self.blocks.count, size)]
        steps: list[Step] = [(HAND_ON, block, -1) for group in groups[:-1] for block in group]
        for group in reversed(groups):
            steps += [(FORWARD, block, 0) for block in group]  # the fastest option keeps all
            steps += [(BACKWARD, block, 0) for block in reversed(group)]
        return steps

    def chain(self, unit_bytes: int) -> Chain:
        """The chain in units of so many bytes, to the nearest: what a plan really takes is seen when it is written out."""
        flat = [option for options in self.options for option in options]

        def units(values: ArrayLike) -> NDArray[np.int64]:
            return (np.asarray(values, np.int64) + unit_bytes // 2) // unit_bytes

        handing = [option_of(each, forward_twice(each)) for each in self.block_problems]
        forward, backward = self.rest()
        return Chain(
            option_ptr=np.concatenate([[0], np.cumsum([len(options) for options in self.options])]).astype(np.int64),
            checkpoint=units([option.checkpoint_bytes for option in flat]),
            forward=units([option.forward_bytes for option in flat]),
            backward=units([option.backward_bytes for option in flat]),
            extra_us=np.array([option.extra_us for option in flat]),
            again_us=np.array([option.again_us for option in flat]),
            inner_us=np.array([option.inner_us for option in flat]),
            hand_on=units([option.forward_bytes for option in handing]),
            hand_on_us=np.array([option.again_us for option in handing]),
            handed=units(self.handed()),
            rest_forward=units(forward),
            rest_backward=units(backward),
            pinned=units(np.cumsum([0, *(each.pinned_bytes for each in self.block_problems)])),
        )

    def handed(self) -> NDArray[np.int64]:
        """[blocks + 1, blocks + 1] the bytes made in blocks from s on and alive for the forward pass at the start of block k."""
        blocks, count = self.blocks, self.blocks.count
        handed_bytes = np.zeros((count + 1, count + 1), np.int64)
        sizes = self.problem.problem.tensor_bytes
        born = np.searchsorted(blocks.starts, blocks.made_at, side="right") - 1
        dies = np.searchsorted(blocks.starts, blocks.forward_at, side="right") - 1  # the last block that reads it forward
        inside = (blocks.made_at >= blocks.begin) & (blocks.made_at < blocks.boundary) & (dies > born)
        by_span = np.zeros((count + 1, count + 1), np.int64)
        np.add.at(by_span, (born[inside], dies[inside]), sizes[inside])
        for start in range(count + 1):
            for at in range(start + 1, count + 1):
                handed_bytes[start, at] = by_span[start:at, at:].sum()
        return handed_bytes

    def rest(self) -> tuple[list[int], list[int]]:
        """By block: bytes that no forward pass makes, alive before the backward pass, and through it though it does not touch them."""
        blocks, base = self.blocks, self.problem.problem
        forward, backward = [], []
        late = (blocks.made_at >= blocks.boundary) | base.kept & (blocks.made_at >= 0)
        until = np.where(base.kept, len(blocks.sequence), blocks.read_at)
        for block, own in enumerate(self.block_problems):
            begin, end = blocks.ends[block + 1], blocks.ends[block]
            before = late & (blocks.made_at < begin)
            forward.append(int(base.tensor_bytes[before & (until >= begin)].sum()))
            through = before & (until >= end)
            through[own.tensors] = False
            backward.append(int(base.tensor_bytes[through].sum()))
        return forward, backward

    def around_bytes(self) -> int:
        """What is alive all along beside what these blocks make: what is there from the start, and what was made before."""
        blocks, base = self.blocks, self.problem.problem
        before = (blocks.made_at >= 0) & (blocks.made_at < blocks.begin) & (blocks.read_at >= blocks.begin) & ~base.kept
        return int(base.resident_bytes + base.start_bytes + base.tensor_bytes[before].sum())

    def written(self, steps: Sequence[Step]) -> Ints:
        """The sequence of a plan, some of its runs needless."""
        for step in steps:
            if step not in self._pieces:
                self._pieces[step] = self.piece(*step)
        return np.concatenate([self._pieces[step] for step in steps])

    @cached_property
    def _pieces(self) -> dict[Step, Ints]:
        return {}

    def piece(self, deed: int, block: int, option: int) -> Ints:
        if deed == HAND_ON:
            return self.blocks.forward_of(block).astype(np.int32)
        sequence, own = self.options[block][option].sequence, self.block_problems[block]
        boundary = int(np.flatnonzero(sequence == own.boundary)[0])
        return own.nodes[sequence[:boundary] if deed == FORWARD else sequence[boundary + 1 :]]


_ROUNDS = 6  # of aiming at a limit
_WARMED_UP = 4  # blocks of a warm-up
_UNITS = 4000  # of memory, from what is resident to the peak without recomputation


class Seeds:
    """Whole schedules planned block by block. What was planned is there for whoever asks next: another level of effort, another thread."""

    def __init__(self) -> None:
        self._planned: dict[RematProblem, _Planned] = {}
        self._lock = threading.Lock()

    def of(self, problem: RematProblem, order: Ints, levels: Sequence[int]) -> Iterator[Ints]:
        """Sequences for limits of so many bytes, with what is resident, and for checkpoints at block boundaries; each is right, none twice.

        `order` runs each node once. Nothing where the network has no blocks.
        """
        with self._lock:
            planned = self._planned.get(problem) or self._planned.setdefault(problem, _Planned(problem))
        known = {order.tobytes()}
        for plans in planned.ways(order):
            for sequence in (*plans.checkpointed(), *plans.within(levels)):
                if sequence.tobytes() not in known:
                    known.add(sequence.tobytes())
                    yield sequence


def warm_up_seeds() -> None:
    """Compile the kernels, or load them, so that it is not the first search that waits."""
    tasks, tensor = [Task("", (0,))], 1
    for _ in range(_WARMED_UP):
        tasks += [Task("", (tensor,), (tensor - 1,)), Task("", (tensor + 1,), (tensor,))]
        tensor += 2
    for earlier in range(tensor - 2, 0, -2):
        tasks.append(Task("", (tensor,), (tensor - 1, earlier)))
        tensor += 1
    sizes = [8 if 0 < each <= 2 * _WARMED_UP and each % 2 else 1 for each in range(tensor)]
    count = len(tasks)
    limits = Rows(np.zeros(count + 1, np.int32), np.zeros(0, np.int32))
    problem = RematProblem(OrderProblem.of(sizes, tasks), np.ones(count), np.zeros(count, np.bool_), np.ones(count, np.bool_), limits)
    order = problem.sequence_of(np.arange(count))
    for _ in Seeds().of(problem, order, [price_of(problem, order)[0] * 2 // 3]):
        pass


class _Planned:
    def __init__(self, problem: RematProblem) -> None:
        self._problem = _settled(problem)
        self._options: KnownOptions = {}
        self._found: dict[bytes, list[Plans]] = {}
        self._coming: dict[bytes, Iterator[Plans]] = {}
        self._lock = threading.Lock()

    def ways(self, order: Ints) -> Iterator[Plans]:
        """The ways to plan along an order, each made when it is wanted first."""
        plans = self._found.setdefault(order.tobytes(), [])
        for position in count():
            with self._lock:
                if position == len(plans) and not self._more(order, plans):
                    return
            yield plans[position]

    def _more(self, order: Ints, plans: list[Plans]) -> bool:
        """Whether there was one more way to find. What is interrupted is begun again next time."""
        key = order.tobytes()
        before, coming = len(plans), self._coming.pop(key, None)
        if coming is None:
            coming = islice(_ways_to_plan(self._problem, prompt(self._problem, order), self._options), len(plans), None)
        plans.extend(islice(coming, 1))
        self._coming[key] = coming
        return len(plans) > before


def _ways_to_plan(problem: RematProblem, order: Ints, options: KnownOptions) -> Iterator[Plans]:
    """All segments by their blocks, then by blocks of twice the size; with skips taken into account for the cuts, and without."""
    seen: list[list[int]] = []
    for skips in (True, False):
        blocks = [each for segment in segments(problem, order) if (each := find_blocks(problem, order, segment, skips=skips)) is not None]
        starts = [start for each in blocks for start in each.starts.tolist()]
        if not blocks or starts in seen:
            continue
        seen.append(starts)
        finest = [BlockPlan.of(problem, each, options) for each in blocks]
        yield Plans(problem, order, finest)
        yield Plans(problem, order, [BlockPlan.of(problem, fine.blocks.merged(2), options, fine) for fine in finest])


def _settled(problem: RematProblem) -> RematProblem:
    """The problem in which what only turns random bits into a mask of their size is not repeated: then the bits need not be kept."""
    base = problem.problem
    again = problem.repeatable.copy()
    for node in np.flatnonzero(again & (np.diff(base.read_ptr) == 1)):
        tensor = base.read_ids[base.read_ptr[node]]
        maker = base.producer[tensor]
        alone = base.readers.ptr[tensor + 1] - base.readers.ptr[tensor] == 1 and not base.kept[tensor]
        again[node] = maker < 0 or again[maker] or not alone or base.made_bytes[node] > base.tensor_bytes[tensor]
    return replace(problem, repeatable=again)


@dataclass(frozen=True, eq=False)
class Plans:
    """An order and the block plans of its segments; what lies between them stays as it is."""

    problem: RematProblem
    order: Ints
    segments: list[BlockPlan]

    def checkpointed(self) -> Iterator[Ints]:
        """Each block keeps only what it reads; then every two of them, four, and so on."""
        size = 1
        while size < max(segment.blocks.count for segment in self.segments):
            yield self.written([segment.checkpointed(size) for segment in self.segments])
            size *= 2

    def within(self, levels: Sequence[int]) -> Iterator[Ints]:
        """For each limit the chains' best plans; where the whole takes other than that, as many bytes more or less are tried."""
        unit_bytes, tables = self.tables
        for level in levels:
            aim = level
            for _ in range(_ROUNDS):
                plans = [
                    table.steps((aim - segment.around_bytes()) // unit_bytes) for segment, table in zip(self.segments, tables, strict=True)
                ]
                if not all(plans):
                    break
                sequence = self.written(plans)
                yield sequence
                missed_bytes = level - price_of(self.problem, sequence)[0]
                if 0 <= missed_bytes < unit_bytes:
                    break
                aim += missed_bytes

    @cached_property
    def tables(self) -> tuple[int, list[ChainTable]]:
        """The bytes of a unit, and in such units the best plans of each segment."""
        top_bytes = price_of(self.problem, self.order)[0] - self.problem.problem.resident_bytes
        unit_bytes = max(1, -(-top_bytes // _UNITS))
        return unit_bytes, [ChainTable(segment.chain(unit_bytes), _UNITS) for segment in self.segments]

    def written(self, plans: Sequence[Sequence[Step]]) -> Ints:
        pieces, position = [], 0
        for segment, steps in zip(self.segments, plans, strict=True):
            pieces += [self.order[position : segment.blocks.begin], segment.written(steps)]
            position = segment.blocks.end
        return pruned(self.problem, np.concatenate([*pieces, self.order[position:]]))
