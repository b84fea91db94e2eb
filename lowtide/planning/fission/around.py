"""Sets around a large tensor that can run part by part: what makes it, what reads it, and what is as large along the same dimension.

From the tensor a set reaches over all tensors that are cut with it and have a given share of its bytes: the nodes that make or read one of
them are wanted, and those between. So what stays whole at the borders is small, but for what has no such dimension. `fission.regions` makes
of the wanted nodes a set that is legal.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import cached_property
from math import prod

from lowtide.fission.dimensions import Dimensions
from lowtide.fission.names import Table
from lowtide.fission.regions import Regions
from lowtide.ir.graph import Graph, Value
from lowtide.ir.operators.axes.axis import cut_by
from lowtide.ir.sizes import ITEM_BYTES
from lowtide.rewrite.fission.roles import Split


class Surroundings:
    """A graph, and the sets around its tensors; what is needed for all of them is looked up once."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self._regions = Regions(Dimensions.of(graph))

    def splits(self, value: Value, shares: Sequence[float]) -> Iterator[Split]:
        """The sets around a tensor along each of its dimensions, over tensors of at least these shares of its bytes; each once."""
        seen: set[tuple[int, ...]] = set()
        for dim, extent in enumerate(value.shape):
            for share in shares if extent != 1 else ():
                found = self.split(value, dim, share * bytes_of(value))
                if found is not None and (key := (dim, *map(self._place.__getitem__, found.nodes))) not in seen:
                    seen.add(key)
                    yield found

    def split(self, value: Value, dim: int, least_bytes: float) -> Split | None:
        """The set around a tensor along one of its dimensions, over tensors of so many bytes; None where there is none."""
        if value not in self.made:
            return None
        reached = self._reached(value, dim, least_bytes)
        part = self._regions.dimensions.part(value, dim)
        region = self._regions.around(value, dim, sorted(reached | self._between(reached)))
        if region is None:
            return None
        return Split({self.graph.nodes[place]: axis for place, axis in region.axes.items()}, self._names.get(part, "part"))

    @cached_property
    def made(self) -> frozenset[Value]:
        """What nodes make or write: over the caller's own tensors no set reaches, as forward and backward pass both read them."""
        return frozenset(value for node in self.graph.nodes for value in node.results)

    def _reached(self, value: Value, dim: int, least_bytes: float) -> set[int]:
        """The places of the nodes that make or read what is large enough and cut with a tensor."""
        cut, pending, places = {value: dim}, [value], set[int]()
        while pending:
            each = pending.pop()
            for place in self._touching[each]:
                for axis in self._regions.dimensions.axes[place]:
                    pairs = list(cut_by(self.graph.nodes[place], axis))
                    if (each, cut[each]) not in pairs:
                        continue
                    places.add(place)
                    for other, at in pairs:
                        if other not in cut and other in self.made and bytes_of(other) >= least_bytes:
                            cut[other] = at
                            pending.append(other)
        return places

    def _between(self, places: set[int]) -> set[int]:
        """The places on a path from these to these."""
        before, first, last = self._regions.before, min(places, default=0), max(places, default=-1)
        after, needed = set[int](), set[int]()
        for place in range(first, last + 1):
            if any(each in after or each in places for each in before[place]):
                after.add(place)
        for place in range(last, first - 1, -1):
            if place in needed or place in places:
                needed.update(before[place])
        return after & needed

    @cached_property
    def _place(self) -> dict[object, int]:
        return {node: place for place, node in enumerate(self.graph.nodes)}

    @cached_property
    def _touching(self) -> dict[Value, list[int]]:
        """The places of the nodes that read, make or write each tensor."""
        found: dict[Value, list[int]] = {}
        for place, node in enumerate(self.graph.nodes):
            for value in dict.fromkeys((*node.inputs, *node.results, *(before for before, _ in node.writes))):
                found.setdefault(value, []).append(place)
        return found

    @cached_property
    def _names(self) -> dict[int, str]:
        """By part of the dimension graph, what people call it: "tokens"."""
        lines = Table.of(self._regions.dimensions).lines
        return {part: line.name.split(" ")[0] for line in lines for part in line.parts}


def bytes_of(value: Value) -> int:
    """The bytes of a tensor's elements."""
    return prod(size for size in value.shape if isinstance(size, int)) * ITEM_BYTES[value.dtype]
