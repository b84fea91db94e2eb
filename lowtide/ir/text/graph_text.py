"""A graph as text that reads like Python, and back: `to_text(parse(to_text(graph))) == to_text(graph)`.

    def graph(
        w,  # float32[3] 12 B parameter cpu
        x,  # float32[1, 3] 12 B input cpu
    ):
        mul = aten.mul.Tensor(x, w)  # float32[1, 3] 12 B activation cpu; at "net.py":7 in "head"
        row = aten.select.int(mul, 0, 0)  # float32[3] on mul
        aten.add_.Tensor(w, row, alpha=-0.1)  # writes w -> w_v1
        relu = aten.relu.default(mul)  # float32[1, 3] 12 B activation cpu; takes mul by aten.relu_.default
        return (relu,)

Whatever Python has no words for stands in a node's comment, in clauses that "; " sets apart:

    n17                                    how `after` calls this node
    float32[1, 3] 12 B activation cpu      what a result is, as `value_text` says: one clause each in their order, none for `_`
    writes w -> w_v1                       w_v1 is w as this node leaves it (followed by ": " and what it is, where that is anything else)
    after n3, n12                          control edges
    takes mul by aten.relu_.default        a permission to work in place
    at "net.py":7 in "head"                the line and the module that the node comes from

A graph over dimensions has them, each with its range, behind its first line: `def graph(  # batch in 1..64, length in 16..2048`.

A node's body follows it as a nested `def body(...)`, with names of its own. `argument_text` says how arguments are written. Equal texts
mean equal graphs. `parse` executes nothing, and sees to it that a text reads, no more: `check` looks whether the graph makes sense.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import TypeAlias, Union

from lowtide.errors import FormatError
from lowtide.ir.graph import Graph, Node, Source, Storage, Value
from lowtide.ir.text.arguments import NAME, RESERVED, argument_text
from lowtide.ir.text.reader import parse
from lowtide.ir.text.values import checked_name, layout_text, storage_text

__all__ = ["parse", "to_text"]

_INDENT = "    "
_KEYWORD = re.compile(NAME)
_OPERATOR = re.compile(rf"{NAME}(?:\.{NAME})+")
_Lines: TypeAlias = Iterator[Union[str, "_Lines"]]


def to_text(graph: Graph, *, sources: bool = True) -> str:
    """A graph as text, one line an input and a node; without `sources`, no word of where in the user's program nodes come from.

    Raises FormatError naming the node, for what text cannot hold: names that are no identifiers or not unique, values and control edges
    that point to nodes further down or outside of the graph, arguments of unknown types.
    """
    lines: list[str] = []
    pending = [_definition("graph", graph, "", sources)]
    while pending:  # a stack for nested bodies: a graph may nest deeper than Python recurses
        item = next(pending[-1], None)
        if item is None:
            pending.pop()
        elif isinstance(item, str):
            lines.append(item)
        else:
            pending.append(item)
    return "\n".join([*lines, ""])


def _definition(name: str, graph: Graph, indent: str, sources: bool) -> _Lines:
    """The lines of a graph, and in their places the lines of its bodies."""
    scope = _WrittenScope(graph, sources)
    dimensions = f"  # {', '.join(map(str, graph.dimensions))}" if graph.dimensions else ""
    if graph.inputs:
        yield f"{indent}def {name}({dimensions}"
        for value in graph.inputs:
            yield f"{indent}{_INDENT}{value.name},  # {scope.make(value)}"
        yield f"{indent}):"
    else:
        yield f"{indent}def {name}():{dimensions}"
    for index, node in enumerate(graph.nodes):
        yield f"{indent}{_INDENT}{_located(scope, index, node)}"
        if node.body is not None:
            yield _definition("body", node.body, indent + 2 * _INDENT, sources)
    yield f"{indent}{_INDENT}return {argument_text(graph.outputs, scope.values)}"


def _located(scope: _WrittenScope, index: int, node: Node) -> str:
    try:
        return scope.line(index, node)
    except FormatError as error:
        raise FormatError(f"node {index} ({node.op}): {error}") from error


class _WrittenScope:
    """What has been written of one graph."""

    def __init__(self, graph: Graph, sources: bool) -> None:
        self._sources = sources
        self.values: set[Value] = set()
        self._names: set[str] = set()
        self._storages: dict[str, Storage] = {}
        self._written: set[Storage] = set()
        self._labelled = {other for node in graph.nodes for other in node.after}
        self._labels: dict[Node, str] = {}

    def line(self, index: int, node: Node) -> str:
        call = self._call(node)
        clauses = [*self._label(index, node), *self._results(node), *self._after(node), *self._inplace(node), *self._source(node.source)]
        targets = ", ".join("_" if value is None else value.name for value in node.outputs)
        code = f"{targets} = {call}" if targets else call
        return f"{code}  # {'; '.join(clauses)}" if clauses else code

    def make(self, value: Value) -> str:
        """What a new value is, and with it its storage, if that is new too."""
        self._name(value)
        storage = value.storage
        known = self._storages.setdefault(storage.name, storage)
        if known is not storage:
            raise FormatError(f"expected storages of different names, got two named {storage.name!r}")
        if storage in self._written:
            return f"{layout_text(value)} on {storage.name}"
        self._written.add(storage)
        return f"{layout_text(value)} {storage_text(value)}"

    def _name(self, value: Value) -> None:
        if checked_name(value.name) in RESERVED or value.name in self._names:
            raise FormatError(f"expected a name of its own for each value, got {value.name!r}")
        self._names.add(value.name)
        self.values.add(value)

    def _call(self, node: Node) -> str:
        if not _OPERATOR.fullmatch(node.op):
            raise FormatError("expected an operator's name such as 'aten.add.Tensor'")
        given = [argument_text(arg, self.values) for arg in node.args]
        for key, arg in node.kwargs:
            if not _KEYWORD.fullmatch(key):
                raise FormatError(f"expected an identifier as the name of an argument, got {key!r}")
            given.append(f"{key}={argument_text(arg, self.values)}")
        return f"{node.op}({', '.join(given)})"

    def _label(self, index: int, node: Node) -> Iterator[str]:
        if node in self._labels:
            raise FormatError("expected each node once, got one that stands in the graph twice")
        self._labels[node] = f"n{index}"
        if node in self._labelled:
            yield self._labels[node]

    def _results(self, node: Node) -> Iterator[str]:
        for value in node.outputs:
            if value is not None:
                yield self.make(value)
        for before, after in node.writes:
            written = f"writes {argument_text(before, self.values)} -> {after.name}"
            if after.storage is before.storage and layout_text(after) == layout_text(replace(before, version=before.version + 1)):
                self._name(after)
                yield written
            else:
                yield f"{written}: {self.make(after)}"

    def _after(self, node: Node) -> Iterator[str]:
        if not node.after:
            return
        if any(other not in self._labels or other is node for other in node.after):
            raise FormatError("expected control edges to nodes further up, got one to a node further down or outside of the graph")
        yield f"after {', '.join(self._labels[other] for other in node.after)}"

    def _inplace(self, node: Node) -> Iterator[str]:
        for value, overload in node.inplace:
            if not _OPERATOR.fullmatch(overload):
                raise FormatError(f"expected the name of an operator that works in place, got {overload!r}")
            yield f"takes {argument_text(value, self.values)} by {overload}"

    def _source(self, source: Source | None) -> Iterator[str]:
        if source is not None and self._sources:
            module = f" in {json.dumps(source.module)}" if source.module else ""
            yield f"at {json.dumps(source.file)}:{source.line}{module}"
