"""Reads the text of a graph; `text` says how it is written."""

from __future__ import annotations

import json
import re
from collections import deque
from dataclasses import dataclass, field, replace

from lowtide.errors import FormatError, ShapeError
from lowtide.ir.graph import Graph, Node, Source, Storage, Value
from lowtide.ir.shapes.dimension import Dimension, checked_dimensions
from lowtide.ir.text.arguments import NAME, RESERVED, ArgumentReader
from lowtide.ir.text.values import parse_value

_INPUT = re.compile(rf"({NAME}),  # (.*)")
_CALL = re.compile(rf"(?:({NAME}(?:, {NAME})*) = )?({NAME}(?:\.{NAME})+)\(")
_LABEL = re.compile(r"n\d{1,18}", re.ASCII)
_WRITES = re.compile(rf"writes ({NAME}) -> ({NAME})(?:: (.+))?")
_TAKES = re.compile(rf"takes ({NAME}) by ({NAME}(?:\.{NAME})+)")
_DIMENSION = re.compile(rf"({NAME}) in ([0-9]{{1,18}})\.\.([0-9]{{1,18}})")
_STRING = r'"(?:[^"\\]|\\.)*"'
_SOURCE = re.compile(rf"({_STRING}):(-?\d{{1,18}})(?: in ({_STRING}))?", re.ASCII)
_INDENT = "    "


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
    """A graph as far as it has been read."""

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
