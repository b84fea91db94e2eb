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
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from typing import TypeAlias, Union

from lowtide.errors import FormatError, ShapeError
from lowtide.ir.graph import Graph, Node, Source, Storage, Value
from lowtide.ir.shapes.dimension import Dimension, checked_dimensions
from lowtide.ir.text.arguments import NAME, RESERVED, ArgumentReader, argument_text, checked_name, layout_text, parse_value, storage_text

__all__ = ["parse", "to_text"]

_INDENT = "    "
_KEYWORD = re.compile(NAME)
_OPERATOR = re.compile(rf"{NAME}(?:\.{NAME})+")
_Lines: TypeAlias = Iterator[Union[str, "_Lines"]]
_INPUT = re.compile(rf"({NAME}),  # (.*)")
_CALL = re.compile(rf"(?:({NAME}(?:, {NAME})*) = )?({NAME}(?:\.{NAME})+)\(")
_LABEL = re.compile(r"n\d{1,18}", re.ASCII)
_WRITES = re.compile(rf"writes ({NAME}) -> ({NAME})(?:: (.+))?")
_TAKES = re.compile(rf"takes ({NAME}) by ({NAME}(?:\.{NAME})+)")
_DIMENSION = re.compile(rf"({NAME}) in ([0-9]{{1,18}})\.\.([0-9]{{1,18}})")
_STRING = r'"(?:[^"\\]|\\.)*"'
_SOURCE = re.compile(rf"({_STRING}):(-?\d{{1,18}})(?: in ({_STRING}))?", re.ASCII)


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


def parse(text: str) -> Graph:
    """The graph that a text says; nothing in it is executed. Raises FormatError naming the line, what was expected and what came."""
    reader = _GraphReader(text.split("\n"))
    try:
        return reader.read()
    except FormatError as error:
        raise FormatError(f"line {reader.number}: {error}") from error


class _GraphReader:
    """Walks the lines. Bodies nest in a list of scopes, not in calls: a text may nest deeper than Python recurses."""

    def __init__(self, lines: list[str]) -> None:
        self._lines, self.number = lines, 0

    def read(self) -> Graph:
        scopes = [self._open("graph", "")]
        while True:
            line = self._next(scopes[-1].indent)
            if not line.startswith("return ("):
                scopes[-1].add(line)
                if self._peek().startswith(f"{scopes[-1].indent}{_INDENT}def body("):
                    scopes.append(self._open("body", scopes[-1].indent + _INDENT))
                continue
            graph = scopes.pop().close(line)
            if not scopes:
                self._end()
                return graph
            scopes[-1].add_body(graph)

    def _open(self, name: str, indent: str) -> _ReadScope:
        line, _, dimensions = self._next(indent).partition("  # ")
        scope = _ReadScope(indent + _INDENT, _dimensions(dimensions))
        if line == f"def {name}():":
            return scope
        if line != f"def {name}(":
            raise FormatError(f"expected 'def {name}(' or 'def {name}():', got {line[:80]!r}")
        while self._peek() != f"{indent}):":
            scope.add_input(self._next(indent + _INDENT))
        self._next(indent)
        return scope

    def _peek(self) -> str:
        """The next line that is not empty; "" at the end."""
        while self.number < len(self._lines) and not self._lines[self.number].strip():
            self.number += 1
        return self._lines[self.number].rstrip() if self.number < len(self._lines) else ""

    def _next(self, indent: str) -> str:
        line = self._peek()
        self.number = min(self.number + 1, len(self._lines))
        if not line:
            raise FormatError("expected the graph to go on to its 'return (...)', got the end of the text")
        if not line.startswith(indent) or line[len(indent)].isspace():
            raise FormatError(f"expected a line indented by {len(indent)} spaces, got {line[:80]!r}")
        return line[len(indent) :]

    def _end(self) -> None:
        if line := self._peek():
            self.number += 1
            raise FormatError(f"expected nothing after the graph, got {line[:80]!r}")


@dataclass
class _ReadScope:
    indent: str
    dimensions: tuple[Dimension, ...]
    inputs: list[Value] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    values: dict[str, Value] = field(default_factory=dict)
    storages: dict[str, Storage] = field(default_factory=dict)
    labels: dict[str, int] = field(default_factory=dict)  # indices of nodes

    def add_input(self, line: str) -> None:
        match = _INPUT.fullmatch(line)
        if match is None:
            raise FormatError(f"expected an input such as 'x,  # float32[3] 12 B input cpu' or the closing '):', got {line[:80]!r}")
        self.inputs.append(self._make(match[1], match[2]))

    def add(self, line: str) -> None:
        """One node: the call, then the clauses of its comment in their order."""
        match = _CALL.match(line)
        if match is None:
            raise FormatError(f"expected a call such as 'y = aten.relu.default(x)' or 'return (...)', got {line[:80]!r}")
        reader = ArgumentReader(line, match.end(), self.values)
        args, kwargs = reader.call()
        clauses, source = _comment(line[reader.at :])
        self._label(clauses)
        node = Node(
            match[2],
            args,
            self._outputs(match[1], clauses),
            kwargs,
            writes=self._writes(clauses),
            after=self._after(clauses),
            inplace=self._inplace(clauses),
            source=source,
        )
        if clauses:
            raise FormatError(f"expected clauses in their order (label, results, writes, after, takes, at), got {clauses[0][:80]!r}")
        self.nodes.append(node)

    def add_body(self, body: Graph) -> None:
        self.nodes[-1] = replace(self.nodes[-1], body=body)

    def close(self, line: str) -> Graph:
        reader = ArgumentReader(line, len("return ("), self.values)
        outputs = reader.values()
        if rest := line[reader.at :]:
            raise FormatError(f"expected the end of the line, got {rest[:80]!r}")
        return Graph(tuple(self.inputs), tuple(self.nodes), outputs, self.dimensions)

    def _make(self, name: str, clause: str) -> Value:
        self._check_unused(name)
        self.values[name] = parse_value(name, clause, self.storages)
        return self.values[name]

    def _check_unused(self, name: str) -> None:
        if name in RESERVED or name in self.values:
            raise FormatError(f"expected the name of a new value, got {name!r}")

    def _value(self, name: str) -> Value:
        if name not in self.values:
            raise FormatError(f"expected the name of a value made above, got {name!r}")
        return self.values[name]

    def _label(self, clauses: deque[str]) -> None:
        if not clauses or not _LABEL.fullmatch(clauses[0]):
            return
        label = clauses.popleft()
        if label in self.labels:
            raise FormatError(f"expected a new label, got {label} for the second time")
        self.labels[label] = len(self.nodes)

    def _outputs(self, targets: str | None, clauses: deque[str]) -> tuple[Value | None, ...]:
        if targets is None:
            return ()
        return tuple(None if name == "_" else self._make(name, _take(clauses, name)) for name in targets.split(", "))

    def _writes(self, clauses: deque[str]) -> tuple[tuple[Value, Value], ...]:
        writes = []
        while clauses and (match := _WRITES.fullmatch(clauses[0])):
            clauses.popleft()
            before = self._value(match[1])
            writes.append((before, self._make(match[2], match[3]) if match[3] else self._next_version(before, match[2])))
        return tuple(writes)

    def _next_version(self, before: Value, name: str) -> Value:
        self._check_unused(name)
        self.values[name] = replace(before, name=name, version=before.version + 1)
        return self.values[name]

    def _after(self, clauses: deque[str]) -> tuple[Node, ...]:
        if not clauses or not clauses[0].startswith("after "):
            return ()
        labels = clauses.popleft().removeprefix("after ").split(", ")
        unknown = [label for label in labels if self.labels.get(label, len(self.nodes)) == len(self.nodes)]
        if unknown:
            raise FormatError(f"expected the label of a node above, got {unknown[0][:80]!r}")
        return tuple(self.nodes[self.labels[label]] for label in labels)

    def _inplace(self, clauses: deque[str]) -> tuple[tuple[Value, str], ...]:
        inplace = []
        while clauses and (match := _TAKES.fullmatch(clauses[0])):
            clauses.popleft()
            inplace.append((self._value(match[1]), match[2]))
        return tuple(inplace)


def _dimensions(text: str) -> tuple[Dimension, ...]:
    matches = [_DIMENSION.fullmatch(piece) for piece in text.split(", ")] if text else []
    if None in matches:
        raise FormatError(f"expected dimensions such as 'batch in 1..64, length in 16..2048', got {text[:80]!r}")
    try:
        return checked_dimensions(tuple(Dimension(match[1], int(match[2]), int(match[3])) for match in matches if match is not None))
    except ShapeError as error:
        raise FormatError(str(error)) from error


def _comment(text: str) -> tuple[deque[str], Source | None]:
    """The clauses of a comment, the source apart: only it holds strings, within which "; " sets nothing apart."""
    if text and not text.startswith("  # "):
        raise FormatError(f"expected a comment ('  # ...') or the end of the line, got {text[:80]!r}")
    clauses, separator, source = text.replace("  # ", "; ", 1).partition("; at ")
    return deque(clauses.split("; ")[1:]), _source(source) if separator else None


def _source(text: str) -> Source:
    match = _SOURCE.fullmatch(text)
    if match is None:
        raise FormatError(f"""expected a source such as '"net.py":7 in "head"', got {text[:80]!r}""")
    try:
        return Source(json.loads(match[1]), int(match[2]), json.loads(match[3] or '""'))
    except ValueError as error:
        raise FormatError(f"expected strings as JSON writes them, got {text[:80]!r}") from error


def _take(clauses: deque[str], name: str) -> str:
    if not clauses:
        raise FormatError(f"expected a comment that says what {name} is, such as '# float32[3] on x', got none")
    return clauses.popleft()
