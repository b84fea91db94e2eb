"""Candidates over dimensions: a graph, what its nodes need and take over the range, and the candidate of numbers at each point.

What sequences take at every point of a range: one structure, of which sizes and times alone differ from point to point.
What a sequence takes is linear in the sizes of tensors, as no lifetime depends on them: played once for each term that sizes are sums of,
it gives what it takes everywhere (`cost.symbolic`). No graph is written for that.

How long sequences take at any point of a range: what each node takes there, as often as it runs, and what is waited for copies.

So a sequence takes at each point what it takes where that point is planned alone. Waits follow from all that runs at once: they are known
where operators were measured, and in between on the line.

Orders are solved at all corners, and between them at numbers that grow by equal factors. No limit changes any of these points. A family is
searched and judged at others.

What operators need and take over a range is measured at a grid of its points, or follows from the rates of a machine.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import product
from math import prod
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lowtide.cost.device import Device
from lowtide.cost.laboratory import Laboratory
from lowtide.cost.measures import Measures
from lowtide.cost.memory import resident_storages
from lowtide.cost.symbolic import Footprints, SymbolicProblem, Terms, fits_everywhere, symbolic_problem
from lowtide.cost.timings import device_here, measure_timings
from lowtide.cost.workspaces import measure_workspaces
from lowtide.errors import CaptureError
from lowtide.ir.graph import NOTHING_HELD, Graph, HeldStorages, Node
from lowtide.ir.operators.nodes import is_view
from lowtide.ir.shapes.dimension import Dimension, Dimensions
from lowtide.ir.shapes.points import AtPoint, at, at_points, size_at
from lowtide.planning.candidate import Candidate, Captured, equal_graphs
from lowtide.planning.machine import Machine
from lowtide.planning.request import Request
from lowtide.problems.order import Ints, OrderProblem
from lowtide.remat.cost import cost_of, footprint_of
from lowtide.remat.offload import movable_storages
from lowtide.remat.problem import Links, RematProblem
from lowtide.rewrite.rewritings import AppliedRule, Rewriting, cost_of_applied, over_dimensions

ShapePoint: TypeAlias = "dict[str, int]"  # by dimension
_OF_ONE, _OF_MANY = 3, 4  # points that are measured, of a range of one dimension and of more


def sample_points(dimensions: Dimensions, most: int = 32) -> tuple[ShapePoint, ...]:
    """About `most` points, all corners among them, those of the largest numbers first; a grid of as many numbers for each dimension."""
    count = 2
    while dimensions and (count + 1) ** len(dimensions) <= most:
        count += 1
    grid = product(*(reversed(_numbers(each, count)) for each in dimensions))
    return tuple({each.name: number for each, number in zip(dimensions, numbers, strict=True)} for numbers in grid)


def _numbers(dimension: Dimension, count: int) -> list[int]:
    """About `count` numbers of a range, ascending, both ends among them."""
    first, last = max(dimension.least, 1), max(dimension.most, 1)
    between = {round(first * (last / first) ** (step / (count - 1))) for step in range(count)}
    inside = {min(max(number, dimension.least), dimension.most) for number in between}
    return sorted({*inside, dimension.least, dimension.most})


_ALL, _BETWEEN = 16, 12


def largest(dimensions: Dimensions) -> ShapePoint:
    return {each.name: each.most for each in dimensions}


def smallest(dimensions: Dimensions) -> ShapePoint:
    return {each.name: each.least for each in dimensions}


def on_the_way(dimensions: Dimensions, share: float) -> ShapePoint:
    """The point so far from the smallest to the largest: every dimension grows by equal factors."""
    point = {}
    for each in dimensions:
        first, last = max(each.least, 1), max(each.most, 1)
        point[each.name] = min(max(round(first * (last / first) ** share), each.least), each.most)
    return point


def judged_at(dimensions: Dimensions) -> tuple[ShapePoint, ...]:
    """The largest point first; samples of the whole range; and some on the way from the smallest to the largest."""
    points = [largest(dimensions), *sample_points(dimensions, _ALL), *(on_the_way(dimensions, step / _BETWEEN) for step in range(_BETWEEN))]
    return tuple({tuple(point.values()): point for point in points}.values())


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


@dataclass(frozen=True, eq=False)
class _Grid:
    """The points at which operators are tried, what the graphs are there, and with what they are tried."""

    points: tuple[ShapePoint, ...]
    written: list[AtPoint]  # by point: programs share most of their nodes, and equal graphs do
    machine: Machine
    laboratory: Laboratory
    rates_us: dict[Node, float] = field(default_factory=dict)  # of the nodes written so far, by the device's rates

    @classmethod
    def of(cls, points: tuple[ShapePoint, ...], machine: Machine, laboratory: Laboratory) -> _Grid:
        return cls(points, at_points(points), machine, laboratory)

    def rated(self, device: Device, node: Node) -> float:
        if (us := self.rates_us.get(node)) is None:
            us = self.rates_us[node] = device.node_us(node)
        return us


def all_ranged(
    programs: Sequence[Captured], machine: Machine, laboratory: Laboratory, *, timed: bool, exact: bool
) -> list[tuple[Ranged, ...]]:
    """For each of the programs that were captured together its graph and those that compute the same, and what their nodes need.

    And take, where that matters. Raises CaptureError where an operator's real results lie otherwise at some point than the graph says.
    """
    grid = _Grid.of(measured_at(programs[-1].graph.dimensions), machine, laboratory)
    written = {tuple(point.values()): at_point for point, at_point in zip(grid.points, grid.written, strict=True)}
    ranged = [_ranged(each, grid, timed=timed, exact=exact) for each in programs]
    return [tuple(replace(each, written=written) for each in program) for program in ranged]


def _ranged(captured: Captured, grid: _Grid, *, timed: bool, exact: bool) -> tuple[Ranged, ...]:
    candidates: list[Ranged] = []
    equal = equal_graphs(captured.graph)

    def measures(graph: Graph) -> Measures | None:
        numbers = [each.graph(graph) for each in grid.written]
        spaces = _workspaces(numbers, grid, is_captured=graph is equal[0])
        if spaces is None:
            return None  # an equal graph whose operators give results that lie otherwise than it says is none
        return Measures.of(graph, grid.points, spaces, _times(numbers, captured, grid) if timed else ())

    for graph in equal:
        if (measured := measures(graph)) is not None:
            candidates.append(Ranged.of(graph, measured, held_by_eager=NOTHING_HELD if candidates else captured.held_storages))
    corners = largest(equal[-1].dimensions), smallest(equal[-1].dimensions)
    ends = [grid.written[grid.points.index(each)].graph(equal[-1]) for each in corners]
    rewritings = [*grid.machine.rewritings(ends[0], captured, grid.laboratory, exact=exact, limited=timed)]
    at_smallest = [*grid.machine.rewritings(ends[1], captured, grid.laboratory, exact=exact, limited=True)] if rewritings else []
    for over in (over_dimensions(equal[-1], each) for each in rewritings):
        if over is not None and (measured := measures(over.graph)) is not None:
            candidates.append(Ranged.by_algebra(over, measured, cost_of_applied(over.applied_rules, at_smallest)))
    return tuple(candidates)


def measured_at(dimensions: Dimensions) -> tuple[ShapePoint, ...]:
    """A grid over the range: the ends of every dimension, and numbers between."""
    return sample_points(dimensions, _OF_ONE if len(dimensions) < 2 else _OF_MANY)


def _workspaces(graphs: list[Graph], grid: _Grid, *, is_captured: bool) -> list[tuple[int, ...]] | None:
    """[points, nodes] bytes; None where some result lies otherwise than an equal graph says."""
    machine = grid.machine
    if not machine.tries or machine.simulated is not None:
        return [(0,) * len(graph.nodes) for graph in graphs]
    workspaces = []
    with machine.stages.stage("measure", "measuring operators' temporaries"):
        known: dict[Node, int] = {}  # what has no dimensions is the same node at every point
        for graph, point in zip(graphs, grid.points, strict=True):
            nodes = [node for node in graph.nodes if node not in known]
            measured = measure_workspaces(nodes, among=graph.nodes, laboratory=grid.laboratory)
            if measured.unlike and is_captured:
                raise _unlike(measured.unlike[0].op, point)
            if measured.unlike:
                return None
            known.update(zip(nodes, measured.nbytes, strict=True))
            workspaces.append(tuple(known[node] for node in graph.nodes))
    return workspaces


def _unlike(op: str, point: Mapping[str, int]) -> CaptureError:
    where = ", ".join(f"{name} = {number}" for name, number in point.items())
    return CaptureError(
        f"the results of {op} lie in memory otherwise for {where} than for other batches, so that no one program is for all of them: "
        "give dimensions ranges that leave this out"
    )


def _times(graphs: list[Graph], captured: Captured, grid: _Grid) -> NDArray[np.float64]:
    """[points, nodes] microseconds: measured for the largest and the smallest shapes, as a trial takes long.

    In between the machine's rates say how a time grows, and what is measured how far they are off: by a factor that goes evenly from one
    end to the other, over the logarithm of the time.
    """
    machine = grid.machine
    device = machine.simulated or device_here(machine.name(captured))
    rates = np.array([[grid.rated(device, node) for node in graph.nodes] for graph in graphs], np.float64)
    if machine.simulated is not None or not machine.tries:
        return rates
    ends = [place for place, point in enumerate(grid.points) if _is_end(point, captured.graph.dimensions)]
    with machine.stages.stage("measure", "measuring operators' times"):
        real = np.array([measure_timings(graphs[place].nodes, lambda: device, laboratory=grid.laboratory).us for place in ends])
    tiny = 1e-3  # microseconds: what takes none by one account may take some by the other
    factors = np.log((real + tiny) / (rates[ends] + tiny))
    span = np.log((rates[ends[0]] + tiny) / (rates[ends[-1]] + tiny))
    share = np.log((rates + tiny) / (rates[ends[-1]] + tiny)) / np.where(np.abs(span) < tiny, np.inf, span)
    times: NDArray[np.float64] = (rates + tiny) * np.exp(factors[-1] + share * (factors[0] - factors[-1])) - tiny
    return times.clip(0.0)


def _is_end(point: Mapping[str, int], dimensions: Dimensions) -> bool:
    """Whether a point has the most of all dimensions, or the least of all."""
    return all(point[each.name] == each.most for each in dimensions) or all(point[each.name] == each.least for each in dimensions)
