"""Random graphs in normal form, small enough for brute force.

With views, versions, writes, several results, control edges, in-place candidates, bodies, literals.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hypothesis import strategies as st

from lowtide.ir.graph import Arg, Atom, Graph, Kind, Node, Source, Storage, Value

_OWNED = (Kind.PARAMETER, Kind.BUFFER, Kind.STATE, Kind.INPUT, Kind.CONSTANT)
_MADE = (Kind.ACTIVATION, Kind.GRADIENT, Kind.TEMPORARY)
_EXTENTS = st.sampled_from([0, 1, 2, 2, 3, 8, 8])  # few, so that reuses are common
_LITERALS: st.SearchStrategy[Arg] = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats()
    | st.complex_numbers(allow_nan=True)
    | st.text(max_size=8)
    | st.builds(Atom, st.sampled_from(["dtype", "device", "layout", "memory_format"]), st.text(max_size=8)),
    lambda inner: st.lists(inner, max_size=3).map(tuple),
    max_leaves=4,
)
_SOURCES = st.none() | st.builds(Source, st.text(max_size=8), st.integers(0, 999), st.sampled_from(["", "layer1.0.conv1", 'a"; at b']))


def array(storage: Storage, name: str | None = None, *, offset: int = 0, version: int = 0, extent: int | None = None) -> Value:
    """A one-dimensional value of bytes."""
    assert isinstance(storage.nbytes, int)
    return Value(name or storage.name, storage, "uint8", (storage.nbytes - offset if extent is None else extent,), (1,), offset, version)


def compute(name: str, *inputs: Value, nbytes: int = 4, **more: Any) -> Node:
    """A node that makes one storage of that name."""
    return Node("aten.make.default", inputs, (array(Storage(name, nbytes, "cpu", Kind.ACTIVATION)),), **more)


def write(target: Value, *inputs: Value, name: str | None = None) -> Node:
    """A node that writes over all of `target`; what it leaves is `writes[0][1]`."""
    after = replace(target, name=name or f"{target.name}_v{target.version + 1}", version=target.version + 1)
    return Node("aten.copy_.default", (target, *inputs), (), writes=((target, after),))


def view(of: Value, name: str) -> Node:
    """A node that makes a view of all of a value."""
    return Node("aten.view.default", (of,), (replace(of, name=name),))


@st.composite
def graphs(draw: st.DrawFn, max_nodes: int = 12, bodies: bool = True) -> Graph:
    """Graphs of up to `max_nodes` nodes over storages of a few bytes, in a random program order that is right."""
    return _Builder(draw, bodies).graph(max_nodes)


class _Builder:
    """Grows a graph node by node; reads only what is current, so that the program order is right."""

    def __init__(self, draw: st.DrawFn, bodies: bool) -> None:
        self.draw, self.bodies = draw, bodies
        self.count = 0
        self.current: list[Value] = []  # values of the versions that their storages are at
        self.made: list[Value] = []
        self.nodes: list[Node] = []

    def graph(self, max_nodes: int) -> Graph:
        inputs = tuple(value for _ in range(self.draw(st.integers(0, 3))) for value in self.inputs())
        self.current += inputs
        self.made += inputs
        for _ in range(self.draw(st.integers(0, max_nodes))):
            makers = [self.compute, self.compute, self.number, self.assertion]
            makers += [self.view] if self.current else []
            makers += [self.write] if self.owned() else []
            node = self.draw(st.sampled_from(makers))()
            self.nodes.append(node)
            self.current += node.results
            self.made += node.results
        kept = tuple(self.draw(st.lists(st.sampled_from(self.made), max_size=3, unique=True))) if self.made else ()
        return Graph(inputs, tuple(self.nodes), kept)

    def inputs(self) -> list[Value]:
        """One or two values on a storage that is there from the start: the caller's, or one that is given away."""
        if self.draw(st.booleans()) and self.draw(st.booleans()):
            return [self.scalar()]
        value = array(self.storage(st.sampled_from((*_OWNED, *_OWNED, *_MADE))))
        return [value, self.view_of(value)] if self.draw(st.booleans()) else [value]

    def compute(self) -> Node:
        """A node that makes storages, or leaves some of its results away."""
        args = self.arguments()
        values = Node("", args, ()).inputs
        outputs = tuple(self.draw(st.sampled_from([self.fresh, self.fresh, lambda: None]))() for _ in range(self.draw(st.integers(1, 3))))
        candidates = tuple((value, "aten.make_.default") for value in values if self.draw(st.booleans()))
        return self.node("aten.make.default", args, outputs, inplace=candidates, body=self.body())

    def view(self) -> Node:
        value = self.draw(st.sampled_from(self.current))
        return self.node("aten.view.default", (value, self.draw(_LITERALS)), (self.view_of(value),))

    def write(self) -> Node:
        """A node that writes one or two storages of the caller's: every value on them is of an old version then."""
        targets = {value.storage: value for value in self.draw(st.lists(st.sampled_from(self.owned()), min_size=1, max_size=2))}
        args = (*targets.values(), *self.arguments())
        writes = tuple((value, replace(value, name=self.name("w"), version=value.version + 1)) for value in targets.values())
        self.current = [value for value in self.current if value.storage not in targets]
        return self.node("aten.copy_.default", args, (), writes=writes)

    def number(self) -> Node:
        return self.node("py.mul", self.arguments(), (self.scalar(),))

    def assertion(self) -> Node:
        return self.node("aten._assert_async.msg", (*self.arguments(), "as expected"), ())

    def node(self, op: str, args: tuple[Arg, ...], outputs: tuple[Value | None, ...], **more: Any) -> Node:
        split = self.draw(st.integers(0, len(args)))
        kwargs = tuple((f"k{index}", arg) for index, arg in enumerate(args[split:]))
        after = tuple(self.draw(st.lists(st.sampled_from(self.nodes), max_size=2, unique=True))) if self.nodes else ()
        return Node(op, args[:split], outputs, kwargs, after=after, source=self.draw(_SOURCES), **more)

    def arguments(self) -> tuple[Arg, ...]:
        """A few current values and literals, some within tuples."""
        values = st.sampled_from(self.current) if self.current else st.nothing()
        single: st.SearchStrategy[Arg] = values | values | _LITERALS
        return tuple(self.draw(st.lists(single | st.tuples(single, single), max_size=3)))

    def body(self) -> Graph | None:
        return _Builder(self.draw, False).graph(3) if self.bodies and self.draw(st.integers(0, 7)) == 7 else None

    def owned(self) -> list[Value]:
        given = {value.storage for value in self.made if value.storage.kind in _OWNED}
        return [value for value in self.current if value.storage in given]

    def fresh(self) -> Value:
        return array(self.storage(st.sampled_from(_MADE)))

    def scalar(self) -> Value:
        name = self.name("s")
        return Value(name, Storage(name, 0, "cpu", Kind.SCALAR), "scalar", (), ())

    def view_of(self, value: Value) -> Value:
        if value.dtype == "scalar":
            return replace(value, name=self.name("v"))
        assert isinstance(value.storage.nbytes, int)
        offset = self.draw(st.integers(0, value.storage.nbytes))
        extent = self.draw(st.integers(0, value.storage.nbytes - offset))
        shape, stride = self.draw(
            st.sampled_from([((extent,), (1,)), ((2, extent), (0, 1)), ((extent, 1), (1, 7)), ((extent,), (0,)), ((), ())])
        )
        shape, stride, offset = (shape, stride, offset) if extent else ((0,), (1,), 0)
        return Value(self.name("v"), value.storage, "uint8", shape, stride, offset, value.version)

    def storage(self, kinds: st.SearchStrategy[Kind]) -> Storage:
        return Storage(self.name("t"), self.draw(_EXTENTS), self.draw(st.sampled_from(["cpu", "cpu", "cpu", "cuda:0"])), self.draw(kinds))

    def name(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"
