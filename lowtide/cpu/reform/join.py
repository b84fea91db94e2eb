"""Join: which parts of a chain run as one kernel, so that all of them together take the least time."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from lowtide.base.narrow import there
from lowtide.cpu.partition.partition import Partition, ordered
from lowtide.cpu.reform.chains import Part, chains_of, parts_of
from lowtide.cpu.reform.schemes import Scheme, Shape, schemes_of
from lowtide.ir.graph import Node

MOST_PARTS = 3  # of a group: pointwise, depthwise, pointwise


class Costs(Protocol):
    """What kernels take: measured, or predicted."""

    @property
    def threads(self) -> int:
        """That share the work."""

    def alone_us(self, part: Part) -> float:
        """The time of a part by itself."""

    def joined_us(self, parts: Sequence[Part], shape: Shape) -> float | None:
        """The time of parts as one kernel; None where there is no such kernel."""


@dataclass(frozen=True, eq=False)
class Group:
    """Parts that run as one kernel."""

    parts: tuple[Part, ...]
    scheme: Scheme | None  # None for a part alone
    us: float  # measured or predicted

    @property
    def nodes(self) -> tuple[Node, ...]:
        """All its nodes; a part's in program order."""
        return tuple(node for part in self.parts for node in part.nodes)


def reform(partition: Partition, costs: Costs, *, join: bool = True) -> tuple[Group, ...]:
    """Split each cluster into parts and join those that win; in an order in which they can run. Without `join` each part is alone."""
    groups = []
    for parts in parts_of(partition):
        for chain in chains_of(parts, partition):
            groups += joined(chain, costs) if join else [Group((part,), None, costs.alone_us(part)) for part in chain]
    return _in_order(groups, partition)


def joined(chain: Sequence[Part], costs: Costs) -> list[Group]:
    """The runs of a chain that take the least time together: the shortest path over its ends. Ties go to fewer joins."""
    best: list[tuple[float, int]] = [(0.0, 0)]
    last: list[Group | None] = [None]
    for end in range(1, len(chain) + 1):
        found = [(best[start], group) for start in range(max(0, end - MOST_PARTS), end) for group in _groups(chain[start:end], costs)]
        (time, joins), group = min(found, key=lambda each: (each[0][0] + each[1].us, each[0][1] + len(each[1].parts) - 1))
        best.append((time + group.us, joins + len(group.parts) - 1))
        last.append(group)
    groups: list[Group] = []
    end = len(chain)
    while end:
        group_here = last[end]
        group_here = there(group_here)
        groups.append(group_here)
        end -= len(group_here.parts)
    return groups[::-1]


def _groups(parts: Sequence[Part], costs: Costs) -> list[Group]:
    """A run of parts as one kernel, by each way that there is."""
    if len(parts) == 1:
        return [Group(tuple(parts), None, costs.alone_us(parts[0]))]
    found = []
    for shape in schemes_of(parts, costs.threads):
        us = costs.joined_us(parts, shape)
        if us is not None:
            found.append(Group(tuple(parts), shape.scheme, us))
    return found


def _in_order(groups: Sequence[Group], partition: Partition) -> tuple[Group, ...]:
    number = {node: at for at, node in enumerate(partition.graph.nodes)}
    sets = [[number[node] for node in group.nodes] for group in groups]
    by_first = {min(members): group for members, group in zip(sets, groups, strict=True)}
    return tuple(by_first[members[0]] for members in ordered(partition.graph, sets))
