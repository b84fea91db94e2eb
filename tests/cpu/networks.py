"""Small graphs written by hand, for tests of clusters: no torch."""

from __future__ import annotations

from math import prod

from lowtide.ir.graph import Arg, Graph, Kind, Node, Storage, Value


def tensor(name: str, *shape: int, kind: Kind = Kind.ACTIVATION) -> Value:
    """A contiguous float32 tensor on a storage of its own."""
    strides = tuple(prod(shape[dim + 1 :]) for dim in range(len(shape)))
    return Value(name, Storage(name, 4 * prod(shape), "cpu", kind), "float32", shape, strides)


class Builder:
    """Grows a graph operator by operator."""

    def __init__(self, *shape: int) -> None:
        self.x = tensor("x", *shape, kind=Kind.INPUT)
        self.inputs, self.nodes = [self.x], list[Node]()

    def parameter(self, *shape: int) -> Value:
        """A parameter."""
        self.inputs.append(tensor(f"p{len(self.inputs)}", *shape, kind=Kind.PARAMETER))
        return self.inputs[-1]

    def node(self, op: str, args: tuple[Arg, ...], *shape: int) -> Value:
        """An operator's result, contiguous."""
        made = tensor(f"v{len(self.nodes)}", *shape)
        self.nodes.append(Node(op, args, (made,)))
        return made

    def same(self, op: str, *args: Arg) -> Value:
        """An operator whose result has its first argument's shape."""
        first = args[0]
        assert isinstance(first, Value)
        return self.node(op, args, *first.shape)  # type: ignore[arg-type]

    def convolution(self, x: Value, out: int, size: int = 1, stride: int = 1, groups: int = 1) -> Value:
        """A convolution with padding, so that stride 1 keeps the size."""
        n, channels, height, width = (int(extent) for extent in x.shape)  # type: ignore[arg-type]
        weight, pad = self.parameter(out, channels // groups, size, size), size // 2
        args = (x, weight, self.parameter(out), (stride, stride), (pad, pad), (1, 1), False, (0, 0), groups)
        return self.node("aten.convolution.default", args, n, out, -(-height // stride), -(-width // stride))

    def graph(self, *outputs: Value) -> Graph:
        """What was built."""
        return Graph(tuple(self.inputs), tuple(self.nodes), outputs)


def inverted_residuals(blocks: int, channels: int = 16, side: int = 28) -> Graph:
    """MobileNet-V2's blocks: pointwise, depthwise, pointwise, added to what came in."""
    build = Builder(1, channels, side, side)
    x = build.x
    for _ in range(blocks):
        wide = build.same("aten.hardtanh.default", build.convolution(x, 6 * channels), 0, 6)
        deep = build.same("aten.hardtanh.default", build.convolution(wide, 6 * channels, 3, groups=6 * channels), 0, 6)
        x = build.same("aten.add.Tensor", build.convolution(deep, channels), x)
    return build.graph(x)


def mixed() -> Graph:
    """A convolution, pooling, an operator that no generator knows, a linear layer whose weight is transposed."""
    build = Builder(1, 8, 14, 14)
    made = build.same("aten.relu.default", build.convolution(build.x, 32, 3))
    pooled = build.node("aten.mean.dim", (made, (-1, -2)), 1, 32)
    summed = build.same("aten.cumsum.default", pooled, 1)
    weight = build.parameter(10, 32)
    transposed = Value("t", weight.storage, "float32", (32, 10), (1, 32))
    build.nodes.append(Node("aten.t.default", (weight,), (transposed,)))
    return build.graph(build.node("aten.addmm.default", (build.parameter(10), summed, transposed), 1, 10))
