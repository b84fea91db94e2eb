"""When a node can run and a tensor be in memory, in any order, and which two tensors never are together: MODeL's appendix A."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, TypeAlias

from lowtide.problems.order import OrderProblem
from research.joint.tensors import Tensor
from research.orders.common import windows
from research.orders.model import row

Windows: TypeAlias = Literal["all", "distance", "count"]
WINDOWS = ("all", "distance", "count")


@dataclass(frozen=True)
class Spans:
    """SPAN of each node, MUL and PRES of each tensor; steps count from 0, and n nodes have n steps."""

    asap: tuple[int, ...]  # [n] the first step at which each node can run
    alap: tuple[int, ...]  # [n] the last
    ancestors: tuple[int, ...]  # [n] the nodes that come before it in every order, as the bits of one number

    @classmethod
    def of(cls, problem: OrderProblem, order: Sequence[int], kind: Windows) -> Spans:
        """`order` is any topological order. By distance: (10), so many steps from the first and the last as the longest path has nodes.

        By count: as many as it has ancestors and descendants, since one node runs at a step (ICCAD'23, constraints (7) and (9)).
        """
        n, ancestors = problem.node_count, _ancestors(problem, order)
        if kind == "count":
            first, last = windows(problem, order)
            return cls(tuple(first.tolist()), tuple(last.tolist()), ancestors)
        if kind == "all":
            return cls((0,) * n, (n - 1,) * n, ancestors)
        ahead, behind = [0] * n, [0] * n
        for node in order:
            ahead[node] = max((ahead[pred] + 1 for pred in row(problem.preds, node)), default=0)
        for node in reversed(order):
            behind[node] = max((behind[succ] + 1 for succ in row(problem.succs, node)), default=0)
        return cls(tuple(ahead), tuple(n - 1 - steps for steps in behind), ancestors)

    @classmethod
    def fixed(cls, problem: OrderProblem, order: Sequence[int]) -> Spans:
        """Of one order alone: each node runs at its place in it (section 5.4)."""
        place = {node: step for step, node in enumerate(order)}
        steps = tuple(place[node] for node in range(problem.node_count))
        return cls(steps, steps, _ancestors(problem, order))

    def runs(self, node: int) -> range:
        """SPAN, (10): the steps at which a node can run."""
        return range(self.asap[node], self.alap[node] + 1)

    def preserved(self, tensor: Tensor) -> range:
        """The part of MUL, (11), at which it can be in memory from an earlier step."""
        first = 0 if tensor.node < 0 else self.asap[tensor.node] + 1
        last = len(self.asap) - 1 if tensor.kept else max((self.alap[sink] for sink in tensor.sinks), default=-1)
        return range(first, max(first, last + 1))

    def surely_preserved(self, tensor: Tensor) -> range:
        """PRES, (12): the steps at which it is in memory from an earlier step, in every order."""
        first = 0 if tensor.node < 0 else self.alap[tensor.node] + 1
        last = len(self.asap) - 1 if tensor.kept else max((self.asap[sink] for sink in tensor.sinks), default=-1)
        return range(first, max(first, last + 1))

    def alive(self, tensor: Tensor) -> range:
        """MUL, (11): the steps at which it can be in memory."""
        preserved = self.preserved(tensor)
        return preserved if tensor.node < 0 else range(self.asap[tensor.node], max(preserved.stop, self.alap[tensor.node] + 1))

    def precedes(self, one: Tensor, other: Tensor) -> bool:
        """Section A.2: whether all that uses `one` comes before what makes `other`, in every order."""
        if one.kept or other.node < 0:
            return False
        users = one.sinks or (one.node,)  # a tensor that nobody reads is gone once its node has run
        return all(self.ancestors[other.node] >> user & 1 for user in users)

    def apart(self, one: Tensor, other: Tensor) -> bool:
        """Whether two tensors are never in memory at the same step: their MULs are disjoint, or one precedes the other."""
        first, second = self.alive(one), self.alive(other)
        if first.start >= second.stop or second.start >= first.stop:
            return True
        passing = not (one.sinks or one.kept or other.sinks or other.kept) and one.node != other.node  # each there for its own step
        return passing or self.precedes(one, other) or self.precedes(other, one)


def _ancestors(problem: OrderProblem, order: Sequence[int]) -> tuple[int, ...]:
    """What function 2 answers for all pairs, in one pass."""
    ancestors = [0] * problem.node_count
    for node in order:
        for pred in row(problem.preds, node):
            ancestors[node] |= ancestors[pred] | 1 << pred
    return tuple(ancestors)
