"""What an integer model says of a problem: what is held in memory, what a node needs for itself, and who may take over from whom.

All in whole units of memory, so that a solver's numbers stay small.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from lowtide.problems.order import Bytes, OrderProblem, Rows


@dataclass(frozen=True, eq=False)
class Units:
    """A problem's bytes as whole units.

    A unit is what divides all sizes, or more bytes where a known order's peak has more than the limit in such units. Sizes are then
    rounded down, and since a footprint is a sum of sizes, no order's peak is below what its rounded peak says.
    """

    unit_bytes: int
    fixed_bytes: int  # in no order's power: what is resident, and what is both kept and there from the start
    exact: bool  # whether the unit divides all sizes
    tensor_units: Bytes  # [m]
    workspace_units: Bytes  # [n]

    @classmethod
    def of(cls, problem: OrderProblem, peak_bytes: int, limit: int) -> Units:
        """Units of which a known order's peak has at most `limit`."""
        fixed = problem.kept & (problem.producer < 0)
        fixed_bytes = problem.resident_bytes + int(problem.tensor_bytes[fixed].sum())
        divisor = max(1, int(np.gcd.reduce(np.concatenate([problem.tensor_bytes, problem.workspace_bytes]))))
        unit_bytes = max(divisor, -(-(peak_bytes - fixed_bytes) // limit))
        sizes = problem.tensor_bytes // unit_bytes, problem.workspace_bytes // unit_bytes
        return cls(unit_bytes, fixed_bytes, unit_bytes == divisor, *sizes)

    def range_of(self, bound_bytes: int, peak_bytes: int) -> tuple[int, int]:
        """The least and the most units that the peak of a best order can have, between a bound and the peak of a known order."""
        least = (bound_bytes - self.fixed_bytes) // self.unit_bytes if self.exact else 0
        return max(0, least), (peak_bytes - self.fixed_bytes) // self.unit_bytes

    def bytes_of(self, units: int) -> int:
        """The bytes that a peak of so many units has at least."""
        return self.fixed_bytes + units * self.unit_bytes


class Held(NamedTuple):
    """A tensor that is alive for as long as the order says, longer than one step."""

    tensor: int
    units: int
    producer: int  # -1 where it is there from the start
    readers: tuple[int, ...]
    kept: bool


class Reuse(NamedTuple):
    """A node whose first output may be in the memory of a tensor that dies at it."""

    node: int
    output: int
    units: int  # more than none
    rivals: tuple[tuple[int, tuple[int, ...]], ...]  # each candidate, and its other readers: it dies here if they all ran before

    @property
    def certain(self) -> bool:
        """Whether a candidate has no other reader, and so dies here in every order."""
        return any(not others for _, others in self.rivals)


class Model(NamedTuple):
    """The numbers of an integer model."""

    tensors: tuple[Held, ...]
    own_units: tuple[int, ...]  # [n] what a node needs while it runs: its workspace, and what it makes that nobody reads or keeps
    reuses: tuple[Reuse, ...]


def model_of(problem: OrderProblem, units: Units) -> Model:
    """The model's numbers."""
    sizes = units.tensor_units
    unread = problem.sum_by_row(problem.outputs_of, np.where(problem.uses == 0, sizes, 0))
    return Model(tuple(_held(problem, sizes)), tuple((units.workspace_units + unread).tolist()), tuple(_reuses(problem, sizes)))


def row(rows: Rows, index: int) -> tuple[int, ...]:
    """One row, as a tuple."""
    return tuple(rows.ids[rows.ptr[index] : rows.ptr[index + 1]].tolist())


def handovers(problem: OrderProblem) -> Iterator[tuple[int, tuple[int, ...]]]:
    """Each node with successors that read nothing that it makes, and those: in a program of tensors alone, one of no bytes ties them."""
    for node in range(problem.node_count):
        readers = {reader for tensor in row(problem.outputs_of, node) for reader in row(problem.readers, tensor)}
        waiting = tuple(succ for succ in row(problem.succs, node) if succ not in readers)
        if waiting:
            yield node, waiting


def _held(problem: OrderProblem, sizes: Bytes) -> Iterator[Held]:
    for tensor in np.flatnonzero(problem.uses > 0).tolist():
        producer, kept = int(problem.producer[tensor]), bool(problem.kept[tensor])
        if producer >= 0 or not kept:
            yield Held(tensor, int(sizes[tensor]), producer, row(problem.readers, tensor), kept)


def _reuses(problem: OrderProblem, sizes: Bytes) -> Iterator[Reuse]:
    for node in np.flatnonzero(problem.take_output >= 0).tolist():
        output = int(problem.take_output[node])
        candidates = [tensor for tensor in row(problem.takes, node) if not problem.kept[tensor]]
        if candidates and sizes[output] > 0:
            rivals = tuple((tensor, tuple(reader for reader in row(problem.readers, tensor) if reader != node)) for tensor in candidates)
            yield Reuse(node, output, int(sizes[output]), rivals)
