"""What rewrites share: what each returns, and who makes and reads what in a graph, as rules ask for it.

New nodes come in the places of old ones; rules write new values and names. What a rule is, and where it fits.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TypeAlias

import sympy

from lowtide.ir.graph import Graph, Kind, Node, Storage, Value, free_name
from lowtide.ir.operators.nodes import is_view
from lowtide.ir.result_specs import is_gapless
from lowtide.ir.shapes.points import size_at
from lowtide.ir.shapes.polynomial import normal
from lowtide.ir.sizes import ITEM_BYTES, Size, contiguous_stride, product

Forward = Mapping[Node, tuple[Node, ...]]  # what became of each node of the old graph that is not in the new one as it was


@dataclass(frozen=True)
class Rewritten:
    """The new graph, which shares all that the rewrite did not touch, and what became of the rest."""

    graph: Graph
    forward: Forward


def replace_nodes(graph: Graph, instead: Forward) -> Rewritten:
    """Put new nodes in the places of old ones, which make the same values, so that readers stay as they are; control edges follow."""
    forward: dict[Node, tuple[Node, ...]] = {}
    nodes: list[Node] = []
    for node in graph.nodes:
        new = tuple(following(candidate, forward) for candidate in instead.get(node, (node,)))
        if new != (node,):
            forward[node] = new
        nodes.extend(new)
    return Rewritten(replace(graph, nodes=tuple(nodes)), forward)


def following(node: Node, forward: Forward) -> Node:
    """The node with its control edges at what their ends became."""
    if not any(before in forward for before in node.after):
        return node
    after = tuple(new for before in node.after for new in forward.get(before, (before,)))
    return replace(node, after=after)


class Uses:
    """A graph, seen from its values."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.makers: dict[Value, Node] = {value: node for node in graph.nodes for value in node.outputs if value is not None}
        self.kept = {value.storage for value in (*graph.outputs, *graph.inputs)}
        self._names = {value.name for value in (*graph.inputs, *self.makers)} | {value.storage.name for value in self.makers}

    @cached_property
    def readers(self) -> dict[Storage, list[Node]]:
        """The nodes that do more than look at a storage, in program order."""
        return self._by_storage(node for node in self.graph.nodes if not is_view(node))

    @cached_property
    def views(self) -> dict[Storage, list[Node]]:
        """The nodes that only look at a storage, in program order."""
        return self._by_storage(node for node in self.graph.nodes if is_view(node))

    def _by_storage(self, nodes: Iterable[Node]) -> dict[Storage, list[Node]]:
        storages: defaultdict[Storage, list[Node]] = defaultdict(list)
        for node in nodes:
            for storage in dict.fromkeys(value.storage for value in node.inputs):
                storages[storage].append(node)
        return storages

    @cached_property
    def users(self) -> dict[Value, list[Node]]:
        """The nodes that read a value, views included, in program order."""
        users: defaultdict[Value, list[Node]] = defaultdict(list)
        for node in self.graph.nodes:
            for value in node.inputs:
                users[value].append(node)
        return users

    @cached_property
    def makers_of(self) -> dict[Storage, Node]:
        makers: dict[Storage, Node] = {}
        for value, node in self.makers.items():
            makers.setdefault(value.storage, node)
        return makers

    @cached_property
    def place(self) -> dict[Node, int]:
        return {node: place for place, node in enumerate(self.graph.nodes)}

    def written_between(self, node: Node, later: Node) -> bool:
        """Whether what a node reads is another version where a later one stands."""
        read = {value.storage for value in node.inputs if value.storage.kind.caller_owned}
        return any(self.place[node] < place < self.place[later] for storage in read for place in self._writes.get(storage, ()))

    @cached_property
    def _writes(self) -> dict[Storage, list[int]]:
        writes: defaultdict[Storage, list[int]] = defaultdict(list)
        for place, node in enumerate(self.graph.nodes):
            for before, _ in node.writes:
                writes[before.storage].append(place)
        return writes

    def nodes_of(self, op: str) -> list[Node]:
        return [node for node in self.graph.nodes if node.op == op]

    def maker(self, value: object, op: str) -> Node | None:
        node = self.makers.get(value) if isinstance(value, Value) else None
        return node if node is not None and node.op == op else None

    def is_forward(self, value: Value) -> bool:
        """Whether a value is made by the forward pass, and may be let go of."""
        return value in self.makers and value.storage.kind is Kind.ACTIVATION and value.storage not in self.kept

    def read_by_backward(self, storage: Storage) -> list[Node]:
        """Those of its readers that are of the backward pass, or later."""
        return [node for node in self.readers[storage] if is_backward(node)]

    def name(self, wanted: str) -> str:
        return free_name(wanted, self._names)

    def fresh_like(self, value: Value, name: str, dtype: str) -> Value:
        """A new value of another type, on a storage of its own, that lies as `value` does."""
        return replace(self.fresh(value, name, dtype, value.shape), stride=value.stride)

    def fresh(self, like: Value, name: str, dtype: str, shape: tuple[Size, ...]) -> Value:
        """A new value on a storage of its own, where `like` lies, row by row."""
        name = self.name(name)
        storage = Storage(name, normal(product(shape) * ITEM_BYTES[dtype]), like.storage.device, like.storage.kind)
        return Value(name, storage, dtype, shape, _row_by_row(shape))

    def at_most(self, size: Size) -> int:
        """A size where all dimensions are as large as they can be."""
        return size_at(size, self.graph.dimensions, {each.name: each.most for each in self.graph.dimensions})


def is_backward(node: Node) -> bool:
    return any(value.storage.kind is not Kind.ACTIVATION for value in node.results)


def layout(value: Value) -> tuple[object, ...]:
    return value.dtype, value.shape, value.stride, value.storage.device


def is_dense(value: Value) -> bool:
    """Whether a value is all of its memory, each element once, in whatever order."""
    return _is_there(value) and is_gapless(value.shape, value.stride)


def is_row_by_row(value: Value) -> bool:
    return _is_there(value) and value.stride == _row_by_row(value.shape)


def _row_by_row(shape: tuple[Size, ...]) -> tuple[Size, ...]:
    return tuple(map(normal, contiguous_stride(shape)))


def _is_there(value: Value) -> bool:
    """Whether there is something, as far as sizes are numbers."""
    return all(not isinstance(size, int) or size > 0 for size in (*value.shape, *value.stride))


def count_of(value: Value) -> Size:
    return normal(product(value.shape))


def bytes_of_bits(value: Value) -> Size:
    count = count_of(value)
    return -(-count // 8) if isinstance(count, int) else normal(sympy.ceiling(count / 8))


def taking(node: Node, op: str, args: tuple[object, ...], into: dict[Value, str]) -> Node:
    """A node with another operator and arguments that makes what this one did; `into` are the values whose memory it may take."""
    taken = {value for value, _ in node.inplace}
    return replace(node, op=op, args=args, kwargs=(), inplace=tuple((value, to) for value, to in into.items() if value in taken))


@dataclass(frozen=True, eq=False)
class Match:
    """Where a rule fits: what becomes of some nodes, and what is held between their uses before and after."""

    instead: Mapping[Node, tuple[Node, ...]]  # nodes that stay are among what becomes of them
    storage: Storage  # what was held for nodes that are replaced
    now: Storage | None = None  # what is held in its place; None where something is that was held anyway
    beside: tuple[Storage, ...] = ()  # what was held for these nodes alone, too

    @property
    def removed(self) -> list[Node]:
        return [node for node, new in self.instead.items() if node not in new]

    @property
    def added(self) -> list[Node]:
        return [node for new in self.instead.values() for node in new if node not in self.instead]


Finder: TypeAlias = Callable[[Uses], Iterable[Match]]


@dataclass(frozen=True)
class Rule:
    name: str  # as plans tell it: "dropout's masks as bits"
    matches: Finder
    exact: bool = True  # the numbers are the same, to the last bit
