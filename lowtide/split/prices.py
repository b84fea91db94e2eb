"""What nodes take, and what loops would: whole nodes as they are known, those in bodies by a machine's rates.

Before a split graph is chosen, none of its parts is measured. A node that is run in parts takes what rates say of a part, as many times as
there are parts, corrected by how right those rates are about the whole node; so small parts cost more than their share, as far as rates
know. A body is priced once for each size of a part, whatever graphs it is in.

A loop's body at parts of any size: what its nodes are there, and its peak, without the whole graph being written for each size.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from typing import TypeAlias

import numpy as np

from lowtide.cost.bodies import inner_peak_bytes, workspaces_within
from lowtide.cost.device import Device
from lowtide.cost.memory import counted_storages, order_problem, simulate
from lowtide.ir.bodies import Loop, is_loop
from lowtide.ir.graph import Arg, Graph, Node, Value
from lowtide.ir.shapes.evaluate import sizes_at
from lowtide.ir.shapes.points import Rewriter, sizes_of
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


_WHOLE = "_whole_v1"  # what a loop's body calls its place in a result


class Prices:
    """Microseconds and workspaces of a graph's nodes, and of loops made of them."""

    def __init__(self, graph: Graph, node_us: Sequence[float], workspace_bytes: Sequence[int], rates: Device) -> None:
        self._rates = rates
        self._us = {_name(node): us for node, us in zip(graph.nodes, node_us, strict=True)}
        self._workspaces = {_name(node): nbytes for node, nbytes in zip(graph.nodes, workspace_bytes, strict=True)}
        self._times = {_name(node): us / rated for node, us in zip(graph.nodes, node_us, strict=True) if (rated := rates.node_us(node))}
        self._bodies: dict[tuple[int, int], tuple[float, float]] = {}
        self._sized: dict[int, tuple[tuple[Node, ...], SizedBody | None]] = {}  # by the identity of a body's nodes; None where it has loops
        self._rated: dict[tuple[Look, int], float] = {}  # what nodes take by rates, by their looks and the size of a part
        self._wholes: dict[int, tuple[Sequence[Node], float]] = {}  # by identity

    def us(self, graph: Graph) -> list[float]:
        return [self._loop(node)[0] if is_loop(node) else self._of(node) for node in graph.nodes]

    def workspace_bytes(self, graph: Graph) -> list[int]:
        """By node, beside its arguments and results; of a loop what its largest part makes, without operators' own workspaces."""
        return [self._loop(node)[1] if is_loop(node) else self._workspaces.get(_name(node), 0) for node in graph.nodes]

    def extra_us(self, nodes: Sequence[Node], loop: Node) -> float:
        """What a loop takes longer than its nodes by themselves."""
        key = id(nodes)
        if key not in self._wholes:
            self._wholes[key] = nodes, sum(map(self._of, nodes))
        return self._loop(loop)[0] - self._wholes[key][1]

    def _of(self, node: Node) -> float:
        known = self._us.get(_name(node))
        return self._rates.node_us(node) if known is None else known

    def _loop(self, node: Node) -> tuple[float, int]:
        loop = Loop.of(node)
        parts = [(self._body(loop, size), count) for size, count in loop.sizes]
        return sum(us * count for (us, _), count in parts), int(max(nbytes for (_, nbytes), _ in parts))

    def _body(self, loop: Loop, size: int) -> tuple[float, float]:
        nodes = loop.body.nodes
        if id(nodes) not in self._sized:
            self._sized[id(nodes)] = nodes, None if any(map(is_loop, nodes)) else SizedBody(loop)
        if (id(nodes), size) not in self._bodies:
            sized = self._sized[id(nodes)][1]
            self._bodies[id(nodes), size] = self._nested(loop, size) if sized is None else self._plain(nodes, sized, size)
        return self._bodies[id(nodes), size]

    def _plain(self, nodes: Sequence[Node], body: SizedBody, size: int) -> tuple[float, float]:
        us = 0.0
        for place, (node, spec) in enumerate(zip(nodes, body.looks, strict=True)):
            if (rated := self._rated.get((spec, size))) is None:
                rated = self._rated[spec, size] = self._rates.node_us(body.node(place, size))
            us += rated * self._time(node)
        return us, float(body.peak_bytes(size))

    def _nested(self, loop: Loop, size: int) -> tuple[float, float]:
        body = loop.at_any(size)
        us = sum(self._loop(node)[0] if is_loop(node) else self._rates.node_us(node) * self._time(node) for node in body.nodes)
        return us, float(inner_peak_bytes(body, workspaces_within(body.nodes)))

    def _time(self, node: Node) -> float:
        """How many times longer than rates say."""
        return self._times.get(_name(node).removesuffix(_WHOLE), 1.0)


def _name(node: Node) -> str:
    """Of what it makes first: nodes are written anew where what they come after is."""
    return node.results[0].name if node.results else node.op
