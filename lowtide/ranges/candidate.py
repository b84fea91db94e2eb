"""Candidates over dimensions: a graph, what its nodes need and take over the range, and the candidate of numbers at each point."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod

import numpy as np
from numpy.typing import NDArray

from lowtide.cost.measures import Measures
from lowtide.cost.symbolic import SymbolicProblem, fits_everywhere, symbolic_problem
from lowtide.ir.graph import NOTHING_HELD, Graph, HeldStorages, Node
from lowtide.ir.operators.nodes import is_view
from lowtide.ir.shapes.dimension import Dimensions
from lowtide.ir.shapes.evaluate import size_at
from lowtide.ir.shapes.points import AtPoint, at
from lowtide.planning.candidate import Candidate
from lowtide.planning.request import Request
from lowtide.problems.order import OrderProblem
from lowtide.ranges.pace import RangedProblem
from lowtide.ranges.points import largest, smallest
from lowtide.rewrite.algebra.rewritings import AppliedRule, Rewriting

_MOST = 12  # points at which candidates are kept: those of a grid, most often


@dataclass(frozen=True, eq=False)
class Ranged:
    """A graph over dimensions whose nodes work in place only where that is right at every point.

    What is decided about its candidate at one point, as indices of nodes and storages, is then right at every other.
    """

    graph: Graph
    measures: Measures
    exact: bool = True  # its numbers are the captured graph's, to the last bit
    held_by_eager: HeldStorages = NOTHING_HELD  # of the captured graph
    costs_time: bool = False  # it takes longer than the captured graph
    applied_rules: tuple[AppliedRule, ...] = ()  # what algebra did to it
    extra_us: tuple[float, float] = (0.0, 0.0)  # by how much longer it takes, at the smallest and at the largest point
    written: Mapping[tuple[int, ...], AtPoint] = field(default_factory=dict, repr=False)  # by point: what is shared with other graphs
    _known: dict[tuple[int, ...], Candidate] = field(default_factory=dict, repr=False)
    _orders: dict[int, SymbolicProblem] = field(default_factory=dict, repr=False)  # by granule
    _problems: list[tuple[tuple[object, ...], RangedProblem]] = field(default_factory=list, repr=False)

    @classmethod
    def of(cls, graph: Graph, measures: Measures, *, held_by_eager: HeldStorages = NOTHING_HELD) -> Ranged:
        """Of a graph over dimensions and the measures of its nodes."""
        return cls(same_everywhere(graph), measures, held_by_eager=held_by_eager)

    @classmethod
    def by_algebra(cls, rewriting: Rewriting, measures: Measures, smallest_us: float) -> Ranged:
        """Of a graph that algebra has made, which takes so much longer at the smallest point; its applied_rules tell of the largest."""
        extra_us = smallest_us, sum(applied_rule.cost_us for applied_rule in rewriting.applied_rules)
        ranged = cls.of(rewriting.graph, measures)
        return replace(
            ranged, exact=rewriting.exact, costs_time=rewriting.costs_time, applied_rules=rewriting.applied_rules, extra_us=extra_us
        )

    def is_free_at(self, point: Mapping[str, int]) -> bool:
        """Whether it takes no longer than the captured graph at a point: its operators' times grow with their elements, evenly."""
        first, last = self.extra_us
        if first <= 0 >= last:
            return True
        least, most, here = (prod(each.values()) for each in (smallest(self.dimensions), largest(self.dimensions), point))
        if here == most:
            return last <= 0
        return first + (here - least) / (most - least) * (last - first) <= 0  # without end where nobody knows of the smallest

    @property
    def dimensions(self) -> Dimensions:
        return self.graph.dimensions

    def order_us(self, point: Mapping[str, int]) -> float:
        """The time of each node once at a point, 0 where times do not matter. Raises ShapeError for a wrong point."""
        return float(self.measures.us_at(point)[self._runs].sum()) if self.measures.is_timed else 0.0

    @cached_property
    def _runs(self) -> NDArray[np.bool_]:
        return np.array([not is_view(node) for node in self.graph.nodes], np.bool_)

    @cached_property
    def at_largest(self) -> Graph:
        return self._at(largest(self.dimensions))

    def _at(self, point: Mapping[str, int]) -> Graph:
        """The graph at a point, as far as others have written it."""
        shared = self.written.get(tuple(point[each.name] for each in self.dimensions if each.name in point))
        return at(self.graph, point) if shared is None else shared.graph(self.graph)

    def at(self, point: Mapping[str, int]) -> Candidate:
        """The candidate of numbers at a point; what follows from it is kept for a while. Raises ShapeError for a wrong point."""
        key = tuple(point[each.name] for each in self.dimensions if each.name in point)
        candidate = self._known.pop(key, None) or self.uncached_at(point)
        while len(self._known) >= _MOST:  # that which was asked for longest ago goes
            del self._known[next(iter(self._known))]
        self._known[key] = candidate
        return candidate

    def order_problem(self, granule_bytes: int) -> SymbolicProblem:
        """The ordering problem, without the workspaces that were measured."""
        if granule_bytes not in self._orders:
            self._orders[granule_bytes] = symbolic_problem(self.graph, round_to=granule_bytes, there=self.at_largest)
        return self._orders[granule_bytes]

    def order_problem_at(self, point: Mapping[str, int], granule_bytes: int) -> OrderProblem:
        """The ordering problem at a point, with them; no graph is written for that. Raises ShapeError for a wrong point."""
        return self.measures.with_workspaces(self.order_problem(granule_bytes).at(point), point)

    def remat_problem(self, request: Request) -> RangedProblem:
        """The problem of sequences at every point, as a request has it."""
        key = request.granule_bytes, request.links, request.swap_state
        for known, problem in self._problems:  # few, and a device need not have a hash
            if known == key:
                return problem
        structure = self.at(largest(self.dimensions)).remat_problem(request.granule_bytes, request.links, request.swap_state)
        self._problems.append((key, RangedProblem.of(self.graph, structure, self.measures, request.granule_bytes, request.links)))
        return self._problems[-1][1]

    def uncached_at(self, point: Mapping[str, int]) -> Candidate:
        """The same, of which nothing is known yet. Raises ShapeError for a wrong point."""
        graph = self.at_largest if dict(point) == largest(self.dimensions) else self._at(point)
        held_storages = self.held_by_eager.at(point)
        applied_rules = tuple(
            applied_rule.at(partial(size_at, dimensions=self.dimensions, point=point)) for applied_rule in self.applied_rules
        )
        spaces, times = self.measures.workspaces_at(point), self.measures.times_at(point)
        costs_time, problem_of = self.costs_time or not self.is_free_at(point), partial(self.order_problem_at, dict(point))
        return Candidate(graph, spaces, times, self.exact, held_storages, costs_time, applied_rules, problem_of=problem_of)


def same_everywhere(graph: Graph) -> Graph:
    """The graph without the reuses that only some points permit."""
    written: dict[Node, Node] = {}
    for node in graph.nodes:
        inplace = tuple(entry for entry in node.inplace if fits_everywhere(node, entry[0]))
        after = tuple(written[other] for other in node.after)
        written[node] = node if (inplace, after) == (node.inplace, node.after) else replace(node, inplace=inplace, after=after)
    return replace(graph, nodes=tuple(written.values()))
