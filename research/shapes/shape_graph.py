"""The shape graph of a program (BladeDISC++, section 2.1): its dimensions, as few as its operators leave."""

from __future__ import annotations

from dataclasses import replace

from lowtide.ir.graph import Graph
from lowtide.ir.shapes.points import Rewriter, sizes_of
from research.shapes.relations import equations
from research.shapes.solve import ShapeGraph, solved


def shape_graph(graph: Graph) -> ShapeGraph:
    """What the operators of a graph say about its dimensions. Raises ShapeError naming a node, where sizes contradict.

    What is known of a size may say more of others, so operators are asked again as long as that makes a dimension less: a round or two.
    """
    known = ShapeGraph(graph.dimensions, {}, ())
    while True:
        result = solved(equations(graph, known), graph.dimensions)
        if len(result.dimensions) >= len(known.dimensions):
            return result
        known = result


def simplified(graph: Graph) -> Graph:
    """The same graph with all sizes over common dimensions. Raises ShapeError where sizes contradict."""
    shapes = shape_graph(graph)
    sizes = {size: shapes.simplified(size) for size in dict.fromkeys(sizes_of(graph)) if not isinstance(size, int)}
    return replace(Rewriter(sizes).graph(graph), dimensions=shapes.dimensions)
