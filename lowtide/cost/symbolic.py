"""The ordering problem of a graph over dimensions: one structure for all points, sizes that are expressions, and numbers at each point.

Nodes, edges and permitted reuses are the same at every point: a node may take over memory only where both sizes are the same expression.
That two sizes happen to be equal at one point permits nothing, as one program serves all points.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from lowtide.cost.memory import counted_storages, order_problem, resident_storages
from lowtide.errors import CheckError, ShapeError
from lowtide.ir.graph import Graph, Node, Value
from lowtide.ir.shapes.dimension import Dimensions, checked_point
from lowtide.ir.shapes.evaluate import Compiled, compiled
from lowtide.ir.shapes.points import at
from lowtide.ir.shapes.polynomial import Polynomial
from lowtide.ir.sizes import Size
from lowtide.problems.order import Ints, OrderProblem
from lowtide.problems.order_check import LIMIT_BYTES


@dataclass(frozen=True, eq=False)
class SymbolicProblem:
    """An ordering problem at every point of a range. Its tensors and nodes are those of `structure`."""

    dimensions: Dimensions
    structure: OrderProblem  # of the sizes at some point
    tensor_bytes: tuple[Size, ...]  # [m]
    workspace_bytes: tuple[Size, ...]  # [n]
    resident_bytes: tuple[Size, ...]  # of each storage that the caller holds throughout
    round_to: int = 1  # bytes: what the device's allocator rounds each size up to

    def at(self, point: Mapping[str, int]) -> OrderProblem:
        """The problem at a point. Raises ShapeError for a wrong point, and where sizes are negative or add up to more than 2**62 bytes."""
        sizes = self._sizes_at(*checked_point(self.dimensions, point).values())
        m, n = len(self.tensor_bytes), len(self.workspace_bytes)
        rounded = [-(-each // self.round_to) * self.round_to for each in (*sizes[:m], *sizes[m + n :])]
        return self.of_sizes(rounded[:m], sizes[m : m + n], sum(rounded[m:]), f"at {dict(point)}")

    def of_sizes(self, tensor_bytes: Sequence[int], workspace_bytes: Sequence[int], resident_bytes: int, where: str) -> OrderProblem:
        """The structure with these bytes [m], [n]. Raises ShapeError where they are negative or add up to more than 2**62."""
        if min(*tensor_bytes, *workspace_bytes, resident_bytes, 0) < 0:
            raise ShapeError(f"{where}: expected sizes of 0 bytes or more, got {min(*tensor_bytes, *workspace_bytes, resident_bytes)}")
        if sum(tensor_bytes) + max(workspace_bytes, default=0) + resident_bytes > LIMIT_BYTES:
            raise ShapeError(f"{where}: expected sizes that add up to at most 2**62 bytes, got more: let the ranges end lower")
        tensors, workspaces = np.array(tensor_bytes, np.int64), np.array(workspace_bytes, np.int64)
        for array in (tensors, workspaces):
            array.setflags(write=False)
        return replace(self.structure, tensor_bytes=tensors, workspace_bytes=workspaces, resident_bytes=resident_bytes)

    @cached_property
    def _sizes_at(self) -> Compiled:
        return compiled((*self.tensor_bytes, *self.workspace_bytes, *self.resident_bytes), self.dimensions)


def symbolic_problem(
    graph: Graph, workspace_bytes: Sequence[Size] | None = None, *, round_to: int = 1, there: Graph | None = None
) -> SymbolicProblem:
    """The ordering problem of a graph over dimensions, as `order_problem` makes it of a graph of numbers.

    `there` is the graph at some point, if the caller has it.

    Raises CheckError where `workspace_bytes` has another length than the nodes, ShapeError for sizes that make no sense.
    """
    if workspace_bytes is not None and len(workspace_bytes) != len(graph.nodes):
        raise CheckError(f"expected workspace_bytes of {len(graph.nodes)} nodes, got {len(workspace_bytes)}")
    return SymbolicProblem(
        graph.dimensions,
        same_for_all(there or at(graph, {each.name: each.least for each in graph.dimensions}), graph),
        tuple(storage.nbytes for storage in counted_storages(graph)),
        tuple([0] * len(graph.nodes) if workspace_bytes is None else workspace_bytes),
        tuple(storage.nbytes for storage in resident_storages(graph)),
        round_to,
    )


def same_for_all(there: Graph, graph: Graph) -> OrderProblem:
    """The ordering problem of a graph over dimensions, which is `there` at one point, with nothing that only that point permits."""
    return _permitted(order_problem(there), graph)


def fits_everywhere(node: Node, value: Value) -> bool:
    """Whether what a node makes first is at every point as large as the storage of `value`, which it reads in no other layout."""
    output = node.outputs[0] if node.outputs else None
    if output is None or Polynomial.of(value.storage.nbytes) != Polynomial.of(output.storage.nbytes):
        return False
    return all(_looks(other) == _looks(value) for other in node.inputs if other.storage is value.storage)


def _permitted(problem: OrderProblem, graph: Graph) -> OrderProblem:
    """A problem without the reuses that only the numbers of one point permit."""
    kept = np.zeros(len(problem.take_ids), np.bool_)
    for index, node in enumerate(graph.nodes):
        for entry in range(problem.take_ptr[index], problem.take_ptr[index + 1]):
            kept[entry] = fits_everywhere(node, node.inplace[problem.take_slots[entry]][0])
    rows = np.repeat(np.arange(problem.node_count), np.diff(problem.take_ptr))
    counts = np.bincount(rows[kept], minlength=problem.node_count)
    return replace(
        problem,
        take_ptr=_frozen(np.concatenate([[0], np.cumsum(counts)]).astype(np.int32)),
        take_ids=_frozen(problem.take_ids[kept]),
        take_slots=_frozen(problem.take_slots[kept]),
        take_output=_frozen(np.where(counts > 0, problem.take_output, -1).astype(np.int32)),
    )


def _frozen(array: Ints) -> Ints:
    array.setflags(write=False)
    return array


def _looks(value: Value) -> tuple[object, ...]:
    return value.dtype, tuple(map(Polynomial.of, (*value.shape, *value.stride, value.offset)))
