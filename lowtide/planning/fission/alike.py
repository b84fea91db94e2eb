"""Regions that repeated blocks have alike: they are split together, at the price of one."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Hashable, Iterable, Sequence
from dataclasses import dataclass

from lowtide.fission.candidates import SplitCandidate
from lowtide.fission.regions import SplitRegion
from lowtide.ir.graph import Graph


@dataclass(frozen=True, eq=False)
class AlikeRegions:
    """Regions that lie apart, run the same operators on the same shapes, and are cut alike."""

    regions: tuple[SplitRegion, ...]
    saved_bytes: int  # at the peak, by two parts of each

    @property
    def bits(self) -> int:
        found = 0
        for region in self.regions:
            found |= region.bits
        return found


def groups_of(graph: Graph, candidates: Sequence[SplitCandidate]) -> list[AlikeRegions]:
    """Candidates put together, the largest savings first."""
    found: defaultdict[tuple[Hashable, ...], list[SplitCandidate]] = defaultdict(list)
    for each in candidates:
        found[_look(graph, each.region)].append(each)
    groups = [_apart(members) for members in found.values()]
    return sorted(groups, key=lambda group: (-group.saved_bytes, group.bits))


def _apart(members: Iterable[SplitCandidate]) -> AlikeRegions:
    """As many as lie apart, those first that come first."""
    taken, chosen = 0, []
    for each in sorted(members, key=lambda each: each.region.bits):
        if not taken & each.region.bits:
            taken |= each.region.bits
            chosen.append(each)
    return AlikeRegions(tuple(each.region for each in chosen), sum(each.saved_bytes for each in chosen))


def _look(graph: Graph, region: SplitRegion) -> tuple[Hashable, ...]:
    nodes = ((graph.nodes[place], axis) for place, axis in region.axes.items())
    return region.units, *((node.op, axis.extent, axis.sliced, *(value.shape for value in node.results)) for node, axis in nodes)
