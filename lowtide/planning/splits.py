"""The splits of one graph, made again of another that looks like it: loops tell which nodes they are of, along what, in how many parts.

So a saved plan is recognised, and what was found for the program that most steps run is done to the others of the same step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from lowtide.errors import CheckError
from lowtide.ir.graph import Graph, Node, Value
from lowtide.ir.loops import Loop, is_loop
from lowtide.planning.candidate import Candidate
from lowtide.split.graphs import FoundGraph
from lowtide.split.loops import Loops
from lowtide.split.sets import FissionTree, SplitRegion

_WHOLE = "_whole_v1"  # what a body calls its place in a result


def split_as(graph: Graph, saved: Graph) -> Graph | None:
    """The graph with the sets in parts that run so in a graph that was made of one that looks like it; None where it has no such sets."""
    loops = Loops(graph)
    makers = {value.name: place for place, node in enumerate(graph.nodes) for value in node.results}
    parts: dict[SplitRegion, int] = {}
    seen: set[frozenset[int]] = set()
    for node in saved.nodes:
        if is_loop(node):
            loop = Loop.of(node)
            places = frozenset(makers[name] for name in _made(loop.body) if name in makers)
            if places not in seen and isinstance(loop.extent, int):
                seen.add(places)
                region = next(_regions(loops, loop.body, makers, places), None)
                if region is None:
                    return None
                parts[region] = -(-loop.extent // loop.part)
    try:
        tree = FissionTree.of(list(parts))
        for number, region in enumerate(tree.regions):
            tree = tree.enable(number, parts[region])
        return loops.graph_of(tree)
    except CheckError:
        return None


def found_like(graphs: Sequence[Graph], like: Sequence[Candidate]) -> list[FoundGraph]:
    """Of these graphs what candidates are that were found for another program; nothing where that had none, or looks otherwise."""
    found: list[FoundGraph] = []
    for each in like[1:]:
        graph = graphs[each.root] if 0 <= each.root < len(graphs) else None
        made = None if graph is None else split_as(graph, each.graph) if any(map(is_loop, each.graph.nodes)) else graph
        if made is None:
            return []
        found.append(FoundGraph(made, each.root))
    return found


def _made(body: Graph) -> Iterator[str]:
    """What the nodes of a body make, by the names that it has outside."""
    return (value.name.removesuffix(_WHOLE) for node in body.nodes for value in node.results)


def _regions(loops: Loops, body: Graph, makers: dict[str, int], places: frozenset[int]) -> Iterator[SplitRegion]:
    """The regions of just these nodes, along what a body is cut along."""
    for node in body.nodes:
        for value, dim in _cut(node):
            name = value.name.removesuffix(_WHOLE)
            made = loops.graph.nodes[makers[name]].results if name in makers else ()
            for anchor in (each for each in made if each.name == name and len(each.shape) == len(value.shape)):
                region = loops.regions.around(anchor, dim, sorted(places))
                if region is not None and region.places == places:
                    yield region


def _cut(node: Node) -> Iterator[tuple[Value, int]]:
    return ((value, dim) for value in node.results for dim, size in enumerate(value.shape) if not isinstance(size, int))
