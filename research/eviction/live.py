"""What is there while a program runs, and who still wants it.

A tensor that is there is wanted while a node to come reads it in the order, while the program returns it, while a regeneration that has
been decided reads it, and while the regeneration that is running does. What nobody wants is freed at once. What has been evicted is not
there, and how it comes back has been decided.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Container, Sequence
from dataclasses import dataclass

from lowtide.problems.order import Rows
from lowtide.remat.problem import RematProblem


@dataclass(frozen=True)
class Decision:
    """How an evicted tensor is to come back."""

    nodes: tuple[int, ...]  # of its regeneration; empty where it is loaded from the host
    reads: tuple[int, ...]  # tensors that stay, or are regenerated themselves, until then
    until: int  # the position in the order after which it could not come back in this way
    wanted: int  # the position before which it has to be back
    latest: int  # the same, should those be forgotten that want it earlier
    cost_us: float  # of coming back, with all that is evicted and that it reads


class Live:
    """The memory of a machine: changed by whoever runs a program."""

    def __init__(self, problem: RematProblem, uses: Sequence[Sequence[int]]) -> None:
        self.bare, self.uses = problem.problem, uses
        self.reads, self.makes, self.takes = (rows_of(rows) for rows in (self.bare.reads, self.bare.outputs_of, self.bare.takes))
        self.bytes: list[int] = self.bare.tensor_bytes.tolist()
        self.kept: list[bool] = self.bare.kept.tolist()
        self.producer: list[int] = self.bare.producer.tolist()
        given = [self.producer[tensor] < 0 and (self.kept[tensor] or bool(uses[tensor])) for tensor in range(len(self.bytes))]
        self.there = given
        self.level_bytes = self.bare.resident_bytes + sum(size for size, is_there in zip(self.bytes, given, strict=True) if is_there)
        self.position = 0  # of the node that is to run, or runs, in the order
        self.passed = False  # whether it has run
        self.decisions: dict[int, Decision] = {}  # by evicted tensor
        self.dependents: list[dict[int, Decision]] = [{} for _ in self.bytes]  # by tensor: evicted ones that read it to come back

    def next_use(self, tensor: int) -> int:
        """The next position that wants a tensor to be there; -1 where none does."""
        return min((*(each.wanted for each in self.dependents[tensor].values()), *self._own(tensor)[:1]), default=-1)

    def latest_use(self, tensor: int) -> int:
        """The same, should evicted tensors that read it be forgotten, or be back in other ways."""
        return max((*(each.latest for each in self.dependents[tensor].values()), *self._own(tensor)[:1]), default=-1)

    def last_use(self, tensor: int) -> int:
        """The last position that wants a tensor to be there, as far as is known now; -1 where none does."""
        if self.kept[tensor]:
            return self.bare.node_count
        return max((*(each.latest for each in self.dependents[tensor].values()), *self._own(tensor)[-1:]), default=-1)

    def _own(self, tensor: int) -> Sequence[int]:
        return self.uses[tensor][self.own_use(tensor) :]

    def own_use(self, tensor: int) -> int:
        """Which of its uses in the order is the next one; their number where none is."""
        return bisect_left(self.uses[tensor], self.position + self.passed)

    def is_wanted(self, tensor: int) -> bool:
        """Whether a tensor is read later on, or returned."""
        return self.kept[tensor] or bool(self.dependents[tensor]) or self.own_use(tensor) < len(self.uses[tensor])

    def missing(self, node: int) -> int:
        """An input of a node that is not there; -1 where all are."""
        return next((tensor for tensor in self.reads[node] if not self.there[tensor]), -1)

    def need_bytes(self, node: int, locked: Container[int]) -> int:
        """What a node takes beside what is there: its results and its workspace, less what it takes over. `locked` is wanted anyway."""
        need = sum(self.bytes[tensor] for tensor in self.makes[node]) + int(self.bare.workspace_bytes[node])
        dying = any(not self.is_wanted(tensor) and tensor not in locked for tensor in self.takes[node])
        return need - self.bytes[int(self.bare.take_output[node])] if dying else need

    def run(self, node: int, locked: Container[int]) -> None:
        """A node has run: what it makes is there, what nobody wants any more is not."""
        for tensor in self.makes[node]:
            if not self.there[tensor]:
                self.arrive(tensor, locked)
        for tensor in (*self.makes[node], *self.reads[node]):
            self.free_unwanted(tensor, locked)

    def arrive(self, tensor: int, locked: Container[int]) -> None:
        """A tensor is there, made or loaded. What was kept for its sake need not be any longer."""
        self.there[tensor] = True
        self.level_bytes += self.bytes[tensor]
        self._forget(tensor, locked)

    def free_unwanted(self, tensor: int, locked: Container[int]) -> None:
        """Free a tensor, if it is there and nobody wants it; forget how it was to come back, if it is not."""
        if self.is_wanted(tensor) or tensor in locked:
            return
        if self.there[tensor]:
            self.there[tensor] = False
            self.level_bytes -= self.bytes[tensor]
        self._forget(tensor, locked)

    def evict(self, tensor: int, decision: Decision) -> None:
        """A tensor goes, to come back as decided."""
        self.there[tensor] = False
        self.level_bytes -= self.bytes[tensor]
        self.decisions[tensor] = decision
        for read in decision.reads:
            self.dependents[read][tensor] = decision

    def _forget(self, tensor: int, locked: Container[int]) -> None:
        decision = self.decisions.pop(tensor, None)
        for read in decision.reads if decision is not None else ():
            del self.dependents[read][tensor]
            self.free_unwanted(read, locked)


def rows_of(rows: Rows) -> list[list[int]]:
    """Rows as lists."""
    return [rows.ids[start:end].tolist() for start, end in zip(rows.ptr, rows.ptr[1:], strict=False)]
