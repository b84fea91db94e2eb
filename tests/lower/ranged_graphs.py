"""Random graphs over two dimensions that real operators can run: their arguments are expressions, and so is all that they make."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import sympy
from hypothesis import assume
from hypothesis import strategies as st

from lowtide.cost.memory import simulate
from lowtide.cost.symbolic import symbolic_problem
from lowtide.errors import FormatError
from lowtide.ir.graph import Arg, Atom, Graph, Kind, Node, Storage, Value
from lowtide.ir.shapes.dimension import Dimension
from lowtide.ir.sizes import ITEM_BYTES, Size, contiguous_stride, product
from lowtide.ir.text.sizes import canonical
from tests.ranges import S0, S1, SIZES

DIMENSIONS = (Dimension("s0", 1, 5), Dimension("s1", 2, 6))


@dataclass(frozen=True)
class Decided:
    """A graph over dimensions, its order and what works in place."""

    graph: Graph
    order: tuple[int, ...]
    reuses: tuple[int, ...]

    @classmethod
    def in_order(cls, graph: Graph) -> Decided:
        """As written, in place where that is allowed at every point."""
        order = tuple(range(len(graph.nodes)))
        return cls(graph, order, tuple(map(int, simulate(symbolic_problem(graph).structure, order).reuses)))


@st.composite
def ranged_graphs(draw: st.DrawFn, most: int = 8) -> Graph:
    """Graphs over s0 in 1..5 and s1 in 2..6 whose inputs are float32[s0, s1] and float32[s1]."""
    return _Builder(draw).graph(most)


class _Builder:
    def __init__(self, draw: st.DrawFn) -> None:
        self.draw, self.nodes, self.count = draw, list[Node](), 0
        self.inputs = (self.made((S0, S1), kind=Kind.INPUT), self.made((S1,), kind=Kind.INPUT))
        self.tensors: list[Value] = list(self.inputs)

    def graph(self, most: int) -> Graph:
        makers = [self.flat, self.expanded, self.product, self.sliced, self.counted, self.filled, self.scaled, self.raised, self.positive]
        for _ in range(self.draw(st.integers(1, most))):
            self.draw(st.sampled_from(makers))()
        return Graph(
            self.inputs, tuple(self.nodes), tuple(self.draw(st.lists(st.sampled_from(self.tensors), min_size=1, max_size=3))), DIMENSIONS
        )

    def flat(self) -> None:
        """A view of one extent, of what is contiguous."""
        value = self.tensor()
        if value.stride == tuple(map(_size, contiguous_stride(value.shape))):
            shape = (_size(product(value.shape)),)
            self.node("aten.view.default", (value, shape), self.view(value, shape, (1,), value.offset))

    def expanded(self) -> None:
        """A view with one more extent in front, of stride 0."""
        value, extent = self.tensor(), self.extent()
        self.node(
            "aten.expand.default",
            (value, (extent, *value.shape)),
            self.view(value, (extent, *value.shape), (0, *value.stride), value.offset),
        )

    def sliced(self) -> None:
        """The second half of the first extent."""
        value = self.tensor()
        if value.shape:
            half = _size(sympy.floor(sympy.sympify(value.shape[0]) / 2))
            shape = (_size(value.shape[0] - half), *value.shape[1:])
            offset = _size(value.offset + half * value.stride[0])
            self.node("aten.slice.Tensor", (value, 0, half, value.shape[0]), self.view(value, shape, value.stride, offset))

    def product(self) -> None:
        """A matrix product with ones."""
        matrices = [value for value in self.tensors if len(value.shape) == 2]
        value, extent = self.draw(st.sampled_from(matrices)), self.extent()
        ones = self.node("aten.full.default", ((value.shape[1], extent), 1.0), self.made((value.shape[1], extent)))
        self.node("aten.mm.default", (value, ones), self.made((value.shape[0], extent)))

    def counted(self) -> None:
        """Numbers from one size on, as many as another says."""
        start, extent = self.number(), self.extent()
        self.node(
            "aten.arange.start_step", (start, _size(start + extent), 1), self.made((extent,)), kwargs=(("dtype", Atom("dtype", "float32")),)
        )

    def filled(self) -> None:
        """A size as a tensor."""
        extent = self.extent()
        self.node("aten.full.default", ((extent,), self.number()), self.made((extent,)), kwargs=(("dtype", Atom("dtype", "float32")),))

    def scaled(self) -> None:
        """What arithmetic on a size comes to, times a tensor."""
        op, args = self.draw(
            st.sampled_from([("py.mul", (self.number(), 0.5)), ("py.math_sqrt", (self.number(),)), ("py.sub", (-3, self.number()))])
        )
        scale = self.made((), dtype="scalar", kind=Kind.SCALAR)
        self.nodes.append(Node(op, args, (scale,)))
        value = self.tensor()
        self.node("aten.mul.Tensor", (value, scale), self.made(value.shape))

    def raised(self) -> None:
        """A tensor and a size times itself; may work in place."""
        value = self.tensor()
        self.node("aten.add.Tensor", (value, value), self.made(value.shape), kwargs=(("alpha", self.number()),))

    def positive(self) -> None:
        """What may work in place."""
        value = self.tensor()
        self.node("aten.relu.default", (value,), self.made(value.shape), inplace=((value, "aten.relu_.default"),))

    def node(self, op: str, args: tuple[Arg, ...], output: Value, **more: Any) -> Value:
        self.nodes.append(Node(op, args, (output,), **more))
        self.tensors.append(output)
        return output

    def tensor(self) -> Value:
        small = [value for value in self.tensors if len(value.shape) <= 3]
        return self.draw(st.sampled_from(small))

    def extent(self) -> Size:
        """From 1 to 5."""
        return _size(sympy.Mod(self.draw(SIZES), 5) + 1)

    def number(self) -> Size:
        """From 0 to 99."""
        return _size(sympy.Mod(self.draw(SIZES), 100))

    def made(self, shape: tuple[Size, ...], *, dtype: str = "float32", kind: Kind = Kind.ACTIVATION) -> Value:
        self.count += 1
        name = f"{self.draw(st.sampled_from(['t', 'n', 's'])) if hasattr(self, 'tensors') else 'x'}{self.count}"
        storage = Storage(name, _size(product(shape) * ITEM_BYTES[dtype]), "cpu", kind)
        return Value(name, storage, dtype, shape, tuple(map(_size, contiguous_stride(shape))))

    def view(self, of: Value, shape: tuple[Size, ...], stride: tuple[Size, ...], offset: Size) -> Value:
        self.count += 1
        return Value(f"v{self.count}", of.storage, of.dtype, shape, stride, offset)


def _size(size: Any) -> Size:
    """As a graph holds it; what text cannot hold is left out."""
    try:
        return canonical(int(size) if not isinstance(size, int) and size.is_Integer else size)
    except FormatError:
        assume(False)
        raise
