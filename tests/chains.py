"""Training steps of chains of blocks, as bare problems: what searches over blocks are tried on."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
from hypothesis import strategies as st

from lowtide.problems.order import Ints, OrderProblem, Rows, Task
from lowtide.remat.problem import RematProblem


@dataclass
class Builder:
    """A problem being written, node by node."""

    sizes: list[int] = field(default_factory=list)
    tasks: list[Task] = field(default_factory=list)
    costs: list[float] = field(default_factory=list)
    repeatable: list[bool] = field(default_factory=list)
    limits: list[list[int]] = field(default_factory=list)

    def node(self, reads: tuple[int, ...], makes: tuple[int, ...], cost_us: float = 1.0, *, repeatable: bool = True) -> tuple[int, ...]:
        """A node that makes tensors of these sizes; their numbers."""
        made = tuple(range(len(self.sizes), len(self.sizes) + len(makes)))
        self.sizes += makes
        self.tasks.append(Task("", made, tuple(dict.fromkeys(reads))))
        self.costs.append(cost_us)
        self.repeatable.append(repeatable and bool(makes))
        self.limits.append([])
        return made

    def problem(self, resident_bytes: int = 0) -> RematProblem:
        count = len(self.tasks)
        ptr = np.concatenate([[0], np.cumsum([len(row) for row in self.limits])]).astype(np.int32)
        return RematProblem(
            problem=OrderProblem.of(self.sizes, self.tasks, resident_bytes=resident_bytes),
            cost_us=np.array(self.costs, np.float64),
            is_view=np.zeros(count, np.bool_),
            repeatable=np.array(self.repeatable, np.bool_),
            limits=Rows(ptr, np.array([node for row in self.limits for node in row], np.int32)),
        )


def in_order(problem: RematProblem) -> Ints:
    """All nodes as they are written."""
    return np.arange(problem.problem.node_count, dtype=np.int32)


def equal_blocks(count: int, inner_bytes: int = 8, inner_us: float = 3.0, times: int = 1) -> RematProblem:
    """Blocks of two nodes: one makes what the block's backward node reads, the other hands one byte on; all of it several times over."""
    step = Builder()
    for _ in range(times):
        handed: tuple[int, ...] = ()
        inner = []
        for _ in range(count):
            made = step.node(handed, (inner_bytes,), inner_us)
            inner.append(made)
            handed = step.node(made, (1,))
        grad = step.node(handed, (1,))
        for made in reversed(inner):
            grad = step.node((*grad, *made), (1,))
    return step.problem()


@st.composite
def chains(draw: st.DrawFn, most_blocks: int = 5) -> RematProblem:
    """Blocks of some nodes each, with shortcuts and skips, masks, workless updates and gradients that wait for theirs."""
    step, inside, handed, skipped = Builder(), [], (), ()
    for _ in range(draw(st.integers(2, most_blocks))):
        begin = len(step.tasks)
        made, latest = list(handed), handed
        for _ in range(draw(st.integers(1, 4))):
            also = (draw(st.sampled_from(made)),) if made and draw(st.booleans()) else ()
            latest = step.node(
                (*latest, *also), (draw(st.integers(2, 9)),), draw(st.integers(1, 5)), repeatable=draw(st.integers(0, 5)) > 0
            )
            made += latest
        shortcut = handed if draw(st.booleans()) else ()
        inside.append((range(begin, len(step.tasks)), made))
        if draw(st.integers(0, 3)) == 0:
            skipped = latest
        handed = step.node((*latest, *shortcut, *(skipped if draw(st.booleans()) else ())), (draw(st.integers(1, 2)),))
    grad = step.node(handed, (1,))
    late = []
    for nodes, made in reversed(inside):
        for tensor in draw(st.permutations(made))[: draw(st.integers(1, 4))]:
            grad = step.node((*grad, tensor), (draw(st.integers(1, 4)),), draw(st.integers(1, 5)))
        weight = step.node((*grad, made[-1]), (draw(st.integers(0, 3)),))
        update = step.node(weight, ()) if draw(st.booleans()) else late.append((weight, nodes))
        if update is not None:
            for node in nodes:
                step.limits[node] += [len(step.tasks) - 1] if draw(st.booleans()) else []
    for weight, _ in late:
        step.node(weight, ())
    return step.problem(draw(st.sampled_from([0, 50])))
