"""A loop's body at parts of any size: what its nodes are there, and its peak, without the whole graph being written for each size."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias

import numpy as np

from lowtide.cost.memory import counted_storages, order_problem, simulate
from lowtide.ir.graph import Arg, Graph, Node, Value
from lowtide.ir.loops import Loop
from lowtide.ir.shapes.at import Rewriter, sizes_of
from lowtide.ir.shapes.evaluate import sizes_at
from lowtide.ir.sizes import Size
from lowtide.problems.order import OrderProblem

Look: TypeAlias = tuple[Hashable, ...]


class SizedBody:
    """A body without loops of its own. The nodes of two sizes come before one another alike, and tensors live alike."""

    def __init__(self, loop: Loop) -> None:
        assert isinstance(loop.extent, int)
        self._dimension = replace(loop.body.dimensions[0], most=loop.extent)
        self._body = replace(loop.body, dimensions=(self._dimension,))
        self._symbolic = tuple(dict.fromkeys(size for size in sizes_of(self._body) if not isinstance(size, int)))
        self._written: dict[int, tuple[dict[Size, Size], Rewriter]] = {}

    @cached_property
    def looks(self) -> tuple[Look, ...]:
        """By node all that its time depends on, but the size of a part: two that look alike take the same."""
        seen: dict[Value, Look] = {}
        return tuple(tuple(_look(node, seen)) for node in self._body.nodes)

    def node(self, place: int, size: int) -> Node:
        return self._at(size)[1].node(self._body.nodes[place])

    def peak_bytes(self, size: int) -> int:
        """The most that a part takes beside what it is given and where its results go."""
        sizes, _ = self._at(size)
        exact = np.array([each if isinstance(each, int) else sizes[each] for each in self._nbytes], np.int64)
        problem = replace(self._problem, tensor_bytes=exact)
        return simulate(problem, range(problem.node_count)).peak_bytes - problem.resident_bytes

    @cached_property
    def _nbytes(self) -> tuple[Size, ...]:
        return tuple(storage.nbytes for storage in counted_storages(self._body))

    @cached_property
    def _problem(self) -> OrderProblem:
        graph: Graph = self._at(self._dimension.most)[1].graph(self._body)
        return order_problem(graph)

    def _at(self, size: int) -> tuple[dict[Size, Size], Rewriter]:
        """The numbers that sizes are in such a part, and what writes nodes with them."""
        if size not in self._written:
            numbers = sizes_at(self._symbolic, self._body.dimensions, {self._dimension.name: size})
            sizes: dict[Size, Size] = dict(zip(self._symbolic, numbers, strict=True))
            self._written[size] = sizes, Rewriter(sizes)
        return self._written[size]


def _look(node: Node, seen: dict[Value, Look]) -> Iterator[Hashable]:
    yield node.op
    for arg in (*node.args, *node.kwargs):
        yield _look_of(arg, seen)
    for value in node.outputs:
        yield None if value is None else _look_of(value, seen)


def _look_of(arg: Arg, seen: dict[Value, Look]) -> Hashable:
    """An argument without its name; a number with its type, as 1 and 1.0 and True are equal."""
    if isinstance(arg, Value):
        if arg not in seen:
            seen[arg] = arg.dtype, arg.shape, arg.stride
        return seen[arg]
    if isinstance(arg, tuple):
        return tuple(_look_of(each, seen) for each in arg)
    return type(arg), arg
