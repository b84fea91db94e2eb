"""What MODeL's program knows of an ordering problem: tensors that nodes make and read, all in whole units of memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lowtide.problems.order import OrderProblem
from research.orders.model import handovers, row


class Tensor(NamedTuple):
    """An edge of MODeL's graph: made by one node, read by any number."""

    number: int  # of the problem's tensor, -1 where it stands for something else: a workspace, or a predecessor
    units: int
    node: int  # that makes it, -1 where it is there from the start
    sinks: tuple[int, ...]  # that read it
    kept: bool  # lives to the end

    @property
    def preserved(self) -> bool:
        """Whether it is ever in memory at a later step than its node's."""
        return bool(self.sinks) or self.kept


class Taking(NamedTuple):
    """A node whose first output is where a tensor was that dies at it: the first of its candidates that does."""

    node: int
    output: int  # in `Tensors.all`
    candidates: tuple[int, ...]


@dataclass(frozen=True)
class Tensors:
    """All of them.

    A predecessor that hands over no tensor hands over one of no bytes; a workspace is a tensor that nobody reads. A unit is what divides
    all sizes and goes with the alignment; or more bytes, where an arena has more than the limit in such units. Sizes are then rounded
    down and the alignment is given up, so that what fits in B bytes fits in B // unit_bytes units.
    """

    all: tuple[Tensor, ...]
    takings: tuple[Taking, ...]
    unit_bytes: int
    align_units: int
    exact: bool  # whether nothing was rounded

    @classmethod
    def of(cls, problem: OrderProblem, align_bytes: int, arena_bytes: int, limit: int) -> Tensors:
        """Those of a problem; an arena of so many bytes has at most `limit` units."""
        divisor = max(1, int(np.gcd.reduce(np.concatenate([problem.tensor_bytes, problem.workspace_bytes]))))
        if divisor % align_bytes and align_bytes % divisor:
            divisor = int(np.gcd(divisor, align_bytes))
        unit = max(divisor, -(-arena_bytes // limit))
        ties = (Tensor(-1, 0, node, waiting, False) for node, waiting in handovers(problem))
        tensors = [*_own(problem, unit), *_workspaces(problem, unit), *ties]
        place = {tensor.number: number for number, tensor in enumerate(tensors) if tensor.number >= 0}
        takings = tuple(_takings(problem, place, tensors))
        return cls(tuple(tensors), takings, unit, align_bytes // unit if align_bytes % unit == 0 else 1, unit == divisor)


def _own(problem: OrderProblem, unit: int) -> Iterator[Tensor]:
    for index, nbytes in enumerate(problem.tensor_bytes.tolist()):
        node = int(problem.producer[index])
        if node >= 0 or problem.uses[index]:
            yield Tensor(index, nbytes // unit, node, row(problem.readers, index), bool(problem.kept[index]))


def _workspaces(problem: OrderProblem, unit: int) -> Iterator[Tensor]:
    for node in np.flatnonzero(problem.workspace_bytes).tolist():
        yield Tensor(-1, int(problem.workspace_bytes[node]) // unit, node, (), False)


def _takings(problem: OrderProblem, place: dict[int, int], tensors: list[Tensor]) -> Iterator[Taking]:
    for node in np.flatnonzero(problem.take_output >= 0).tolist():
        output = int(problem.take_output[node])
        candidates = tuple(place[tensor] for tensor in row(problem.takes, node) if not problem.kept[tensor])
        if candidates and tensors[place[output]].units:
            yield Taking(node, place[output], candidates)
