"""One program of a family: a graph over dimensions in an order, and what it takes at each point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lowtide.cost.footprints import Footprints
from lowtide.cost.measures import Measures
from lowtide.cost.memory import simulate
from lowtide.cost.symbolic import symbolic_problem
from lowtide.ir.check.graph_check import check_graph, check_order, check_reuses
from lowtide.ir.graph import Graph
from lowtide.ir.shapes.at import at
from lowtide.planning.ranges.ranged import Ranged
from lowtide.planning.request import Request
from lowtide.problems.order import Ints
from lowtide.remat.cost import cost_of
from lowtide.remat.write_out import rematerialise


@dataclass(frozen=True, eq=False)
class Member:
    """A graph, its order and what works in place, the same at every point; `lower` writes it as one program."""

    graph: Graph
    order: tuple[int, ...]  # indices into graph.nodes, by step
    reuses: tuple[int, ...]  # by node: which of its `inplace` candidates' memory it takes over, -1 for none
    candidate: int  # which it is made of
    sequence: Ints | None  # over that one's graph; None where it is that graph in another order
    measures: Measures  # of that candidate's nodes
    footprints: Footprints
    grid_us: NDArray[np.float64]  # [k] its time at the points of the measures' grid; empty where times do not matter

    def peak_bytes(self, point: Mapping[str, int]) -> int:
        """What it takes at a point, with what is resident: the promise of its plan there. Raises ShapeError for a wrong point."""
        return self.footprints.at(point, self.measures.columns_at(point))

    def time_us(self, point: Mapping[str, int]) -> float:
        """What it takes at a point, 0 where times do not matter; in between points that were measured, interpolated. Raises ShapeError."""
        return float(self.measures.grid.between(point, self.grid_us)) if len(self.grid_us) else 0.0


def in_order(candidates: Sequence[Ranged], which: int, order: Sequence[int], request: Request) -> Member:
    """A candidate's own nodes in an order. Raises CheckError where that is wrong."""
    ranged = candidates[which]
    return _member(ranged, which, ranged.graph, order, range(len(order)), None, request, np.empty(0))


def in_sequence(candidates: Sequence[Ranged], which: int, sequence: Ints, request: Request) -> Member:
    """A candidate's nodes as a sequence says, some of them again. Raises CheckError where that is wrong."""
    ranged = candidates[which]
    done = rematerialise(ranged.graph, sequence.tolist())
    problems = (
        ranged.at(point).remat_problem(request.granule_bytes, request.links, request.swap_state) for point in ranged.measures.grid.points
    )
    times = [cost_of(problem, sequence).time_us for problem in problems] if ranged.measures.node_us.size else []
    return _member(ranged, which, done.graph, range(len(done.graph.nodes)), done.origins, sequence, request, np.array(times))


def _member(
    ranged: Ranged,
    which: int,
    graph: Graph,
    order: Sequence[int],
    origins: Sequence[int],
    sequence: Ints | None,
    request: Request,
    times: NDArray[np.float64],
) -> Member:
    problem = symbolic_problem(graph, round_to=request.granule_bytes)
    reuses = tuple(map(int, simulate(problem.structure, order).reuses))
    columns = np.append(ranged.measures.columns, -1)[list(origins)]  # what is copied to the host and back needs no workspace
    footprints = Footprints.of(problem, order, columns.tolist())
    member = Member(graph, tuple(map(int, order)), reuses, which, sequence, ranged.measures, footprints, times)
    _check(member)
    return member


def _check(member: Member) -> None:
    """Raises CheckError where at the largest or the smallest point graph, order or reuses break a rule."""
    dimensions = member.graph.dimensions
    for point in ({each.name: each.most for each in dimensions}, {each.name: each.least for each in dimensions}):
        graph = at(member.graph, point)
        check_graph(graph)
        check_order(graph, member.order)
        check_reuses(graph, member.order, member.reuses)
