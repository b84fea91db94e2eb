"""Candidates over dimensions: a graph, what its nodes need and take over the range, and the candidate of numbers at each point.

What sequences take at every point of a range: one structure, of which sizes and times alone differ from point to point.
What a sequence takes is linear in the sizes of tensors, as no lifetime depends on them: played once for each term that sizes are sums of,
it gives what it takes everywhere (`cost.symbolic`). No graph is written for that.

How long sequences take at any point of a range: what each node takes there, as often as it runs, and what is waited for copies.

So a sequence takes at each point what it takes where that point is planned alone. Waits follow from all that runs at once: they are known
where operators were measured, and in between on the line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from math import prod

import numpy as np
from numpy.typing import NDArray

from lowtide.cost.device import Device
from lowtide.cost.measures import Measures
from lowtide.cost.memory import resident_storages
from lowtide.cost.symbolic import Footprints, SymbolicProblem, Terms, fits_everywhere, symbolic_problem
from lowtide.ir.graph import NOTHING_HELD, Graph, HeldStorages, Node
from lowtide.ir.operators.nodes import is_view
from lowtide.ir.shapes.dimension import Dimensions
from lowtide.ir.shapes.evaluate import size_at
from lowtide.ir.shapes.points import AtPoint, at
from lowtide.planning.candidate import Candidate
from lowtide.planning.request import Request
from lowtide.problems.order import Ints, OrderProblem
from lowtide.ranges.points import largest, smallest
from lowtide.remat.cost import cost_of, footprint_of
from lowtide.remat.offload import movable_storages
from lowtide.remat.problem import Links, RematProblem
from lowtide.rewrite.rewritings import AppliedRule, Rewriting


@dataclass(frozen=True, eq=False)
class RangedProblem:
    """A problem of sequences over the ranges of dimensions."""

    structure: RematProblem  # at one point
    sizes: SymbolicProblem  # of the same tensors
    measures: Measures
    links: Device | None  # over which tensors are swapped

    @classmethod
    def of(cls, graph: Graph, structure: RematProblem, measures: Measures, round_to: int, links: Device | None) -> RangedProblem:
        """Of a graph over dimensions, and its problem at some point."""
        tensors = movable_storages(graph)[: structure.problem.tensor_count]  # those that may be offloaded last, where they are tensors
        resident = set(resident_storages(graph)) - set(tensors)
        sizes = SymbolicProblem(
            graph.dimensions,
            structure.problem,
            tuple(each.nbytes for each in tensors),
            tuple(each.nbytes for each in resident_storages(graph) if each in resident),
            round_to,
        )
        return cls(structure, sizes, measures, links)

    def footprints(self, sequence: Ints) -> Footprints:
        """What a sequence takes at its highest, at any point."""
        live = np.stack([footprint_of(self.structure, sequence, term) for term in self._terms.tensors.T], axis=1)
        nodes = self.structure.problem.node_count
        columns = np.where(sequence < nodes, self.measures.columns[np.minimum(sequence, nodes - 1)], -1).tolist()
        return Footprints.of_steps(self._terms, live + self._terms.resident, columns)

    def costs(self, sequences: Sequence[Ints], points: Sequence[Mapping[str, int]]) -> NDArray[np.float64]:
        """[sequences, points, 2] peak in bytes and time in microseconds. Raises ShapeError for a wrong point."""
        costs = np.zeros((len(sequences), len(points), 2))
        for position, point in enumerate(points):
            problem = self.at(point)
            for row, sequence in enumerate(sequences):
                cost = cost_of(problem, sequence)
                costs[row, position] = cost.peak_bytes, cost.time_us
        return costs

    def at(self, point: Mapping[str, int]) -> RematProblem:
        """The problem at a point, for what sequences cost there; what may be swapped at all is as in the structure."""
        problem = self.measures.with_workspaces(self.sizes.at(point), point)
        times, links = np.array(self.measures.times_at(point), np.float64), self.structure.links
        if links is not None and self.links is not None:
            links = replace(Links.of(problem, links.storable.tolist(), self.links), storable=links.storable)
        return replace(self.structure, problem=problem, cost_us=times, links=links, plain=None)

    @cached_property
    def _terms(self) -> Terms:
        return Terms(self.sizes)


Times = NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class Pace:
    """Of one sequence."""

    runs: Times  # [nodes] how often each runs
    waits_us: Times  # [k] what is waited at the points of the measures' grid

    @classmethod
    def of(cls, problem: RangedProblem, sequence: Ints) -> Pace:
        """Of a sequence of a problem whose nodes' times are known."""
        measures, nodes = problem.measures, problem.structure.problem.node_count
        runs = np.bincount(sequence[sequence < nodes], minlength=nodes).astype(np.float64)
        waits_us = np.zeros(len(measures.node_us))
        if problem.links is not None:
            waits_us = problem.costs([sequence], measures.grid.points)[0, :, 1] - measures.node_us @ runs
        return cls(runs, waits_us)


def paces_at(measures: Measures, point: Mapping[str, int], runs: Times, waits_us: Times) -> Times:
    """[m] microseconds of sequences of one problem, given how often they run each node [m, n] and what they wait for [m, k].

    Raises ShapeError for a wrong point. A product of floats would wait for other threads.
    """
    us: Times = np.einsum("mn,n->m", runs, measures.us_at(point)) + np.einsum("mk,k->m", waits_us, measures.grid.weights(point))
    return us


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
