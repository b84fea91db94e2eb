"""Orders of a graph over dimensions: the ordering problem, one structure for all points, and what a fixed order takes at any of them.

Nodes, edges and permitted reuses are the same at every point: a node may take over memory only where both sizes are the same expression.
That two sizes happen to be equal at one point permits nothing, as one program serves all points.

What a fixed order takes at any point of a range: the largest of few sums, exact, in microseconds.

    takes   an ordering problem over dimensions, an order of its nodes, and by node the column in which its measured workspace stands
    leaves  a small matrix: its product with what is known of a point are the bytes at each step that may be the highest

With the order fixed, so is what works in place, and with both what lives at each step: a sum of sizes, and a workspace. Sizes that are
sums of products of dimensions are added up as such; others, and those that an allocator rounds, count as they are. No such term is ever
negative, so a step that has at most as much of each term as another one is nowhere above it, and drops out.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import numpy as np

from lowtide.cost.memory import counted_storages, lifetimes, order_problem, resident_storages
from lowtide.errors import CheckError, ShapeError
from lowtide.ir.graph import Graph, Node, Value
from lowtide.ir.shapes.dimension import Dimensions, checked_point
from lowtide.ir.shapes.points import CompiledSizes, at, compiled
from lowtide.ir.shapes.polynomial import Monomial, Polynomial
from lowtide.ir.sizes import Size
from lowtide.problems.order import LIMIT_BYTES, Bytes, OrderProblem, frozen, offsets


@dataclass(frozen=True, eq=False)
class SymbolicProblem:
    """An ordering problem at every point of a range, without workspaces. Its tensors and nodes are those of `structure`."""

    dimensions: Dimensions
    structure: OrderProblem  # of the sizes at some point
    tensor_bytes: tuple[Size, ...]  # [m]
    resident_bytes: tuple[Size, ...]  # of each storage that the caller holds throughout
    round_to: int = 1  # bytes: what the device's allocator rounds each size up to

    def at(self, point: Mapping[str, int]) -> OrderProblem:
        """The problem at a point. Raises ShapeError for a wrong point, and where sizes are negative or add up to more than 2**62 bytes."""
        sizes = self._sizes_at(*checked_point(self.dimensions, point).values())
        rounded = [-(-each // self.round_to) * self.round_to for each in sizes]
        if min(rounded, default=0) < 0:
            raise ShapeError(f"at {dict(point)}: expected sizes of 0 bytes or more, got {min(rounded)}")
        if sum(rounded) > LIMIT_BYTES:
            raise ShapeError(f"at {dict(point)}: expected sizes that add up to at most 2**62 bytes, got more: let the ranges end lower")
        count = len(self.tensor_bytes)
        tensor_bytes, no_bytes = np.array(rounded[:count], np.int64), np.zeros(self.structure.node_count, np.int64)
        for array in (tensor_bytes, no_bytes):
            array.setflags(write=False)
        return replace(self.structure, tensor_bytes=tensor_bytes, workspace_bytes=no_bytes, resident_bytes=sum(rounded[count:]))

    @cached_property
    def _sizes_at(self) -> CompiledSizes:
        return compiled((*self.tensor_bytes, *self.resident_bytes), self.dimensions)


def symbolic_problem(graph: Graph, *, round_to: int = 1, there: Graph | None = None) -> SymbolicProblem:
    """The ordering problem of a graph over dimensions, as `order_problem` makes it of a graph of numbers.

    `there` is the graph at some point, if the caller has it. Raises ShapeError for sizes that make no sense.
    """
    return SymbolicProblem(
        graph.dimensions,
        same_for_all(there or at(graph, {each.name: each.least for each in graph.dimensions}), graph),
        tuple(storage.nbytes for storage in counted_storages(graph)),
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
        take_ptr=frozen(offsets(counts)),
        take_ids=frozen(problem.take_ids[kept]),
        take_slots=frozen(problem.take_slots[kept]),
        take_output=frozen(np.where(counts > 0, problem.take_output, -1).astype(np.int32)),
    )


def _looks(value: Value) -> tuple[object, ...]:
    return value.dtype, tuple(map(Polynomial.of, (*value.shape, *value.stride, value.offset)))


_Term: TypeAlias = "Monomial | Polynomial"  # a product of dimensions, or a whole size


@dataclass(frozen=True, eq=False)
class Footprints:
    """What an order takes at its highest, at any point of a range."""

    dimensions: Dimensions
    sizes: tuple[Size, ...]  # [terms] products of dimensions, and sizes that are to be rounded or are no sums of such
    granules: Bytes  # [terms] up to which each is rounded
    matrix: Bytes  # [rows, terms and columns of workspaces] no row has at most as much of everything as another one

    @classmethod
    def of(cls, problem: SymbolicProblem, order: Sequence[int], columns: Sequence[int] = ()) -> Footprints:
        """Of an order of node indices; `columns` [n] is by node, -1 for what needs no workspace.

        Raises CheckError unless it is a topological order, and for another number of columns than nodes.
        """
        if len(columns) not in (0, len(order)):
            raise CheckError(f"expected columns of {len(order)} nodes, got {len(columns)}")
        terms = Terms(problem)
        return cls.of_steps(terms, _live(problem, order, terms), [columns[node] for node in order] if len(columns) else ())

    @classmethod
    def of_steps(cls, terms: Terms, live: Bytes, columns: Sequence[int] = ()) -> Footprints:
        """Of what lives at each step [steps, terms]; `columns` [steps] of the workspaces."""
        return cls(terms.dimensions, terms.sizes, terms.granules, _undominated(np.hstack([live, _chosen(columns, len(live))])))

    def at(self, point: Mapping[str, int], workspace_bytes: Sequence[int] | Bytes = ()) -> int:
        """Bytes at a point, with what is resident, where the columns of workspaces are as said. Raises ShapeError for a wrong point."""
        return int(self.rows_at(point, workspace_bytes).max(initial=0))

    def rows_at(self, point: Mapping[str, int], workspace_bytes: Sequence[int] | Bytes = ()) -> Bytes:
        sizes = self._sizes_at(*checked_point(self.dimensions, point).values())
        if max(sizes, default=0) > LIMIT_BYTES:
            raise ShapeError(f"at {dict(point)}: expected sizes that add up to at most 2**62 bytes, got more: let the ranges end lower")
        rounded = -(-np.array(sizes, np.int64) // self.granules) * self.granules
        vector = np.concatenate([rounded, np.asarray(workspace_bytes, np.int64)[: self.matrix.shape[1] - len(rounded)]])
        if self._most_parts * int(vector.max(initial=0)) > LIMIT_BYTES and self._adds_up_beyond(vector):
            raise ShapeError(f"at {dict(point)}: expected sizes that add up to at most 2**62 bytes, got more: let the ranges end lower")
        rows: Bytes = self.matrix @ vector
        return rows

    def _adds_up_beyond(self, vector: Bytes) -> bool:
        """Whether a row adds up to more than can be counted, by floats: their product may wait for other threads."""
        return bool((self.matrix.astype(np.float64) @ vector).max(initial=0.0) > LIMIT_BYTES)

    @cached_property
    def _most_parts(self) -> int:
        return int(self.matrix.sum(axis=1).max(initial=0))

    @cached_property
    def _sizes_at(self) -> CompiledSizes:
        return compiled(self.sizes, self.dimensions)


class Several:
    """Several orders over the same dimensions as one matrix: what each takes at a point, in one product.

    Orders of one group have one vector of measured workspaces.
    """

    def __init__(self, footprints: Sequence[Footprints], groups: Sequence[int]) -> None:
        keys = {key: None for each in footprints for key in zip(each.sizes, each.granules.tolist(), strict=True)}
        position = {key: column for column, key in enumerate(keys)}
        self._widths = [0] * (max(groups) + 1)
        for each, group in zip(footprints, groups, strict=True):
            self._widths[group] = max(self._widths[group], each.matrix.shape[1] - len(each.sizes))
        blocks = []
        for each, group in zip(footprints, groups, strict=True):
            block = np.zeros((len(each.matrix), len(keys) + sum(self._widths)), np.int64)
            own = [position[key] for key in zip(each.sizes, each.granules.tolist(), strict=True)]
            begin = len(keys) + sum(self._widths[:group])
            block[:, [*own, *range(begin, begin + each.matrix.shape[1] - len(own))]] = each.matrix
            blocks.append(block)
        self._whole = Footprints(
            footprints[0].dimensions, tuple(size for size, _ in keys), np.array([each for _, each in keys], np.int64), np.vstack(blocks)
        )
        self._starts = np.cumsum([0, *map(len, blocks[:-1])])

    def at(self, point: Mapping[str, int], workspace_bytes: Sequence[Bytes]) -> Bytes:
        """[orders] bytes at a point, given the columns of each group. Raises ShapeError as `Footprints.at` does."""
        columns = [each[:width] for each, width in zip(workspace_bytes, self._widths, strict=True)]
        peaks: Bytes = np.maximum.reduceat(self._whole.rows_at(point, np.concatenate(columns)), self._starts)
        return peaks


class Terms:
    """The terms that sizes are sums of, numbered as they come, and how much of each there is."""

    def __init__(self, problem: SymbolicProblem) -> None:
        self.dimensions = problem.dimensions
        self._names = {each.name for each in problem.dimensions}
        self._number: dict[tuple[_Term, int], int] = {}
        # All are numbered before any row is made, so that rows are of one length.
        self._known = {
            size: self._of(Polynomial.of(size), problem.round_to)
            for size in dict.fromkeys((*problem.tensor_bytes, *problem.resident_bytes))
        }
        self.tensors = self._rows(problem.tensor_bytes)  # [m, terms]
        self.resident: Bytes = self._rows(problem.resident_bytes).sum(axis=0)  # [terms]

    @cached_property
    def sizes(self) -> tuple[Size, ...]:
        """[terms] to be evaluated at a point."""
        return tuple(term.size if isinstance(term, Polynomial) else Polynomial(((term, 1),)).size for term, _ in self._number)

    @cached_property
    def granules(self) -> Bytes:
        """[terms] to which these are rounded up."""
        return np.array([granule for _, granule in self._number], np.int64)

    def _rows(self, sizes: Sequence[Size]) -> Bytes:
        """[sizes, terms] how much of each term they have."""
        rows = np.zeros((len(sizes), len(self._number)), np.int64)
        for row, size in zip(rows, sizes, strict=True):
            for term, count in self._known[size]:
                row[term] = count
        return rows

    def _of(self, size: Polynomial, granule: int) -> list[tuple[int, int]]:
        if any(each % granule for monomial, each in size.terms if monomial) or not self._is_plain(size):
            return [(self._numbered(size, granule), 1)]
        counts = [(monomial, int(each if monomial else -(-each // granule) * granule)) for monomial, each in size.terms]
        return [(self._numbered(monomial, 1), count) for monomial, count in counts]

    def _is_plain(self, size: Polynomial) -> bool:
        """Whether it is a sum of whole multiples of products of dimensions, which are never negative."""
        return all(
            each.denominator == 1 and all(power > 0 and name in self._names for name, power in monomial) for monomial, each in size.terms
        )

    def _numbered(self, term: _Term, granule: int) -> int:
        return self._number.setdefault((term, granule), len(self._number))


def _live(problem: SymbolicProblem, order: Sequence[int], terms: Terms) -> Bytes:
    """[steps, terms] of all that lives, with what is resident; one row for what is there from the start where there are no steps."""
    tensors = terms.tensors
    start, end = lifetimes(problem.structure, order)
    if not len(order):
        given: Bytes = tensors[problem.structure.uses > 0].sum(axis=0)
        return (terms.resident + given)[np.newaxis]
    change = np.zeros((len(order) + 1, tensors.shape[1]), np.int64)
    np.add.at(change, start, tensors)
    np.subtract.at(change, end, tensors)
    live_bytes: Bytes = np.cumsum(change[:-1], axis=0) + terms.resident
    return live_bytes


def _chosen(columns: Sequence[int], rows: int) -> Bytes:
    """[rows, columns] a one where a row has a column."""
    count = max(columns, default=-1) + 1
    rows_of_terms = np.zeros((rows, count), np.int64)
    for row, column in zip(rows_of_terms, columns, strict=False):
        if column >= 0:
            row[column] = 1
    return rows_of_terms


def _undominated(rows: Bytes) -> Bytes:
    """The rows without those of which another one has at least as much of everything; the largest first."""
    distinct: Bytes = np.unique(rows, axis=0)
    kept = np.empty((0, rows.shape[1]), np.int64)
    for row in distinct[np.argsort(-distinct.sum(axis=1), kind="stable")]:
        if not (kept >= row).all(axis=1).any():
            kept = np.vstack([kept, row])
    kept.setflags(write=False)
    return kept
