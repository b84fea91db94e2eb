"""Candidates over dimensions: a graph, what its nodes need and take over the range, and the candidate of numbers at each point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lowtide.cost.measures import Measures
from lowtide.cost.symbolic import fits_everywhere
from lowtide.ir.graph import Graph, Node, Value
from lowtide.ir.operators.nodes import is_view
from lowtide.ir.shapes.at import at
from lowtide.ir.shapes.dimension import Dimensions
from lowtide.planning.candidate import Candidate

_MOST = 12  # points at which candidates are kept: those of a grid, most often


@dataclass(frozen=True, eq=False)
class Ranged:
    """A graph over dimensions whose nodes work in place only where that is right at every point.

    What is decided about its candidate at one point, as indices of nodes and storages, is then right at every other.
    """

    graph: Graph
    measures: Measures
    exact: bool = True  # its numbers are the captured graph's, to the last bit
    held_by_eager: tuple[Value, ...] = ()  # of the captured graph: eager PyTorch keeps gradients until after the step
    _known: dict[tuple[int, ...], Candidate] = field(default_factory=dict, repr=False)

    @classmethod
    def of(cls, graph: Graph, measures: Measures, *, exact: bool = True, held_by_eager: tuple[Value, ...] = ()) -> Ranged:
        """Of a graph over dimensions and the measures of its nodes."""
        return cls(same_everywhere(graph), measures, exact, held_by_eager)

    @property
    def dimensions(self) -> Dimensions:
        """Over which it ranges."""
        return self.graph.dimensions

    def order_us(self, point: Mapping[str, int]) -> float:
        """The time of each node once at a point, 0 where times do not matter. Raises ShapeError for a wrong point."""
        return float(self.measures.grid.between(point, self._grid_us)) if self.measures.node_us.size else 0.0

    @cached_property
    def _grid_us(self) -> NDArray[np.float64]:
        """[k]"""
        runs = np.array([not is_view(node) for node in self.graph.nodes], np.bool_)
        found: NDArray[np.float64] = self.measures.node_us[:, runs].sum(axis=1)
        return found

    def at(self, point: Mapping[str, int]) -> Candidate:
        """The candidate of numbers at a point; what follows from it is kept for a while. Raises ShapeError for a wrong point."""
        key = tuple(point[each.name] for each in self.dimensions if each.name in point)
        found = self._known.pop(key, None) or self.made(point)
        while len(self._known) >= _MOST:  # that which was asked for longest ago goes
            del self._known[next(iter(self._known))]
        self._known[key] = found
        return found

    def made(self, point: Mapping[str, int]) -> Candidate:
        """The same, of which nothing is known yet. Raises ShapeError for a wrong point."""
        graph = at(self.graph, point)
        held = {value.name for value in self.held_by_eager}
        values = (value for node in graph.nodes for value in node.results if value.name in held)
        return Candidate(graph, self.measures.workspaces_at(point), self.measures.times_at(point), self.exact, tuple(values))


def same_everywhere(graph: Graph) -> Graph:
    """The graph without the reuses that only some points permit."""
    written: dict[Node, Node] = {}
    for node in graph.nodes:
        inplace = tuple(entry for entry in node.inplace if fits_everywhere(node, entry[0]))
        written[node] = replace(node, inplace=inplace, after=tuple(written[other] for other in node.after))
    return replace(graph, nodes=tuple(written.values()))
