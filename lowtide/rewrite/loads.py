"""Loads of what ranks hold parts of: begun apart from where they end, and taken once for several passes.

A search sees a load as one node, which it may repeat. Begun apart, the link works beside what lies between.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Hashable, Iterator, Mapping
from dataclasses import replace

from lowtide.ir.graph import Arg, Graph, Node, Storage, Value, arguments, free_name
from lowtide.ir.operators.nodes import loads_parts
from lowtide.ir.operators.own import GATHER, WAIT_APART
from lowtide.rewrite.base import Rewritten, replace_nodes

_CAT = "aten.cat.default"


def begun_apart(graph: Graph) -> Rewritten:
    """Each load as its begin and, right behind that, its end."""
    loads = [node for node in graph.nodes if loads_parts(node)]
    taken = {value.name for node in graph.nodes for value in node.results} if loads else set()
    return replace_nodes(graph, {node: _apart(node, taken) for node in loads})


def taken_once(graph: Graph, names: Container[str]) -> Rewritten:
    """Loads with results of these names are left out: what the last load of the same before them has made stands for it."""
    instead = _Instead()
    for load, earlier in _earlier(graph, names).items():
        instead.put(load.results[0], earlier.results[0])
    gone = {*_gone(graph, instead)}
    return replace_nodes(graph, {node: () if node in gone else (instead.reading(node),) for node in graph.nodes})


def _earlier(graph: Graph, names: Container[str]) -> dict[Node, Node]:
    """By load that is to be left out: the one whose result stands for its own."""
    earlier, last = dict[Node, Node](), dict[Hashable, Node]()
    for node, what in alike(graph).items():
        if node.results[0].name in names and what in last:
            earlier[node] = last[what]
        else:
            last[what] = node
    return earlier


def _gone(graph: Graph, instead: _Instead) -> Iterator[Node]:
    """Loads for whose results others stand, and what was put together for them alone."""
    read = Counter(value for node in graph.nodes for value in node.inputs) + Counter(graph.outputs)
    makers = {value: node for node in graph.nodes for value in node.outputs if value is not None}
    for load in [node for node in graph.nodes if loads_parts(node) and instead.has(node.results[0])]:
        yield load
        sent = load.inputs[0]
        read[sent] -= 1
        if sent in makers and makers[sent].op == _CAT and not read[sent]:
            yield makers[sent]


def alike(graph: Graph) -> dict[Node, Hashable]:
    """By load: what it loads, the same for those that are given the same parts, as they lie or put together."""
    makers = {value: node for node in graph.nodes for value in node.outputs if value is not None}
    return {node: (_made_of(node.args[0], makers), node.args[1:]) for node in graph.nodes if loads_parts(node)}


def _made_of(arg: Arg, makers: Mapping[Value, Node]) -> Hashable:
    """A value, by what was put together to make it."""
    maker = makers.get(arg) if isinstance(arg, Value) else None
    return (maker.op, maker.args, maker.kwargs) if maker is not None and maker.op == _CAT else arg


def _apart(node: Node, taken: set[str]) -> tuple[Node, Node]:
    whole, name = node.results[0], free_name(f"{node.results[0].name}_begun", taken)
    begun = replace(whole, name=name, storage=Storage(name, whole.storage.nbytes, whole.storage.device, whole.storage.kind))
    begin = replace(node, op=GATHER, outputs=(begun,))
    return begin, replace(node, op=WAIT_APART, args=(begun, node.args[0]), after=(), inplace=((begun, WAIT_APART),))


class _Instead:
    """What stands for values that nobody makes any more, and for views of them."""

    def __init__(self) -> None:
        self._values: dict[Value, Value] = {}
        self._storages: dict[Storage, Storage] = {}

    def put(self, old: Value, new: Value) -> None:
        self._values[old], self._storages[old.storage] = new, new.storage

    def has(self, value: Value) -> bool:
        return value in self._values

    def reading(self, node: Node) -> Node:
        if not any(value.storage in self._storages for value in node.inputs):
            return node
        return replace(
            node,
            **arguments(node, self._value),
            outputs=tuple(None if value is None else self._value(value) for value in node.outputs),
            inplace=tuple((self._value(value), op) for value, op in node.inplace),
        )

    def _value(self, value: Value) -> Value:
        if value not in self._values and value.storage in self._storages:
            self._values[value] = replace(value, storage=self._storages[value.storage])
        return self._values.get(value, value)
