"""The program runs, operator by operator; memory is looked at before each, and all is decided on the way.

takes   what was found at compile time, a point, and what nodes take there
leaves  the sequence that was run, as `remat.entries` writes it: it can be written out by `remat.write_out` and lowered as any other

Two figures say what it took. `peak_bytes` counts what was run as every sequence is counted: a copy lives until it is read last.
`held_bytes` is what the machine saw, where a copy stays until the eviction that ended it was found necessary.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from lowtide.cost.device import Device
from lowtide.ir.shapes.points import at
from lowtide.problems.order import Ints
from lowtide.remat.cost import cost_of
from lowtide.remat.problem import RematProblem
from research.eviction.choice import Choice, Victim
from research.eviction.compile_time import Compiled
from research.eviction.live import Live

_LONGEST = 12  # a run of more entries than this many times the nodes is no answer: from there on nothing is evicted any more


@dataclass(frozen=True)
class Misfit:
    """Where the program first passed the limit."""

    position: int  # in the sequence that was run
    name: str  # of the node, or of what was loaded
    need_bytes: int  # beside what was there
    held_bytes: int  # what was there, with nothing left to evict
    limit_bytes: int

    def __str__(self) -> str:
        need = f"{self.name} needs {self.need_bytes:,} bytes beside {self.held_bytes:,} that cannot be evicted"
        return f"expected at most {self.limit_bytes:,} bytes; at position {self.position}, {need}: raise the limit"


@dataclass(frozen=True, eq=False)
class Executed:
    """What was run, and what that took."""

    sequence: Ints  # as `remat.entries` says
    peak_bytes: int  # with what is resident
    held_bytes: int  # the most that the machine held: at least the peak
    time_us: float
    evictions: int
    misfit: Misfit | None  # None where the limit was kept


def executed(
    program: Compiled,
    point: Mapping[str, int],
    cost_us: Sequence[float],
    workspace_bytes: Sequence[int],
    limit_bytes: int,
    *,
    round_to: int = 1,
    swap: Device | None = None,
) -> Executed:
    """Run a program at a point of its range within a limit that counts what is resident; nothing is evicted before it would be passed.

    `cost_us` and `workspace_bytes` are by node, at that point. Over the links of `swap` tensors may be reloaded.
    Raises ShapeError for a wrong point. What does not fit runs all the same, and `misfit` says where.
    """
    problem = problem_at(program, point, cost_us, workspace_bytes, round_to=round_to, swap=swap)
    return _Machine(program, problem, limit_bytes).executed()


def problem_at(
    program: Compiled,
    point: Mapping[str, int],
    cost_us: Sequence[float],
    workspace_bytes: Sequence[int],
    *,
    round_to: int = 1,
    swap: Device | None = None,
) -> RematProblem:
    """The problem of sequences at a point; nodes take over memory only where they may everywhere."""
    known = replace(replace(program.problem, round_to=round_to).at(point), workspace_bytes=np.array(workspace_bytes, np.int64))
    return RematProblem.of(at(program.graph, point), cost_us, workspace_bytes, round_to=round_to, swap=swap, known=known)


@dataclass
class _Task:
    """Nodes that have to run now: one of the order, or those that make an evicted tensor again."""

    nodes: tuple[int, ...]
    target: int = -1  # the tensor; -1 for a node of the order
    pending: tuple[int, ...] = ()


class _Machine:
    """Runs a program once."""

    def __init__(self, program: Compiled, problem: RematProblem, limit_bytes: int) -> None:
        self.program, self.problem, self.limit_bytes = program, problem, limit_bytes
        self.live = Live(problem, program.uses)
        self.stored: set[int] = set()
        self.choice = Choice(program, problem, self.live, self.stored)
        self.entries: list[int] = []
        self.tasks: list[_Task] = []
        self.held_bytes = self.live.level_bytes
        self.evictions = 0
        self.misfit: Misfit | None = None

    def executed(self) -> Executed:
        """All nodes of the order, one after another."""
        self.make_room(0, set(), "the start")
        for position, node in enumerate(self.program.order):
            self.live.position, self.live.passed = position, False
            self.step(node)
        sequence = np.array(self.entries, np.int32)
        cost = cost_of(self.problem, sequence)
        peak_bytes = cost.peak_bytes if self.entries else self.held_bytes  # where nothing runs, what is there from the start
        return Executed(sequence, peak_bytes, self.held_bytes, cost.time_us, self.evictions, self.misfit)

    def step(self, node: int) -> None:
        """A node of the order, and before it whatever of its inputs is not there."""
        self.tasks = [_Task((node,), pending=(node,))]
        while self.tasks:
            task = self.tasks[-1]
            if task.target >= 0:
                task.pending = self.pending(task)
            if not task.pending:
                self.tasks.pop()
            elif (tensor := self.live.missing(task.pending[0])) < 0:
                self.run(task)
            elif self.live.decisions[tensor].nodes:
                self.tasks.append(_Task(self.live.decisions[tensor].nodes, tensor))
            else:
                self.load(tensor)

    def pending(self, task: _Task) -> tuple[int, ...]:
        """Of a regeneration the nodes that have to run, as things are."""
        live, nodes = self.live, list[int]()
        wanted = set() if live.there[task.target] else {task.target}
        for node in reversed(task.nodes):
            if not wanted.isdisjoint(live.makes[node]):
                nodes.append(node)
                wanted |= {tensor for tensor in live.reads[node] if not live.there[tensor]}
        return tuple(reversed(nodes))

    def run(self, task: _Task) -> None:
        """The next node of a task, all of whose inputs are there."""
        node, *rest = task.pending
        task.pending = tuple(rest)
        self.live.passed = task.target < 0
        locked = self.locked()
        need = self.live.need_bytes(node, locked)
        self.make_room(need, locked | set(self.live.reads[node]), self.problem.problem.names[node])
        self.live.run(node, locked)
        self.entries.append(node)

    def locked(self) -> set[int]:
        """What the nodes that have begun to come together want to be there."""
        return {tensor for task in self.tasks for node in task.pending for tensor in self.live.reads[node]}

    def load(self, tensor: int) -> None:
        """Fetch an evicted tensor from the host."""
        locked = self.locked()
        self.make_room(self.live.bytes[tensor], locked, f"a load of {self.live.bytes[tensor]:,} bytes")
        self.live.arrive(tensor, locked)
        self.entries.append(self.problem.codes.load(tensor))

    def make_room(self, need_bytes: int, locked: set[int], name: str) -> None:
        """Evict what is best evicted until so many bytes fit beneath the limit; nothing where they do."""
        live = self.live
        if live.level_bytes + need_bytes > self.limit_bytes and len(self.entries) < _LONGEST * len(self.program.order):
            candidates = [(each.score, each.tensor) for each in self.choice.victims(locked)]
            heapq.heapify(candidates)
            while candidates and live.level_bytes + need_bytes > self.limit_bytes:
                score, tensor = heapq.heappop(candidates)
                victim = self.choice.victim(tensor)  # the ones before may have changed what it costs
                if victim is not None and victim.score > score:
                    heapq.heappush(candidates, (victim.score, tensor))
                elif victim is not None:
                    self.evict(victim)
        if live.level_bytes + need_bytes > self.limit_bytes and self.misfit is None:
            self.misfit = Misfit(len(self.entries), name, need_bytes, live.level_bytes, self.limit_bytes)
        self.held_bytes = max(self.held_bytes, live.level_bytes + need_bytes)

    def evict(self, victim: Victim) -> None:
        """A tensor goes; to the host first, where it is to be loaded from there."""
        tensor, codes = victim.tensor, self.problem.codes
        if not victim.decision.nodes:
            self.entries += [codes.drop(tensor)] if tensor in self.stored else [codes.store(tensor), codes.drop(tensor)]
            self.stored.add(tensor)
        self.live.evict(tensor, victim.decision)
        self.evictions += 1
