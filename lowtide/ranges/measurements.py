"""What the operators of a program need and take over a range: measured at a grid of its points, or by the rates of a machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from lowtide.cost.device import Device
from lowtide.cost.laboratory import Laboratory
from lowtide.cost.measures import Measures
from lowtide.cost.timings import device_here, measure_timings
from lowtide.cost.workspaces import measure_workspaces
from lowtide.errors import CaptureError
from lowtide.ir.graph import NOTHING_HELD, Graph, Node
from lowtide.ir.shapes.dimension import Dimensions
from lowtide.ir.shapes.points import AtPoint, at_points
from lowtide.planning.candidate import Captured, equal_graphs
from lowtide.planning.machine import Machine
from lowtide.ranges.candidate import Ranged
from lowtide.ranges.points import ShapePoint, largest, sample_points, smallest
from lowtide.rewrite.rewritings import cost_of_applied, over_dimensions

_OF_ONE, _OF_MANY = 3, 4  # points that are measured, of a range of one dimension and of more


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
        """What a node takes by the rates of the device."""
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
