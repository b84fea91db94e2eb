"""What a plan runs part by part, for people: which operators, along what, into how many, and what that spares and takes."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.base.messages import bytes_text, op_text, time_text
from lowtide.errors import CheckError, of_kind
from lowtide.ir.bodies import Loop, is_loop
from lowtide.ir.graph import Node
from lowtide.ir.operators.nodes import is_view
from lowtide.ir.operators.table import row_of
from lowtide.plan.contents import Contents
from lowtide.plan.promises import peak_bytes
from lowtide.plan.snapshot import source_text
from lowtide.plan.table import pattern

_LINES = 6


@dataclass(frozen=True, slots=True)
class PlannedSplit:
    """One set of operators that runs part by part."""

    where: str  # the module and line of the operator that computes the most, "lm_head, model.py:12"
    operators: tuple[str, ...]  # of a part, views apart, in their order
    dimension: str  # "tokens"
    extent: int
    part: int  # of the extent, but for the last, which may be smaller
    part_bytes: int  # that a part makes for itself at its highest, without operators' own workspaces
    whole_bytes: int  # that the same nodes make in one part
    us: float  # of all parts; 0 where times do not matter

    @property
    def parts(self) -> int:
        return -(-self.extent // self.part)


def splits_of(plan: Contents) -> tuple[PlannedSplit, ...]:
    """The loops of a plan, in the order in which they run."""
    return tuple(
        _split(plan.graph.nodes[index], plan.granule_bytes, plan.node_us[index] if plan.node_us else 0.0)
        for index in plan.order
        if is_loop(plan.graph.nodes[index])
    )


def split_lines(plan: Contents) -> list[str]:
    """A line for each, those of repeated blocks together; none where nothing is split."""
    groups: defaultdict[tuple[object, ...], list[PlannedSplit]] = defaultdict(list)
    for each in splits_of(plan):
        groups[pattern(each.where), each.operators, each.dimension, each.extent, each.part].append(each)
    lines = [_line(group) for group in sorted(groups.values(), key=lambda group: group[0].part_bytes - group[0].whole_bytes)]
    rest = [f"{'':>14}  in {len(lines) - _LINES} more kinds"] if len(lines) > _LINES else []
    return ["run part by part, in place of at once:", *lines[:_LINES], *rest] if lines else []


def _line(group: Sequence[PlannedSplit]) -> str:
    first, count = group[0], f"{len(group)} x " if len(group) > 1 else ""
    names = [op_text(op) for op in first.operators]
    what = f"{names[0]} to {names[-1]}, {len(names)} operators" if len(names) > 2 else " and ".join(names)
    took = f"; {time_text(sum(each.us for each in group))}" if any(each.us for each in group) else ""
    where = f" of {pattern(first.where) if len(group) > 1 else first.where}" if first.where else ""
    return (
        f"{bytes_text(first.part_bytes):>14}  where the whole takes {bytes_text(first.whole_bytes)}: {count}{what}{where}, along "
        f"{first.dimension} ({first.extent}) in {first.parts} parts of {first.part}{took}"
    )


def _split(node: Node, granule_bytes: int, us: float) -> PlannedSplit:
    loop = Loop.of(node)
    whole, part = loop.at_any(of_kind(int, loop.extent)), loop.at(loop.part)
    nodes = [each for each in part.nodes if not is_view(each)]
    heaviest = max(nodes, key=_flops)
    return PlannedSplit(
        source_text(heaviest.source or node.source),
        tuple(each.op for each in nodes),
        loop.body.dimensions[0].name,
        loop.extent,
        loop.part,
        peak_bytes(part, granule_bytes),
        peak_bytes(whole, granule_bytes),
        us,
    )


def _flops(node: Node) -> int:
    count = row_of(node.op).flops
    try:
        return 0 if count is None else count(node)
    except CheckError:
        return 0
