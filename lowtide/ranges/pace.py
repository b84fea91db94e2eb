"""What sequences take at every point of a range: one structure, of which sizes and times alone differ from point to point.

What a sequence takes is linear in the sizes of tensors, as no lifetime depends on them: played once for each term that sizes are sums of,
it gives what it takes everywhere (`cost.symbolic`). No graph is written for that.

How long sequences take at any point of a range: what each node takes there, as often as it runs, and what is waited for copies.

So a sequence takes at each point what it takes where that point is planned alone. Waits follow from all that runs at once: they are known
where operators were measured, and in between on the line.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lowtide.cost.device import Device
from lowtide.cost.measures import Measures
from lowtide.cost.memory import resident_storages
from lowtide.cost.symbolic import Footprints, SymbolicProblem, Terms
from lowtide.ir.graph import Graph
from lowtide.problems.order import Ints
from lowtide.remat.cost import cost_of, footprint_of
from lowtide.remat.offload import movable_storages
from lowtide.remat.problem import Links, RematProblem


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
            graph.dimensions, structure.problem, tuple(each.nbytes for each in tensors), (0,) * len(graph.nodes),
            tuple(each.nbytes for each in resident_storages(graph) if each in resident), round_to,
        )  # fmt: skip
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
