"""Where splitting helps: what stands at the peak, and the nodes that dominate it (MAGIS, section 4.3, equations 3 and 4).

A dominator of a node is one that every path from the start to it goes through, here along one dimension. A set of all that one node
dominates has one entry beside weights and the like, so that little stands at its border while its parts run. `heat` of a node is the
bytes at the peak that are made by what it dominates, and its score what two parts would save of them, less what the set is given beside
what stands at the peak anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from lowtide.cost.memory import counted_storages, order_problem, simulate
from lowtide.ir.graph import Graph, Storage


def hot_bytes(graph: Graph, order: Sequence[int] | None = None, workspace_bytes: Sequence[int] | None = None) -> dict[Storage, int]:
    """The storages that live where an order peaks first, resident ones aside, and their bytes. Without an order, in program order."""
    problem = order_problem(graph, workspace_bytes)
    played = simulate(problem, np.arange(len(graph.nodes)) if order is None else order)
    start, end = played.lifetimes
    alive = (start <= played.peak_step) & (played.peak_step < end)
    return {storage: int(problem.tensor_bytes[index]) for index, storage in enumerate(counted_storages(graph)) if alive[index]}


class Dominators:
    """The dominator tree of an acyclic graph, built node by node in topological order. Node 0 is the start, before all others.

    Common ancestors are found in logarithmic time by jump pointers (Myers 1983), so that a long chain costs no more than a broad tree.
    """

    def __init__(self) -> None:
        self.parent, self._depth, self._jump = [0], [0], [0]

    def add(self, before: Iterable[int]) -> int:
        """A node after others, after the start where there are none; its number."""
        parent = -1
        for other in before:
            parent = other if parent < 0 else self.common(parent, other)
        parent = max(parent, 0)
        jump = self._jump[parent]
        far = self._jump[jump]
        same = self._depth[parent] - self._depth[jump] == self._depth[jump] - self._depth[far]
        self.parent.append(parent)
        self._depth.append(self._depth[parent] + 1)
        self._jump.append(far if same else parent)
        return len(self.parent) - 1

    def common(self, one: int, two: int) -> int:
        """The deepest node that dominates both."""
        depth, jump, parent = self._depth, self._jump, self.parent
        if depth[one] < depth[two]:
            one, two = two, one
        while depth[one] > depth[two]:
            one = jump[one] if depth[jump[one]] >= depth[two] else parent[one]
        while one != two:
            apart = jump[one] != jump[two]
            one, two = (jump[one], jump[two]) if apart else (parent[one], parent[two])
        return one

    def summed(self, amounts: Sequence[int]) -> list[int]:
        """By node, the sum over all that it dominates, itself included."""
        total = list(amounts)
        for node in range(len(total) - 1, 0, -1):
            total[self.parent[node]] += total[node]
        return total

    def dominated(self) -> list[tuple[int, int]]:
        """By node, where what it dominates begins and ends in the order in which nodes are met, itself left out."""
        return [(met + 1, met + size) for met, size in zip(self.first_met(), self.summed([1] * len(self.parent)), strict=True)]

    def first_met(self) -> list[int]:
        """By node, when a walk that goes down before it goes on meets it: what a node dominates is met in a row."""
        size = self.summed([1] * len(self.parent))
        met, free = [0] * len(size), [1] * len(size)
        for node in range(1, len(size)):
            parent = self.parent[node]
            met[node] = met[parent] + free[parent]
            free[parent] += size[node]
        return met


@dataclass(frozen=True, eq=False)
class Heat:
    """By node of a dominator tree, of what it dominates beside itself: bytes."""

    heat: Sequence[int]
    score: Sequence[float]

    @classmethod
    def of(cls, tree: Dominators, made: Sequence[int], given: Mapping[tuple[int, ...], int], parts: int = 2) -> Heat:
        """Equations 3 and 4. `made` is hot bytes by the node that makes them; `given` is the bytes of what is not hot, by who touches it.

        The key of `given` is the maker, -1 where no node makes it, then the readers.
        """
        met = tree.first_met()
        borders = [0] * len(tree.parent)
        for (maker, *readers), nbytes in given.items():
            # what dominates a reader and is not that itself is given it, unless it dominates the maker, too
            above = sorted({tree.parent[node] for node in (*readers, maker) if node >= 0}, key=met.__getitem__)
            for node in above:
                borders[node] += nbytes
            for one, two in pairwise(above):
                borders[tree.common(one, two)] -= nbytes
            if maker >= 0:
                borders[tree.parent[maker]] -= nbytes
        heat, border = [total - own for total, own in zip(tree.summed(made), made, strict=True)], tree.summed(borders)
        share = 1 - 1 / parts
        return cls(heat, [share * hot - given for hot, given in zip(heat, border, strict=True)])
