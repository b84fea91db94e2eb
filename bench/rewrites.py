"""Rewrites of an ordering problem by hand: one tensor computed a second time, or stored elsewhere and loaded again.

Both split the readers of a tensor in two: the early ones keep it, the late ones read another that is made again before them.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np

from lowtide.errors import FormatError
from lowtide.problems.order import Ints, OrderProblem, Rows, Task


class Rewritten(NamedTuple):
    """A new problem whose first nodes are those of the old one."""

    problem: OrderProblem
    moved: Ints  # [old n] what each old node became


@dataclass(frozen=True)
class Source:
    """What a problem was built from, so that it can be built again with a change."""

    tensor_bytes: tuple[int, ...]
    tasks: tuple[Task, ...]
    kept: tuple[int, ...]
    resident_bytes: int

    @classmethod
    def of(cls, problem: OrderProblem) -> Source:
        """The source of a problem."""
        makes, reads, takes, preds = map(_split, (problem.outputs_of, problem.reads, problem.takes, problem.preds))
        slots = _split(Rows(problem.take_ptr, problem.take_slots))
        tasks = []
        for node, name in enumerate(problem.names):
            first = int(problem.take_output[node])
            made_by = {int(problem.producer[tensor]) for tensor in reads[node]}
            tasks.append(
                Task(
                    name,
                    makes=tuple(sorted(makes[node], key=lambda tensor, first=first: tensor != first)),
                    reads=tuple(reads[node]),
                    after=tuple(pred for pred in preds[node] if pred not in made_by),
                    workspace_bytes=int(problem.workspace_bytes[node]),
                    takes=tuple(zip(takes[node], slots[node], strict=True)),
                )
            )
        return cls(tuple(problem.tensor_bytes.tolist()), tuple(tasks), tuple(np.flatnonzero(problem.kept).tolist()), problem.resident_bytes)

    def recompute(self, tensor: int, late: Collection[int]) -> Rewritten | None:
        """The nodes `late` read what a copy of the tensor's maker makes; None where they must run before what the maker must precede."""
        maker = self._maker(tensor)
        first, copied = len(self.tensor_bytes), self.tasks[maker]
        copy_of = {made: first + place for place, made in enumerate(copied.makes)}
        again = len(self.tasks)
        tasks = [_reading(task, tensor, copy_of[tensor]) if node in late else task for node, task in enumerate(self.tasks)]
        # Who came after the maker for other reasons than its tensors, a write to what it reads for one, comes after the copy too.
        tasks = [replace(task, after=(*task.after, again)) if maker in task.after else task for task in tasks]
        tasks.append(replace(copied, name=f"{copied.name}_again", makes=tuple(copy_of.values())))
        return self._rewritten((*self.tensor_bytes, *(self.tensor_bytes[made] for made in copied.makes)), tasks)

    def swap(self, tensor: int, late: Collection[int]) -> Rewritten | None:
        """The nodes `late` read what a load brings back after a store has read the tensor."""
        loaded, store = len(self.tensor_bytes), len(self.tasks)
        tasks = [_reading(task, tensor, loaded) if node in late else task for node, task in enumerate(self.tasks)]
        tasks.append(Task("store", reads=(tensor,)))
        tasks.append(Task("load", makes=(loaded,), after=(store,)))
        return self._rewritten((*self.tensor_bytes, self.tensor_bytes[tensor]), tasks)

    def _rewritten(self, tensor_bytes: tuple[int, ...], tasks: list[Task]) -> Rewritten | None:
        try:
            problem = OrderProblem.of(tensor_bytes, tasks, kept=self.kept, resident_bytes=self.resident_bytes)
        except FormatError:
            return None  # a cycle: this tensor cannot be made again so late
        return Rewritten(problem, np.arange(len(self.tasks), dtype=np.int32))

    def _maker(self, tensor: int) -> int:
        return next(node for node, task in enumerate(self.tasks) if tensor in task.makes)


def _reading(task: Task, tensor: int, other: int) -> Task:
    """The task with another tensor in place of one."""
    return replace(
        task,
        reads=tuple(other if read == tensor else read for read in task.reads),
        takes=tuple((other if taken == tensor else taken, slot) for taken, slot in task.takes),
    )


def _split(rows: Rows) -> list[list[int]]:
    ids, ptr = rows.ids.tolist(), rows.ptr.tolist()
    return [ids[start:end] for start, end in pairwise(ptr)]
