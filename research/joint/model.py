"""MODeL's joint program for order and addresses: a reference solver.

Steiner et al., "MODeL: Memory Optimizations for Deep Learning" (2023), sections 4 and 5 and appendix A. Numbers in brackets are the paper's
equations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from lowtide.placement import Placement
from lowtide.placement.base import placed
from lowtide.problems import Status
from lowtide.problems.placement import PlaceProblem
from lowtide.schedule import Schedule, Solver
from lowtide.schedule.base import scheduled
from research.addresses.common import first_placement, in_sequence
from research.buffers import Buffers, order_buffers
from research.joint.program import SOLVERS, Answer, Limits, Plan, Program
from research.joint.spans import WINDOWS, Spans, Windows
from research.joint.tensors import Tensor, Tensors
from research.joint.two_steps import Joint, JointProblem, joined, named
from research.needs import need_ortools
from research.orders.common import first_order

# Of an arena. A tolerance of a millionth is then about half a unit; CP-SAT is exact, but MathOpt hands it no number above ten million.
_LIMIT_UNITS = {"cp-sat": 2**23, "highs": 2**19, "scip": 2**19}


@dataclass(frozen=True)
class Model:
    """Binary variables say which node runs at each step (C) and which tensors are preserved from an earlier one (P), for each two tensors
    that may meet which lies below (a, b), and integers where each lies (A): (1) to (9).

    `windows` are the spans of (10), from which useful lifetimes (11) and preservation (12) follow: by "distance" as in the paper, by
    "count" of ancestors and descendants, which is tighter, or "all" steps for all. `prune` leaves out pairs that never meet (section A.2).
    With an `order` that solver's order is kept and only addresses are asked for (section 5.4); without `addresses`, only the order
    (section 5.5), and its addresses are then put down in the order of their sizes.

    The paper's tensors each have a node that makes them and somebody that reads them. Here, beyond it:

    - C is one variable for all that a node makes, which is (5), and nodes that make nothing have it too.
    - At each of the n steps one node runs. The paper allows several, but says that at least one does: with n steps that is the same.
    - A workspace is a tensor that nobody reads; a predecessor that hands over nothing hands over a tensor of no bytes. A tensor that is
      kept is preserved at the last step, one that is there from the start may be preserved at the first.
    - A node that takes over the memory of a tensor that dies at it has its output at that tensor's address.
    - M is the arena of the best heuristic's order and placement, which are the solver's hint, not the sum of all sizes.
    - `cut` holds peak_mem above the bytes alive at each step: true anyway, but without it a solver's bound stays near 0.
    - Of the addresses found only the sequence is taken, and buffers are put down anew in that sequence: within a solver's tolerance, a
      binary variable of 0.000001 times M can let two tensors overlap.

    The bound is the solver's own, less the tolerance of those that have one, rounded to whole units; where the sizes' common divisor is
    too small a unit for that, sizes are rounded down, and the bound may stay below the optimum. `max_effort` is CP-SAT's deterministic
    time, `max_nodes` what the others may branch: the same effort gives the same answer on every machine; `max_seconds` is only a cap. A
    program of more than `max_size` variables and constraints is not built: the answer then is the heuristics'.

    Raises ImportError where ortools is not installed, ValueError for an unknown solver or window.
    """

    solver: str = "cp-sat"  # or "highs", "scip"
    order: Solver | None = None
    addresses: bool = True
    windows: Windows = "distance"
    prune: bool = True
    cut: bool = True
    max_effort: float = 60.0
    max_nodes: int = 100_000
    max_seconds: float = 600.0
    max_size: int = 500_000

    def __post_init__(self) -> None:
        for what, value, known in (("solver", self.solver, SOLVERS), ("windows", self.windows, WINDOWS)):
            if value not in known:
                raise ValueError(f"{what}: expected one of {', '.join(map(repr, known))}, got {value!r}")
        if self.order is not None and not self.addresses:
            raise ValueError("expected something to ask for, got a given order and no addresses")
        if not (self.max_effort > 0 and self.max_nodes > 0 and self.max_seconds > 0):
            raise ValueError(f"expected max_effort, max_nodes and max_seconds above 0, got {self}")

    def solve(self, problem: JointProblem) -> Joint:
        """The solver's answer and bound, or the heuristics' answer where it is no worse. `stats` count variables, pairs and constraints."""
        need_ortools(self)
        first = self._first(problem)
        tensors = Tensors.of(problem.order, problem.align_bytes, first.arena_bytes, _LIMIT_UNITS[self.solver])
        plan = self._plan(problem, first, tensors)
        if self._is_proven(first) or plan.size > self.max_size or problem.order.node_count == 0:
            return joined(problem, first.schedule, first.placement, self, stats={"pairs": len(plan.pairs)})
        program = Program(plan, self.addresses)
        limits = Limits(self.solver, self.max_effort, self.max_nodes, self.max_seconds)
        answer = program.solve(limits, _steps(first.schedule), _known(problem, first, tensors))
        schedule, placement = self._decoded(problem, tensors, answer, first)
        bound_bytes = answer.least_units * tensors.unit_bytes if self.order is None else 0  # of all orders
        stats = {"pairs": len(plan.pairs), "variables": program.variables, "constraints": program.constraints}
        return joined(problem, schedule, placement, self, bound_bytes=bound_bytes, stats=stats)

    def _first(self, problem: JointProblem) -> Joint:
        """What is known before the program is solved."""
        schedule = first_order(problem.order) if self.order is None else self.order.solve(problem.order)
        return joined(problem, schedule, _by_size(problem.buffers(schedule.order)), self)

    def _plan(self, problem: JointProblem, first: Joint, tensors: Tensors) -> Plan:
        order, resident_bytes = first.schedule.order, problem.order.resident_bytes
        spans = Spans.of(problem.order, order, self.windows) if self.order is None else Spans.fixed(problem.order, order)
        least_bytes, most_bytes = first.schedule.lower_bound_bytes - resident_bytes, first.schedule.peak_bytes - resident_bytes
        if self.addresses:
            least_bytes, most_bytes = first.lower_bound_bytes, first.arena_bytes
        units = least_bytes // tensors.unit_bytes if tensors.exact else 0, most_bytes // tensors.unit_bytes
        return Plan.of(tensors, spans, units, addresses=self.addresses, prune=self.prune, cut=self.cut)

    def _is_proven(self, first: Joint) -> bool:
        """Whether nothing is left to be asked."""
        return first.status is Status.OPTIMAL if self.addresses else first.schedule.status is Status.OPTIMAL

    def _decoded(self, problem: JointProblem, tensors: Tensors, answer: Answer, first: Joint) -> tuple[Schedule, Placement]:
        """Order and addresses of the solver's answer, or the first ones where those are as good."""
        if not answer.runs:
            return first.schedule, first.placement
        order = execution_sequence(answer.runs)
        if not self.addresses:
            schedule = self._best(problem, (order, first.schedule.order), answer.least_units * tensors.unit_bytes)
            return schedule, _by_size(problem.buffers(schedule.order))
        schedule = scheduled(problem.order, order, named(self), bound_bytes=first.schedule.lower_bound_bytes)
        placement = self._placed(order_buffers(problem.order, schedule.order, align_bytes=problem.align_bytes), tensors, answer)
        better = placement.arena_bytes < first.arena_bytes or (self.order is not None and placement.arena_bytes == first.arena_bytes)
        return (schedule, placement) if better else (first.schedule, first.placement)

    def _best(self, problem: JointProblem, orders: Sequence[Sequence[int]], bound_bytes: int) -> Schedule:
        """The order of the lowest peak, given that none has a peak below the bound beside what is resident."""
        bound_bytes += problem.order.resident_bytes
        schedules = [scheduled(problem.order, order, named(self), bound_bytes=bound_bytes) for order in orders]
        return min(schedules, key=lambda schedule: schedule.peak_bytes)

    def _placed(self, buffers: Buffers, tensors: Tensors, answer: Answer) -> Placement:
        address = np.zeros(buffers.problem.buffer_count)
        for tensor, at in zip(tensors.all, answer.address, strict=True):
            if (buffer := buffer_of(buffers, tensor)) >= 0:
                address[buffer] = at
        offsets = in_sequence(buffers.problem, np.argsort(address, kind="stable").tolist())
        bound_bytes = answer.least_units * tensors.unit_bytes
        return placed(buffers.problem, offsets, _Sequence(), bound_bytes=bound_bytes)


def execution_sequence(runs: Sequence[Sequence[int]]) -> list[int]:
    """Function 1: the nodes step by step, each once."""
    return list(dict.fromkeys(node for nodes in runs for node in nodes))


def buffer_of(buffers: Buffers, tensor: Tensor) -> int:
    """The buffer that holds a tensor, -1 where it needs none."""
    if tensor.number >= 0:
        return int(buffers.of_tensor[tensor.number])
    return -1 if tensor.preserved else int(buffers.of_workspace[tensor.node])


def _steps(schedule: Schedule) -> dict[int, int]:
    """The step at which each node runs."""
    return {node: step for step, node in enumerate(schedule.order)}


def _known(problem: JointProblem, first: Joint, tensors: Tensors) -> list[int]:
    """Where each tensor lies in a known placement, in units."""
    buffers = order_buffers(problem.order, first.schedule.order, align_bytes=problem.align_bytes)
    numbers = [buffer_of(buffers, tensor) for tensor in tensors.all]
    return [first.placement.offsets[buffer] // tensors.unit_bytes if buffer >= 0 else 0 for buffer in numbers]


def _by_size(buffers: PlaceProblem) -> Placement:
    """Addresses without a solver."""
    return placed(buffers, first_placement(buffers, None).offsets, _Sequence())


@dataclass(frozen=True)
class _Sequence:
    """Says where a placement came from: buffers put down in a sequence, that of their sizes or of the program's addresses."""

    def place(self, problem: PlaceProblem, capacity_bytes: int | None = None) -> Placement:
        return first_placement(problem, capacity_bytes)
