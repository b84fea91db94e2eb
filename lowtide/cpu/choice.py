"""Which blocks are made (AGO, sections V and VI): a model says, and where it cannot tell, what was measured.

    takes   stages, and the body that they compute
    leaves  by window that there are blocks around: which of them, the first being 1; 0 for none

For convolutions the model is that of `reform`; for pooling a block wins where more is between than a core's own cache holds.

All that could be joined, and what the model makes of it: where that is next to nothing, it is worth measuring.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from typing import Protocol

from lowtide.cpu.layout import stepped
from lowtide.cpu.model import Model, machine_of
from lowtide.cpu.partition import Partition, is_complex, ordered, partition
from lowtide.cpu.reform import KernelShape, Part, Scheme, chains_of, parts_of, schemes_of
from lowtide.cpu.stages import KernelStage, RowBlock, alternatives, pixels
from lowtide.errors import there
from lowtide.ir.graph import Graph, Kind, Node, Storage, Value, arguments

MOST_PARTS = 3  # of a group: pointwise, depthwise, pointwise


class Costs(Protocol):
    """What kernels take: measured, or predicted."""

    @property
    def threads(self) -> int:
        """That share the work."""

    def alone_us(self, part: Part) -> float:
        """The time of a part by itself."""

    def joined_us(self, parts: Sequence[Part], shape: KernelShape) -> float | None:
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
        options = [(best[start], group) for start in range(max(0, end - MOST_PARTS), end) for group in _groups(chain[start:end], costs)]
        (time, joins), group = min(options, key=lambda each: (each[0][0] + each[1].us, each[0][1] + len(each[1].parts) - 1))
        best.append((time + group.us, joins + len(group.parts) - 1))
        last.append(group)
    groups: list[Group] = []
    end = len(chain)
    while end:
        group_here = there(last[end])
        groups.append(group_here)
        end -= len(group_here.parts)
    return groups[::-1]


def _groups(parts: Sequence[Part], costs: Costs) -> list[Group]:
    """A run of parts as one kernel, by each way that there is."""
    if len(parts) == 1:
        return [Group(tuple(parts), None, costs.alone_us(parts[0]))]
    groups = []
    for shape in schemes_of(parts, costs.threads):
        us = costs.joined_us(parts, shape)
        if us is not None:
            groups.append(Group(tuple(parts), shape.scheme, us))
    return groups


def _in_order(groups: Sequence[Group], partition: Partition) -> tuple[Group, ...]:
    number = {node: at for at, node in enumerate(partition.graph.nodes)}
    sets = [[number[node] for node in group.nodes] for group in groups]
    by_first = {min(members): group for members, group in zip(sets, groups, strict=True)}
    return tuple(by_first[members[0]] for members in ordered(partition.graph, sets))


@dataclass(frozen=True, eq=False)
class JoinCandidate:
    """Parts that could be one kernel, and what that would take by prediction, against each alone."""

    parts: tuple[Part, ...]
    scheme: Scheme
    joined_us: float
    apart_us: float

    @property
    def gain(self) -> float:
        """By how much joined would be faster, as a share of apart."""
        return 1.0 - self.joined_us / self.apart_us if self.apart_us else 0.0


def candidates(partition: Partition, costs: Costs) -> Iterator[JoinCandidate]:
    for parts in parts_of(partition):
        for chain in chains_of(parts, partition):
            yield from _of_chain(chain, costs)


def _of_chain(chain: Sequence[Part], costs: Costs) -> Iterator[JoinCandidate]:
    for start in range(len(chain)):
        for end in range(start + 2, min(start + MOST_PARTS, len(chain)) + 1):
            run = tuple(chain[start:end])
            for shape in schemes_of(run, costs.threads):
                joined = costs.joined_us(run, shape)
                if joined is not None:
                    yield JoinCandidate(run, shape.scheme, joined, sum(map(costs.alone_us, run)))


_NEAR_BYTES = 256 * 1024  # of what is between, that a core's own cache holds beside all else
_MACHINE = machine_of(100e3, 8e3)  # its caches; of its rates only their ratios matter
_CLOSE = 0.15  # the model cannot tell kernels apart that it finds to be so near to each other
KernelAlternative = tuple[KernelStage, ...]  # stages that do the same work as others


class Joins(Enum):
    """Which blocks are made."""

    BEST = "those that win"
    ALL = "all that are legal"  # AGO's ablation NR
    NONE = "none"  # AGO's ablation NI


# Of variants, and which of them the model chose, the one that is made: 0 for the first.
Fastest = Callable[[Sequence[KernelAlternative], int], int]


@dataclass(frozen=True)
class Choices:
    """What there is to choose among."""

    blocks: list[tuple[RowBlock, ...]]  # by window
    by_model: _ByModel

    @classmethod
    def of(cls, stages: Sequence[KernelStage], body: Graph, fixed: Collection[Value]) -> Choices:
        return cls(alternatives(stages), _ByModel.of(body, fixed))

    def numbers(self, joins: Joins, fastest: Fastest) -> tuple[int, ...]:
        taken: set[KernelStage] = set()
        numbers: list[int] = []
        for blocks in self.blocks:
            free = [0, *(number for number, block in enumerate(blocks, 1) if not any(part in taken for part in block.parts))]
            number = 0 if joins is Joins.NONE else self._modelled(blocks, free[1:], joins)
            if joins is Joins.BEST and any(self.by_model.is_close(blocks[each - 1]) for each in free[1:]):
                number = free[fastest(variants(blocks, free), free.index(number))]
            numbers.append(number)
            taken.update(blocks[number - 1].parts if number else ())
        return tuple(numbers)

    def _modelled(self, blocks: Sequence[RowBlock], numbers: Sequence[int], joins: Joins) -> int:
        return next((each for each in numbers if joins is Joins.ALL or self.by_model.wins(blocks[each - 1])), 0)


def chosen(stages: Sequence[KernelStage], body: Graph, fixed: Collection[Value], joins: Joins) -> tuple[int, ...]:
    return Choices.of(stages, body, fixed).numbers(joins, lambda _, by_model: by_model)


def variants(blocks: Sequence[RowBlock], numbers: Sequence[int]) -> list[KernelAlternative]:
    """The ways to do the work of all blocks around a window: none of them, or one and what it lacks."""
    parts = max((blocks[number - 1].parts for number in numbers if number), key=len)
    return [tuple(_joined(parts, blocks[number - 1])) if number else tuple(parts) for number in numbers]


def _joined(parts: Sequence[KernelStage], block: RowBlock) -> Iterator[KernelStage]:
    for part in parts:
        if part is block.parts[-1]:
            yield block
        elif part not in block.parts:
            yield part


@dataclass(frozen=True)
class _ByModel:
    """What the model says."""

    joined: Collection[frozenset[Node]]  # complex operators that are one kernel
    gains: dict[frozenset[Node], float]  # of all that could be

    @classmethod
    def of(cls, body: Graph, fixed: Collection[Value]) -> _ByModel:
        typed, origin = _with_parameters(body, fixed)
        parted, costs = partition(typed), Model(_MACHINE, exists=_exists)
        groups = (group for group in reform(parted, costs) if group.scheme is Scheme.ROWS)
        schemes = (each for each in candidates(parted, costs) if each.scheme is Scheme.ROWS)

        def complexes(nodes: Sequence[Node]) -> frozenset[Node]:
            return frozenset(origin[node] for node in nodes if is_complex(node))

        gains = {complexes([node for part in each.parts for node in part.nodes]): each.gain for each in schemes}
        return cls({complexes(group.nodes) for group in groups}, gains)

    def wins(self, block: RowBlock) -> bool:
        """Whether a block is faster than its parts."""
        if block.windows.kind == "Weighted":
            return frozenset(node for node in block.nodes if is_complex(node)) in self.joined
        return _between_bytes(block) > _NEAR_BYTES

    def is_close(self, block: RowBlock) -> bool:
        """Whether that may be otherwise."""
        if block.windows.kind == "Weighted":
            gain = self.gains.get(frozenset(node for node in block.nodes if is_complex(node)))
            return gain is not None and abs(gain) <= _CLOSE
        return _NEAR_BYTES / 2 < _between_bytes(block) < 2 * _NEAR_BYTES


def _between_bytes(block: RowBlock) -> int:
    return sum(4 * stepped(part.out.shape[1]) * pixels(part.out.shape)[0] for part in block.parts[:-1])


def _exists(parts: Sequence[Part], scheme: Scheme) -> bool:
    """Whether there may be a block of these parts: one depthwise operator, with at most one other on either side."""
    deep = [at for at, part in enumerate(parts) if part.reuse is not None and not part.reuse.again]
    return scheme is Scheme.ROWS and len(deep) == 1 and deep[0] <= 1 and len(parts) - deep[0] <= 2


def _with_parameters(body: Graph, fixed: Collection[Value]) -> tuple[Graph, dict[Node, Node]]:
    """The body with its constants as parameters, not as arguments, and which node each of its nodes is."""
    storages: dict[Storage, Storage] = {}
    for value in body.inputs:
        kind = Kind.PARAMETER if value in fixed else Kind.ACTIVATION
        storages[value.storage] = replace(value.storage, kind=kind)
    new: dict[Value, Value] = {}

    def taken(value: Value) -> Value:
        return new.setdefault(value, replace(value, storage=storages.get(value.storage, value.storage)))

    nodes, origin = [], {}
    for node in body.nodes:
        outputs = tuple(None if value is None else taken(value) for value in node.outputs)
        with_parameters = replace(node, outputs=outputs, **arguments(node, taken))
        nodes.append(with_parameters)
        origin[with_parameters] = node
    return Graph(tuple(map(taken, body.inputs)), tuple(nodes), tuple(map(taken, body.outputs))), origin
