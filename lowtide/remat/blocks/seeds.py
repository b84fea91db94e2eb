"""Whole schedules for deep networks, planned block by block: checkpoints at block boundaries, and the dynamic programme over the chain.

A repeated block is planned once. What comes out is a sequence for each limit; what it really costs is for the caller to see, as
the chain's own sums leave out what crosses blocks in ways of its own, and eviction repairs what does not fit.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count, islice

import numpy as np

from lowtide.problems.order import Ints, OrderProblem, Rows
from lowtide.problems.order_check import Task
from lowtide.remat.blocks.chain import ChainTable, Step
from lowtide.remat.blocks.find import find_blocks, segments
from lowtide.remat.blocks.plan import BlockPlan, KnownOptions
from lowtide.remat.cost import price_of
from lowtide.remat.problem import RematProblem
from lowtide.remat.pruning import prompt, pruned

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
    """What was planned of one problem."""

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
