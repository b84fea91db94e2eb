"""One program of a family: a graph over dimensions in an order, and what it takes at each point."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from lowtide.cost.measures import Measures
from lowtide.cost.memory import simulate
from lowtide.cost.symbolic import Footprints, same_for_all
from lowtide.ir.check.graph_check import check_graph, check_order, check_reuses
from lowtide.ir.graph import Graph
from lowtide.ir.shapes.points import at
from lowtide.planning.request import Request
from lowtide.problems.order import Ints
from lowtide.ranges.candidate import Ranged
from lowtide.ranges.pace import Pace, paces_at
from lowtide.ranges.points import largest
from lowtide.remat.write_out import rematerialise


@dataclass(frozen=True, eq=False)
class Written:
    """A member as `lower` takes it: what is decided is the same at every point."""

    graph: Graph
    order: tuple[int, ...]  # indices into graph.nodes, by step
    reuses: tuple[int, ...]  # by node: which of its `inplace` candidates' memory it takes over, -1 for none


@dataclass(frozen=True, eq=False)
class Member:
    """A candidate in an order, or as a sequence says, and what that takes at every point. It is written as a graph when it is first run."""

    ranged: Ranged  # the candidate
    candidate: int  # which of its program's it is
    own_order: tuple[int, ...]  # of its nodes; empty where there is a sequence
    sequence: Ints | None
    granule_bytes: int
    footprints: Footprints
    pace: Pace | None = None  # where times matter

    @property
    def measures(self) -> Measures:
        return self.ranged.measures

    @property
    def graph(self) -> Graph:
        """What runs, over dimensions. Raises CheckError where it is wrong."""
        return self._written.graph

    @property
    def order(self) -> tuple[int, ...]:
        return self._written.order

    @property
    def reuses(self) -> tuple[int, ...]:
        """By node: which of its `inplace` candidates' memory it takes over, -1 for none."""
        return self._written.reuses

    def peak_bytes(self, point: Mapping[str, int]) -> int:
        """What it takes at a point, with what is resident: the promise of its plan there. Raises ShapeError for a wrong point."""
        return self.footprints.at(point, self.measures.columns_at(point))

    def time_us(self, point: Mapping[str, int]) -> float:
        """What it takes at a point, 0 where times do not matter. Raises ShapeError for a wrong point."""
        return 0.0 if self.pace is None else float(paces_at(self.measures, point, self.pace.runs[None], self.pace.waits_us[None])[0])

    @cached_property
    def _written(self) -> Written:
        graph, order, there = self.ranged.graph, self.own_order, self.ranged.at_largest
        if self.sequence is not None:
            graph = rematerialise(graph, self.sequence.tolist()).graph
            order, there = tuple(range(len(graph.nodes))), at(graph, largest(graph.dimensions))
        written = Written(graph, order, tuple(map(int, simulate(same_for_all(there, graph), order).reuses)))
        _check(written, there)
        return written


def in_order(candidates: Sequence[Ranged], which: int, order: Sequence[int], request: Request) -> Member:
    """A candidate's own nodes in an order. Raises CheckError where that is no order of them."""
    ranged = candidates[which]
    footprints = Footprints.of(ranged.order_problem(request.granule_bytes), order, ranged.measures.columns.tolist())
    return Member(ranged, which, tuple(map(int, order)), None, request.granule_bytes, footprints)


def in_sequence(candidates: Sequence[Ranged], which: int, sequence: Ints, request: Request) -> Member:
    """A candidate's nodes as a sequence says, some of them again."""
    ranged = candidates[which]
    problem = ranged.remat_problem(request)
    pace = Pace.of(problem, sequence) if ranged.measures.is_timed else None
    return Member(ranged, which, (), sequence, request.granule_bytes, problem.footprints(sequence), pace)


def _check(written: Written, there: Graph) -> None:
    """Raises CheckError where at the largest point, at which the graph is `there`, graph, order or reuses break a rule."""
    check_graph(there)
    check_order(there, written.order)
    check_reuses(there, written.order, written.reuses)
