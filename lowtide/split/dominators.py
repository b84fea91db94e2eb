"""Where splitting helps: what stands at the peak, and the nodes that dominate it (MAGIS, section 4.3, equations 3 and 4).

A dominator of a node is one that every path from the start to it goes through, here along one dimension. A set of all that one node
dominates has one entry beside weights and the like, so that little stands at its border while its parts run. `heat` of a node is the
bytes at the peak that are made by what it dominates, and its score what two parts would save of them, less what the set is given beside
what stands at the peak anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray


class Dominators:
    """The dominator tree of an acyclic graph, built node by node in topological order. Node 0 is the start, before all others.

    Common ancestors are found in logarithmic time by jump pointers (Myers 1983), so that a long chain costs no more than a broad tree.
    """

    def __init__(self) -> None:
        self.parent, self._depth, self._jump = [0], [0], [0]
        self._spanned: tuple[NDArray[np.int64], NDArray[np.int64]] | None = None

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

    def summed(self, amounts: NDArray[np.int64]) -> NDArray[np.int64]:
        """By node, the sum over all that it dominates, itself included."""
        first, end = self._spans
        met = np.empty(len(amounts), np.int64)
        met[first] = amounts
        total = np.concatenate([[0], met.cumsum()])
        return np.asarray(total[end] - total[first])

    def dominated(self) -> list[tuple[int, int]]:
        """By node, where what it dominates begins and ends in the order in which nodes are met, itself left out."""
        first, end = self._spans
        return list(zip((first + 1).tolist(), end.tolist(), strict=True))

    def first_met(self) -> list[int]:
        """By node, when a walk that goes down before it goes on meets it: what a node dominates is met in a row."""
        dominators: list[int] = self._spans[0].tolist()
        return dominators

    @property
    def _spans(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """By node when it is met, and behind the last that it dominates; found once for a tree that has grown no more."""
        if self._spanned is None or len(self._spanned[0]) < len(self.parent):
            self._spanned = self._walked()
        return self._spanned

    def _walked(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        size = [1] * len(self.parent)
        for node in range(len(size) - 1, 0, -1):
            size[self.parent[node]] += size[node]
        met, free = [0] * len(size), [1] * len(size)
        for node in range(1, len(size)):
            parent = self.parent[node]
            met[node] = met[parent] + free[parent]
            free[parent] += size[node]
        return np.array(met, np.int64), np.array(met, np.int64) + np.array(size, np.int64)


class Borders:
    """What stands at the borders of dominated sets: of any bytes of values that are the same in who makes and who reads them.

    What dominates a reader or the maker, and is not that itself, is given a value, unless it dominates the maker, too.
    """

    def __init__(self, tree: Dominators, touched: Iterable[tuple[int, ...]]) -> None:
        """`touched` is by value the number of its maker, -1 where no node makes it, then those of its readers."""
        met = tree.first_met()
        nodes, signs, values = list[int](), list[int](), list[int]()
        for value, (maker, *readers) in enumerate(touched):
            above = sorted({tree.parent[node] for node in (*readers, maker) if node >= 0}, key=met.__getitem__)
            less = [tree.common(one, two) for one, two in pairwise(above)] + ([tree.parent[maker]] if maker >= 0 else [])
            nodes += above + less
            signs += [1] * len(above) + [-1] * len(less)
            values += [value] * (len(above) + len(less))
        self._nodes, self._signs, self._values = np.array(nodes, np.int64), np.array(signs, np.int64), np.array(values, np.int64)

    def of(self, tree: Dominators, nbytes: NDArray[np.int64]) -> NDArray[np.int64]:
        """By node the bytes at the border of what it dominates, where values are so large."""
        given = np.zeros(len(tree.parent), np.int64)
        np.add.at(given, self._nodes, self._signs * nbytes[self._values])
        return tree.summed(given)


@dataclass(frozen=True, eq=False)
class Heat:
    """By node of a dominator tree, of what it dominates beside itself: bytes."""

    heat: Sequence[int]
    score: Sequence[float]

    @classmethod
    def of(cls, tree: Dominators, made_bytes: Sequence[int], borders: NDArray[np.int64], parts: int = 2) -> Heat:
        """Equations 3 and 4. `made` is hot bytes by the node that makes them, `borders` what stands at the border of what it dominates."""
        own = np.array(made_bytes, np.int64)
        heat = tree.summed(own) - own
        return cls(heat.tolist(), ((1 - 1 / parts) * heat - borders).tolist())
