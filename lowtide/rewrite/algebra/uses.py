"""Who makes and reads what in a graph, as rules ask for it, and new values and names for what they write."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace
from functools import cached_property

from lowtide.ir.graph import Graph, Kind, Node, Storage, Value
from lowtide.ir.operators.nodes import is_view
from lowtide.ir.sizes import ITEM_BYTES, Size, contiguous_stride, product

_FORWARD = (Kind.ACTIVATION,)


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
        found: defaultdict[Storage, list[Node]] = defaultdict(list)
        for node in self.graph.nodes:
            if not is_view(node):
                for storage in dict.fromkeys(value.storage for value in node.inputs):
                    found[storage].append(node)
        return found

    def nodes_of(self, op: str) -> list[Node]:
        """The nodes of an operator, in program order."""
        return [node for node in self.graph.nodes if node.op == op]

    def maker(self, value: object, op: str) -> Node | None:
        """The node that makes a value, if it is of this operator."""
        node = self.makers.get(value) if isinstance(value, Value) else None
        return node if node is not None and node.op == op else None

    def is_forward(self, value: Value) -> bool:
        """Whether a value is made by the forward pass, and may be let go of."""
        return value in self.makers and value.storage.kind is Kind.ACTIVATION and value.storage not in self.kept

    def read_by_backward(self, storage: Storage) -> list[Node]:
        """Those of its readers that are of the backward pass, or later."""
        return [node for node in self.readers[storage] if is_backward(node)]

    def fresh(self, like: Value, name: str, dtype: str, shape: tuple[Size, ...]) -> Value:
        """A new value on a storage of its own, where `like` lies, row by row."""
        while name in self._names:
            name += "_"
        self._names.add(name)
        storage = Storage(name, product(shape) * ITEM_BYTES[dtype], like.storage.device, like.storage.kind)
        return Value(name, storage, dtype, shape, contiguous_stride(shape))


def is_backward(node: Node) -> bool:
    """Whether a node is of the backward pass, or later."""
    return any(value.storage.kind not in _FORWARD for value in node.results)


def layout(value: Value) -> tuple[object, ...]:
    """How a value lies in memory, and where."""
    return value.dtype, value.shape, value.stride, value.storage.device


def is_dense(value: Value) -> bool:
    """Whether a value is all of its memory, each element once, in whatever order."""
    pairs = sorted((step, count) for count, step in zip(value.shape, value.stride, strict=True) if count != 1) if is_fixed(value) else []
    steps = [step for step, _ in pairs]
    expected = [product(count for _, count in pairs[:place]) for place in range(len(pairs))]
    return is_fixed(value) and steps == expected


def is_row_by_row(value: Value) -> bool:
    """Whether a value lies in memory row by row."""
    return is_fixed(value) and value.stride == contiguous_stride(value.shape)


def is_fixed(value: Value) -> bool:
    """Whether its sizes are numbers, and there is something."""
    return all(isinstance(size, int) and size > 0 for size in (*value.shape, *value.stride))


def count_of(value: Value) -> int:
    """Elements of a value whose sizes are numbers."""
    count = product(value.shape)
    assert isinstance(count, int)
    return count


def taking(node: Node, op: str, args: tuple[object, ...], into: dict[Value, str]) -> Node:
    """A node with another operator and arguments that makes what this one did; `into` are the values whose memory it may take."""
    taken = {value for value, _ in node.inplace}
    return replace(node, op=op, args=args, kwargs=(), inplace=tuple((value, to) for value, to in into.items() if value in taken))
