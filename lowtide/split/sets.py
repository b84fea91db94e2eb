"""From nodes that one dimension runs through to a set that may run in parts: an F-Trans without its number (MAGIS, section 4.2).

A set is grown around an anchor, a value that is to be cut: first over the nodes from its maker on, in program order, then over all others
in reverse. A node joins along an axis of the wanted component of the dimension graph if

    all nodes of the set cut a value along one dimension, or none does: what one reads as a whole no other makes or cuts,
    nobody in the set reads what parts put together,
    what it writes is cut,
    it has a cut value in common with the set, so that the set is connected,
    no path leaves the set and comes back: nothing outside of the set comes both after one of it and before another.

So a set is connected and convex by construction. What draws random numbers, normalises over the dimension or is closed for another
reason has no axis, and stays outside.

Where splitting helps: what stands at the peak, and the nodes that dominate it (MAGIS, section 4.3, equations 3 and 4).

A dominator of a node is one that every path from the start to it goes through, here along one dimension. A set of all that one node
dominates has one entry beside weights and the like, so that little stands at its border while its parts run. `heat` of a node is the
bytes at the peak that are made by what it dominates, and its score what two parts would save of them, less what the set is given beside
what stands at the peak anyway.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import pairwise
from math import gcd

import numpy as np
from numpy.typing import NDArray

from lowtide.ir.edges import predecessors
from lowtide.ir.graph import Graph, Node, Storage, Value
from lowtide.ir.operators.axes import Axis, Reduced, cut_by, is_innermost, merges_apart, tensor_paths
from lowtide.ir.operators.nodes import is_view
from lowtide.ir.sizes import Size
from lowtide.split.dimensions import DimensionGraph


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


@dataclass(frozen=True, eq=False)
class SplitSet:
    """A legal set, along which axis each node is cut, and what becomes of the values at its border."""

    component: int  # of the dimension graph
    axes: Mapping[int, Axis]  # by the node's place in the graph, in program order
    units: int  # at most so many parts: a part takes whole units
    sliced: Mapping[Value, int]  # arguments from outside that parts take slices of, and along which dimension
    shared: tuple[Value, ...]  # arguments from outside that every part needs whole
    written: Mapping[Value, int]  # results that others need, and along which dimension parts write them; what the set writes over included
    accumulated: Mapping[Value, Reduced]  # results that others need, and how parts are put together

    @cached_property
    def places(self) -> frozenset[int]:
        return frozenset(self.axes)

    @cached_property
    def bits(self) -> int:
        """The places as bits of a number: sets of them compare fast."""
        bits = bytearray(max(self.axes) // 8 + 1)
        for place in self.axes:
            bits[place >> 3] |= 1 << (place & 7)
        return int.from_bytes(bits, "little")


@dataclass(frozen=True, eq=False, slots=True)
class _CutNode:
    axis: Axis
    pairs: Mapping[Value, int]  # the values that are cut, and where
    reads: tuple[Value, ...]
    whole: tuple[Value, ...]  # of these, tensors that are not cut
    merged: tuple[Value, ...]  # results that parts put together
    fits: bool  # each value is cut along one dimension, none stands among the arguments cut and whole, and what is written is cut

    @classmethod
    def of(cls, node: Node, axis: Axis) -> _CutNode:
        pairs, reads = dict(cut_by(node, axis)), _reads(node)
        alone = all(len(dims) == 1 for dims in _dims_by_value(node, axis).values())
        fits = alone and not _mixed(node, axis) and all(before in pairs for before, _ in node.writes)
        whole = tuple(value for value in reads if value not in pairs and value.dtype != "scalar")
        return cls(axis, pairs, reads, whole, tuple(value for value, _ in _roles(node, axis)), fits)


@dataclass(frozen=True, eq=False, slots=True)
class Grown:
    """The dominators of what one part runs through in a phase, whatever stands at a peak; node i + 1 is the one at the phase's place i."""

    tree: Dominators
    borders: Borders
    given: Sequence[tuple[Storage, int]]  # what its nodes touch, and the caller does not own, and its bytes


@dataclass(eq=False)
class _Growing:
    inner: bool  # whether it may be cut along what is innermost in merged dimensions
    axes: dict[int, Axis] = field(default_factory=dict)
    cut: dict[Value, int] = field(default_factory=dict)
    whole: set[Value] = field(default_factory=set)
    merged: set[Value] = field(default_factory=set)

    def takes(self, node: _CutNode) -> bool:
        cut, pairs = self.cut, node.pairs
        if not node.fits or not any(value in cut for value in pairs):
            return False
        if not self.inner and any(map(is_innermost, pairs.values())):
            return False
        if any(value in self.whole or cut.get(value, dim) != dim for value, dim in pairs.items()):
            return False
        if any(value in self.merged or (value in cut and value not in pairs) for value in node.reads):
            return False
        return not any(value in cut or value in self.whole for value in node.merged)

    def add(self, place: int, node: _CutNode) -> None:
        self.axes[place] = node.axis
        self.cut.update(node.pairs)
        self.whole.update(node.whole)
        self.merged.update(node.merged)


@dataclass(frozen=True, eq=False)
class Regions:
    """Makes regions of one graph; what is needed for all of them is looked up once."""

    dimensions: DimensionGraph

    @property
    def graph(self) -> Graph:
        return self.dimensions.graph

    @cached_property
    def before(self) -> tuple[tuple[int, ...], ...]:
        """By place, the places of the nodes that must come before."""
        return predecessors(self.graph)

    @cached_property
    def after(self) -> tuple[tuple[int, ...], ...]:
        """By place, the places of the nodes that must come after."""
        successors: list[list[int]] = [[] for _ in self.graph.nodes]
        for place, others in enumerate(self.before):
            for other in others:
                successors[other].append(place)
        return tuple(map(tuple, successors))

    @cached_property
    def makers(self) -> dict[Value, int]:
        return {value: place for place, node in enumerate(self.graph.nodes) for value in node.results}

    @cached_property
    def readers(self) -> dict[Value, list[int]]:
        readers: dict[Value, list[int]] = {}
        for place, node in enumerate(self.graph.nodes):
            for value in _reads(node):
                readers.setdefault(value, []).append(place)
        return readers

    @cached_property
    def cuts(self) -> tuple[Mapping[int, tuple[_CutNode, ...]], ...]:
        """By place and component of the dimension graph, the node along its axes of that component."""
        cuts = []
        for node, axes, components in zip(self.graph.nodes, self.dimensions.axes, self.dimensions.axis_components, strict=True):
            mine: dict[int, tuple[_CutNode, ...]] = {}
            for axis, component in zip(axes, components, strict=True):
                mine[component] = (*mine.get(component, ()), _CutNode.of(node, axis))
            cuts.append(mine)
        return tuple(cuts)

    @cached_property
    def trees(self) -> dict[tuple[int, int, int], Grown]:
        """What `candidates_of` has found of components and phases: whatever stands at a peak, their dominators are the same."""
        return {}

    @cached_property
    def _known(self) -> dict[tuple[Value, int, tuple[int, ...], bool], SplitSet | None]:
        return {}

    def around(self, anchor: Value, dim: int, wanted: Sequence[int], *, fine: bool = False) -> SplitSet | None:
        """The region of nodes at some of these places, in program order, around a value along one of its dimensions.

        None where nothing but views can be cut with it, or into nothing. `fine`: only of nodes that can be cut wherever the value can, as
        merged batch and tokens can be cut between tokens as long as no node sees them apart. Takes time linear in the nodes between the
        first and the last.
        """
        key = anchor, dim, tuple(wanted), fine
        if key not in self._known:
            self._known[key] = self._around(anchor, dim, wanted, fine)
        return self._known[key]

    def _around(self, anchor: Value, dim: int, wanted: Sequence[int], fine: bool) -> SplitSet | None:
        start = self.makers.get(anchor)
        if start is None or not wanted:
            return None
        allowed, component = set(wanted), self.dimensions.component(anchor, dim)
        if fine:
            allowed = {place for place in allowed if self._is_fine(place, component, anchor.shape[dim])}
        for inner in (True, False):  # where what is innermost in merged dimensions reaches the border, the set has to end before it
            growing = _Growing(inner, cut={anchor: dim})
            late = self._onwards(growing, start, wanted[-1], allowed, component)
            self._back(growing, range(wanted[-1], wanted[0] - 1, -1), allowed - late, component)
            if start not in growing.axes or all(is_view(self.graph.nodes[place]) for place in growing.axes):
                return None
            region = self._region(growing, component)
            if region is not None or not any(map(is_innermost, growing.cut.values())):
                return region
        return None

    def _onwards(self, growing: _Growing, start: int, last: int, allowed: set[int], component: int) -> set[int]:
        """Nodes from the anchor's maker on. The places outside of the set that come after it."""
        late: set[int] = set()
        behind, reached = self._flags(), self._flags()  # by place: whether it waits for one of these, for one of the set
        for place in range(start, last + 1):
            if not behind[place] and place in allowed and self._joins(growing, place, component):
                _mark(reached, self.after[place])
            elif behind[place] or reached[place]:
                late.add(place)
                _mark(behind, self.after[place])
        return late

    def _back(self, growing: _Growing, places: Iterable[int], allowed: set[int], component: int) -> None:
        """All others that no path through what stays outside leads back into the set."""
        ahead, reaching = self._flags(), self._flags()
        for place in growing.axes:
            _mark(reaching, self.before[place])
        for place in places:
            if place in growing.axes:
                continue
            if not ahead[place] and place in allowed and self._joins(growing, place, component):
                _mark(reaching, self.before[place])
            elif ahead[place] or reaching[place]:
                _mark(ahead, self.before[place])

    def _flags(self) -> bytearray:
        return bytearray(len(self.graph.nodes))

    def _is_fine(self, place: int, component: int, extent: Size) -> bool:
        extents = (node.axis.extent for node in self.cuts[place].get(component, ()))
        return all(isinstance(mine, int) and mine % extent == 0 for mine in extents)

    def _joins(self, growing: _Growing, place: int, component: int) -> bool:
        for node in self.cuts[place].get(component, ()):
            if isinstance(node.axis.extent, int) and growing.takes(node):
                growing.add(place, node)
                return True
        return False

    def _region(self, growing: _Growing, component: int) -> SplitSet | None:
        axes = dict(sorted(growing.axes.items()))
        units = gcd(*(axis.extent for axis in axes.values() if isinstance(axis.extent, int)))
        if units < 2:
            return None
        nodes = [self.graph.nodes[place] for place in axes]
        results = dict.fromkeys(value for node in nodes for value in node.results)
        given = dict.fromkeys(value for node in nodes for value in _reads(node) if value not in results and value.dtype != "scalar")
        outputs = set(self.graph.outputs)
        outer = [value for value in results if value in outputs or any(place not in axes for place in self.readers.get(value, ()))]
        over = [after for node in nodes for _, after in node.writes]
        if any(is_innermost(growing.cut.get(value, 0)) for value in (*given, *outer, *over)):
            return None  # no slice of what lies merged outside
        storages = {value.storage for value in given}
        if any(merges_apart(node, growing.cut, storages) for node in nodes):
            return None
        merges = {value: role for node, axis in zip(nodes, axes.values(), strict=True) for value, role in _roles(node, axis)}
        return SplitSet(
            component,
            axes,
            units,
            sliced={value: growing.cut[value] for value in given if value in growing.cut},
            shared=tuple(value for value in given if value not in growing.cut),
            written={value: growing.cut[value] for value in dict.fromkeys((*outer, *over)) if value in growing.cut},
            accumulated={value: merges[value] for value in outer if value in merges},
        )


def _mark(flags: bytearray, places: Iterable[int]) -> None:
    for place in places:
        flags[place] = 1


def _reads(node: Node) -> tuple[Value, ...]:
    return node.inputs if not node.writes else tuple(dict.fromkeys((*node.inputs, *(before for before, _ in node.writes))))


def _roles(node: Node, axis: Axis) -> list[tuple[Value, Reduced]]:
    return [(value, role) for value, role in zip(node.results, axis.results, strict=True) if isinstance(role, Reduced)]


def _dims_by_value(node: Node, axis: Axis) -> dict[Value, set[int]]:
    dims: dict[Value, set[int]] = {}
    for value, dim in cut_by(node, axis):
        dims.setdefault(value, set()).add(dim)
    return dims


def _mixed(node: Node, axis: Axis) -> bool:
    """Whether a value stands among the arguments twice, cut and whole."""
    paths = {path for path, _ in axis.sliced}
    cut = {value for path, value in tensor_paths(node) if path in paths}
    return any(value in cut for path, value in tensor_paths(node) if path not in paths)
