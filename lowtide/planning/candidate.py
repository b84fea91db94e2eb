"""Candidates: graphs that compute what the captured one does, and what follows from each, derived once."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple, Protocol, TypeVar

import numpy as np

from lowtide.cost.device import Device
from lowtide.cost.memory import order_problem, profile_of, simulate
from lowtide.ir.graph import NOTHING_HELD, Graph, HeldStorages, Kind, Node
from lowtide.ir.operators.nodes import serving_collectives
from lowtide.ir.shapes.points import at
from lowtide.plan.contents import Timeline
from lowtide.plan.plan import Plan, program_hash
from lowtide.plan.snapshot import Snapshot
from lowtide.problems.order import Ints, OrderProblem
from lowtide.remat.ahead import ahead_of_all
from lowtide.remat.offload import offloadable_storages
from lowtide.remat.problem import RematProblem
from lowtide.remat.pruning import prompt
from lowtide.rewrite.results import read_results, split_results
from lowtide.rewrite.rewritings import ALIGNMENT, AppliedRule
from lowtide.schedule import Schedule, Solver, schedule, schedule_all

_REWRITES = (read_results, split_results)

T = TypeVar("T")


class Captured(Protocol):
    @property
    def graph(self) -> Graph:
        """What it computes."""

    @property
    def held_storages(self) -> HeldStorages:
        """What eager PyTorch holds of it for longer."""


class Eager(NamedTuple):
    peak_bytes: int
    peak: Snapshot | None  # None where it has no steps
    timeline: Timeline
    own: tuple[int, ...]  # by its step: the node of the graph, or -1 for what nothing needs
    lives: tuple[tuple[Kind, int, int, int], ...]  # of all tensors: kind, bytes, the steps over which they live

    def timed(self, node_us: Sequence[float]) -> Timeline:
        """Its timeline with the times of the graph's nodes, where those are known."""
        return dataclasses.replace(self.timeline, us=tuple(node_us[at] if at >= 0 else 0.0 for at in self.own) if node_us else ())


@dataclass(frozen=True, eq=False)
class Candidate:
    """A graph, and what its nodes need and take. What follows from that is derived when it is first asked for, and kept."""

    graph: Graph
    workspace_bytes: tuple[int, ...]  # by node, beside its inputs and results; 0 where unknown
    node_us: tuple[float, ...] = ()  # by node; empty where times do not matter
    exact: bool = True  # its numbers are the captured graph's, to the last bit
    held_by_eager: HeldStorages = NOTHING_HELD  # of the captured graph
    costs_time: bool = False  # it takes longer than the captured graph
    applied_rules: tuple[AppliedRule, ...] = ()  # what algebra did to it
    root: int = -1  # which of the graphs, in the order in which they are made, it is or was split of; -1 where nothing was split
    generated: bool = False  # it runs generated kernels, which are faster than any order of torch's
    issue_us: tuple[float, ...] = ()  # by node, what it takes the host to issue it; empty where the host itself computes
    problem_of: Callable[[int], OrderProblem] | None = field(default=None, repr=False)  # by granule: a shorter way to the ordering problem
    # What was asked, and the answer: one that is made from this one by `replace` begins with nothing.
    _known: list[tuple[tuple[object, ...], Any]] = field(init=False, default_factory=list, repr=False)

    @property
    def algebra_us(self) -> float:
        """What algebra made it take more than the captured graph, below 0 for less."""
        return sum(applied_rule.cost_us for applied_rule in self.applied_rules)

    @property
    def is_padded(self) -> bool:
        """Whether products are padded, which spares time and takes room."""
        return any(each.rule == ALIGNMENT.name for each in self.applied_rules)

    def timed(self, node_us: Sequence[float], issue_us: Sequence[float] = ()) -> Candidate:
        """The same, knowing what its nodes take, and take the host beside; what was derived is kept, as times are part of its questions."""
        timed = dataclasses.replace(self, node_us=tuple(node_us), issue_us=tuple(issue_us))
        timed._known.extend(self._known)
        return timed

    def order_problem(self, granule_bytes: int) -> OrderProblem:
        """The ordering problem, with sizes rounded up to the granule."""

        def problem() -> OrderProblem:
            if self.problem_of is not None:
                return self.problem_of(granule_bytes)
            return order_problem(self.graph, self.workspace_bytes, round_to=granule_bytes)

        return self._once(("problem", granule_bytes), problem)

    def bare_problem(self, granule_bytes: int, swap_state: bool) -> OrderProblem:
        """The same; with `swap_state`, what of the caller's may be offloaded is not resident but among its tensors."""
        if not swap_state:
            return self.order_problem(granule_bytes)
        settings: dict[str, Any] = {"round_to": granule_bytes, "offloadable": offloadable_storages(self.graph)}
        return self._once(("bare", granule_bytes), lambda: order_problem(self.graph, self.workspace_bytes, **settings))

    def ordered(self, solver: Solver, granule_bytes: int) -> Schedule:
        """The order of least peak that `solver` finds; after `order_together` what that found."""
        return self._once(("order", solver, granule_bytes), lambda: schedule(self.order_problem(granule_bytes), solver))

    def know_order(self, solver: Solver, granule_bytes: int, order: Schedule) -> None:
        """Take an order that `solver` found earlier, in place of finding it again."""
        self._once(("order", solver, granule_bytes), lambda: order)

    def remat_problem(self, granule_bytes: int, links: Device | None = None, swap_state: bool = False) -> RematProblem:
        """The problem of sequences in which nodes run again, and over `links` tensors are swapped."""

        def problem() -> RematProblem:
            settings: dict[str, Any] = {
                "round_to": granule_bytes,
                "swap": links,
                "swap_state": swap_state,
                "known": self.order_problem(granule_bytes),
                "issue_us": self.issue_us,
            }
            return RematProblem.of(self.graph, self.node_us, self.workspace_bytes, **settings)

        return self._once(("remat", self.node_us, self.issue_us, granule_bytes, links, swap_state), problem)

    def orders(self, problem: RematProblem, solver: Solver, granule_bytes: int) -> list[Ints]:
        """Those from which sequences are searched: as written, with updates as soon as can be, of least peak, and with copies ahead."""
        least = np.array(self.ordered(solver, granule_bytes).order, np.int32)
        exchanged = list(serving_collectives(self.graph.nodes))
        orders = [prompt(problem, problem.sequence_of(range(len(self.graph.nodes))), exchanged), problem.sequence_of(least)]
        return [*orders, *islice(ahead_of_all(problem, orders[0]), 1)]

    def eager(self, granule_bytes: int) -> Eager:
        """The program as it stands: in place only where it works so itself, holding to the end what eager PyTorch holds."""

        def played() -> Eager:
            longer = self.held_by_eager
            graph = _as_eager(self.graph, longer)
            index = {_names(node): number for number, node in enumerate(self.graph.nodes)}
            own = tuple(index.get(_names(node), -1) for node in graph.nodes)
            spaces = [self.workspace_bytes[at] if at >= 0 else 0 for at in own]  # of what nothing needs none was measured
            order = range(len(graph.nodes))
            problem = order_problem(graph, spaces, round_to=granule_bytes, eager=True, held_storages=longer)
            profile = profile_of(graph, problem, order, simulate(problem, order), round_to=granule_bytes)
            spans = tuple((tensor.kind, tensor.nbytes, tensor.start, tensor.end) for tensor in profile.tensors)
            timeline = Timeline.of(spans, profile.workspace_bytes, graph.nodes)
            return Eager(profile.peak_bytes, profile.snapshot(graph, order), timeline, own, spans)

        return self._once(("eager", granule_bytes), played)

    def program(self, torch: str, granule_bytes: int) -> str:
        """What a plan for this program is bound to: the program, torch's version, and what sizes are rounded up to.

        Not the machine whose times it was made for: a plan for one that was simulated runs on the one that is there.
        """
        return self._once(("program", torch, granule_bytes), lambda: program_hash(self.graph, torch, granule_bytes))

    def _once(self, question: tuple[object, ...], make: Callable[[], T]) -> T:
        for known, answer in self._known:  # few, and a device or solver need not have a hash
            if known == question:
                derived: T = answer
                return derived
        derived = make()
        self._known.append((question, derived))
        return derived


def _as_eager(graph: Graph, storages: HeldStorages) -> Graph:
    """The program as eager runs it, whose graph is this one. What is held to the end is among its outputs."""
    if storages.program is not None:
        graph = storages.program if storages.point is None else at(storages.program, storages.point)
    names = {value.name for value in storages.values}
    kept = (value for node in graph.nodes for value in node.results if value.name in names)
    return dataclasses.replace(graph, outputs=(*graph.outputs, *kept))


def _names(node: Node) -> str:
    return " ".join([node.op, *(value.name for value in node.results)])


def order_together(candidates: Sequence[Candidate], solver: Solver, granule_bytes: int, enough_bytes: int = 0) -> None:
    """Have them ordered for the least peak of any: one that cannot have it keeps the order that was found until that was known.

    All keep what they have where one needs no more than `enough_bytes`.
    """
    question = ("order", solver, granule_bytes)
    unknown = [each for each in candidates if all(known != question for known, _ in each._known)]
    if not unknown:
        return
    orders = schedule_all([each.order_problem(granule_bytes) for each in unknown], solver, enough_bytes)
    for each, order in zip(unknown, orders, strict=True):
        each._known.append((question, order))


def in_order(plan: Plan, problem: OrderProblem, order: Sequence[int]) -> Plan:
    """The plan in an order of its graph, whose problem this is: what works in place, the peak and what stands there are counted anew."""
    footprint = simulate(problem, order)
    profile = profile_of(plan.graph, problem, order, footprint, round_to=plan.granule_bytes)
    return dataclasses.replace(
        plan,
        order=tuple(order),
        reuses=tuple(footprint.reuses.tolist()),
        peak_bytes=int(footprint.peak_bytes),
        status="optimal" if plan.lower_bound_bytes >= footprint.peak_bytes else "feasible",
        peak=profile.snapshot(plan.graph, order),
    )


def equal_graphs(graph: Graph) -> tuple[Graph, ...]:
    """The graphs that compute what `graph` does, bit for bit, and may need less memory; `graph` itself first."""
    graphs = [graph]
    for rewrite in _REWRITES:
        graphs += [done.graph for old in graphs if (done := rewrite(old)).forward]
    return tuple(graphs)
