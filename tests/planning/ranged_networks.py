"""A small network with its backward pass over one or two dimensions, and what is measured of it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import sympy

from lowtide.cost.measures import Measures
from lowtide.ir.graph import Graph, Kind, Node, Storage, Value
from lowtide.ir.shapes.dimension import Dimension
from lowtide.ir.shapes.points import at
from lowtide.ranges.candidate import Ranged, ShapePoint, sample_points

BATCH, LENGTH = sympy.symbols("batch length", integer=True, nonnegative=True)
BATCHES, LENGTHS = Dimension("batch", 1, 32), Dimension("length", 16, 512)


def vector(name: str, size: Any, kind: Kind = Kind.ACTIVATION) -> Value:
    return Value(name, Storage(name, size, "cpu", kind), "uint8", (size,), (1,))


def network(layers: int, *, quadratic: bool = True, batch: Any = BATCH) -> Graph:
    """So many layers that keep what they make for their gradients; every other result grows with the square of the length."""
    weight, x = vector("w", 4096, Kind.PARAMETER), vector("x", 8 * batch * LENGTH, Kind.INPUT)
    made, nodes = [x], []
    for layer in range(layers):
        size = batch * LENGTH**2 if quadratic and layer % 2 else 16 * batch * LENGTH
        nodes.append(Node("aten.make.default", (made[-1], weight), (vector(f"a{layer}", size),)))
        made.append(nodes[-1].results[0])
    gradient = made[-1]
    for layer in reversed(range(layers)):
        inplace = ((gradient, "aten.make_.default"),) if layer % 3 == 0 else ()
        size = made[layer].storage.nbytes
        nodes.append(Node("aten.make.default", (gradient, made[layer]), (vector(f"g{layer}", size, Kind.GRADIENT),), inplace=inplace))
        gradient = nodes[-1].results[0]
    dimensions = (LENGTHS,) if isinstance(batch, int) else (BATCHES, LENGTHS)
    return Graph((weight, x), tuple(nodes), (gradient,), dimensions)


def branches() -> Graph:
    """Two branches whose large tensor is first that of the one, then that of the other; so is their better order."""
    x = vector("x", 8 * LENGTH, Kind.INPUT)
    sizes = (LENGTH**2, 64 * LENGTH), (128 * LENGTH, 8 * LENGTH)
    nodes, ends = [], []
    for which, (large, small) in enumerate(sizes):
        first = Node("aten.make.default", (x,), (vector(f"large{which}", large),))
        second = Node("aten.make.default", first.results, (vector(f"small{which}", small),))
        nodes += [first, second]
        ends.append(second.results[0])
    return Graph((x,), tuple(nodes), tuple(ends), (LENGTHS,))


def ranged(graph: Graph, points: Sequence[ShapePoint] = ()) -> Ranged:
    """As if measured: a node takes a time for each byte that it reads and makes, and a tenth of what it makes as workspace."""
    points = points or sample_points(graph.dimensions, 5 ** len(graph.dimensions))
    graphs = [at(graph, point) for point in points]
    spaces = [[sum(value.storage.nbytes for value in node.results) // 8 for node in each.nodes] for each in graphs]
    times = [[1 + sum(value.storage.nbytes for value in (*node.inputs, *node.results)) / 100 for node in each.nodes] for each in graphs]
    return Ranged.of(graph, Measures.of(graph, points, spaces, times))
