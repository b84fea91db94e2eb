"""A run of operators as one that works slice by slice: between them lie rings of a few slices, and never a whole tensor.

A slice is one entry along `axis` of a tensor. The result is made one slice after the other, and each makes those that it still needs of
the tensor before it, which are kept in a ring for as long as someone needs them. With bands, the result is made in bands along a second
axis, one after the other: rings hold a band's part of a slice only, and what two bands both need is computed twice (line buffers, and
patches with halos: MCUNetV2, NeurIPS 2021, section 3.1; msf-CNN, NeurIPS 2025, section 3).

How many slices a ring holds: what is asked of a tensor depends only on those that come after it. So a run grows at its front, and what is
known of the rest stays.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from lowtide.edge.graph import BITS, EdgeGraph, EdgeNode, EdgeTensor, SharedBytes, shared_bytes
from lowtide.edge.operators import renumbered
from lowtide.edge.windows import CUT_DOMAIN, LOAD, NodeWindows, SliceWindow, is_weight, reads_of
from lowtide.errors import FormatError

_NEVER = 2**62
Counts = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Ring:
    """The last slices of a tensor in the workspace: slice x lies at `offset_bytes + x % slots * slot_bytes`."""

    offset_bytes: int
    slots: int
    slot_bytes: int


@dataclass(frozen=True, slots=True)
class CutTraffic:
    """Bytes that a cut reads and writes in one run, by the model that `lowtide.edge.plan` states."""

    read_bytes: tuple[int, ...]  # of each input from outside, weights among them
    ring_written_bytes: int
    ring_read_bytes: int


@dataclass(frozen=True, slots=True)
class _Reader:
    """Who reads a tensor, through which windows along the two axes."""

    result: int
    along: SliceWindow | None  # None: it reads all of the tensor
    across: SliceWindow | None


@dataclass(frozen=True)
class CutStages:
    """Operators that work slice by slice along an axis, in bands of one of several sizes along another. Tensors are those of the graph."""

    graph: EdgeGraph
    axis: int
    band_axis: int
    sizes: tuple[int, ...]  # of bands, in entries of the result; a single 0 where there are none
    output: int
    steps: tuple[tuple[int, int], ...]  # (tensor, slice) in the order in which they are made
    slots: Mapping[int, int]  # by tensor that is made within
    rows: Mapping[int, tuple[Counts, Counts]]  # by tensor [low, high) of its entries along `band_axis` in each band of each size
    readers: Mapping[int, tuple[_Reader, ...]]  # by tensor that is read
    takes: Mapping[int, tuple[int, ...]]  # by tensor that is made within: those that it may be written over
    slice_bytes: Mapping[int, Counts]  # by tensor in a ring, by size
    lines: Mapping[int, tuple[int, ...]]  # by tensor that is made, by size: its rows in all slices of all bands
    macs: tuple[int, ...]  # by size
    align_bytes: int
    loaded: int = -1  # the tensor from outside that comes through a ring

    @classmethod
    def of(cls, graph: EdgeGraph, node: EdgeNode, axis: int, band_axis: int, sizes: Sequence[int], align_bytes: int) -> CutStages:
        """One operator, which can be cut along these axes."""
        output = node.outputs[0]
        shape = graph.tensors[output].shape
        lows = [np.arange(0, shape[band_axis], size) for size in sizes] if band_axis >= 0 else []
        highs = [np.minimum(low + size, shape[band_axis]) for low, size in zip(lows, sizes, strict=False)]
        rows = {output: (np.concatenate(lows), np.concatenate(highs))} if lows else {}
        steps = tuple((output, slice_) for slice_ in range(shape[axis]))
        run = cls(graph, axis, band_axis, tuple(sizes), output, steps, {}, rows, {}, {}, {}, {}, (0,) * len(sizes), align_bytes)
        return run._with(node, shape[axis], rows)

    def led_by(self, node: EdgeNode) -> CutStages | None:
        """The run with an operator before it, whose result nobody else reads; None where someone in it reads that as a whole."""
        result = node.outputs[0]
        readers = self.readers.get(result, ())
        odd = [each for each in readers if each.along is None or (self.band_axis >= 0 and each.across is None)]
        if not readers or odd or len(self.graph.tensors[result].shape) != len(self.graph.tensors[self.output].shape):
            return None
        longer, count = self._fed(result)
        return longer._with(node, count, longer.rows)

    def staged(self, source: int) -> CutStages | None:
        """The run, without bands, whose one tensor from outside comes through a ring; None where that is a slice, or read as a whole."""
        one_slice = self.graph.tensors[source].shape[self.axis] < 2
        if self.band_axis >= 0 or one_slice or any(each.along is None for each in self.readers[source]):
            return None
        run, count = self._fed(source)
        return replace(run, loaded=source, lines={**run.lines, source: (count,) * len(self.sizes)})

    def _with(self, node: EdgeNode, count: int, rows: Mapping[int, tuple[Counts, Counts]]) -> CutStages:
        """With what an operator reads, and its multiplications: `count` slices of its result are made."""
        reads = reads_of(self.graph, node) or NodeWindows(frozenset(), {})
        result = node.outputs[0]
        readers = dict(self.readers)
        for tensor in dict.fromkeys(at for at in node.inputs if at >= 0 and not is_weight(self.graph, at)):
            readers[tensor] = (
                *readers.get(tensor, ()),
                _Reader(result, reads.window(tensor, self.axis), reads.window(tensor, self.band_axis)),
            )
        takes = {**self.takes, result: tuple(node.inputs[source] for _, source in node.in_place)}
        shape = self.graph.tensors[result].shape
        lines = tuple(count * each for each in (self._per_size(np.add, rows[result]) if self.band_axis >= 0 else [1]))
        whole = shape[self.axis] * (shape[self.band_axis] if self.band_axis >= 0 else 1)
        macs = tuple(before + -(-node.macs * each // whole) for before, each in zip(self.macs, lines, strict=True))
        return replace(self, readers=readers, takes=takes, lines={**self.lines, result: lines}, macs=macs)

    def _per_size(self, what: np.ufunc, rows: tuple[Counts, Counts]) -> list[int]:
        whole = self.graph.tensors[self.output].shape[self.band_axis]
        counts = [-(-whole // size) for size in self.sizes]
        starts = np.cumsum([0, *counts[:-1]])
        return [int(each) for each in what.reduceat(rows[1] - rows[0], starts)]

    def _fed(self, tensor: int) -> tuple[CutStages, int]:
        """The run with slices of a tensor made just before they are read, and how many those are."""
        extent = self.graph.tensors[tensor].shape[self.axis]
        windows = {each.result: each.along for each in self.readers[tensor] if each.along is not None}
        total = dict.fromkeys(windows, 0)
        for result, _ in self.steps:
            if result in total:
                total[result] += 1
        oldest = {result: max(0, window.span(0, 1)[0]) for result, window in windows.items()}
        steps: list[tuple[int, int]] = []
        count = slots = 0
        for step in self.steps:
            window = windows.get(step[0])
            if window is not None:
                high = min(extent, window.span(step[1], step[1] + 1)[1])
                if count < high:
                    slots = max(slots, high - min(oldest.values()))
                    steps += [(tensor, each) for each in range(count, high)]
                    count = high
                following = step[1] + 1
                oldest[step[0]] = _NEVER if following == total[step[0]] else max(0, window.span(following, following + 1)[0])
            steps.append(step)
        rows = dict(self.rows)
        if self.band_axis >= 0:
            spans = [each.across.span(*self.rows[each.result]) for each in self.readers[tensor] if each.across is not None]
            lines = self.graph.tensors[tensor].shape[self.band_axis]
            low = np.maximum(np.minimum.reduce([span[0] for span in spans]), 0)
            rows[tensor] = (low, np.minimum(np.maximum.reduce([span[1] for span in spans]), lines))
        slice_bytes = {**self.slice_bytes, tensor: self._slice_bytes(tensor, rows)}
        return replace(self, steps=tuple(steps), slots={**self.slots, tensor: slots}, rows=rows, slice_bytes=slice_bytes), count

    @property
    def inputs(self) -> tuple[int, ...]:
        return tuple(tensor for tensor in self.readers if tensor not in self.slots or tensor == self.loaded)

    def written_over(self) -> tuple[int, ...]:
        """Tensors from outside that the result may be written over: no slice of them is read once the result's is there."""
        if self.band_axis >= 0 and self.sizes[0] < self.graph.tensors[self.output].shape[self.band_axis]:
            return ()
        result = self.graph.tensors[self.output]
        alike = [self.graph.tensors[at].shape == result.shape and _bits(self.graph.tensors[at]) == _bits(result) for at in self.inputs]
        return tuple(one for one, same in zip(self.inputs, alike, strict=True) if same and self._dies_ahead(one))

    def _dies_ahead(self, one: int) -> bool:
        if self.graph.tensors[one].constant or any(each.along is None for each in self.readers[one]):
            return False
        windows = {one: SliceWindow()} if one == self.loaded else {each.result: each.along or SliceWindow() for each in self.readers[one]}
        read: dict[int, int] = {}  # by slice: the step at which it is read last
        written: list[int] = []  # by slice of the result: the step
        for at, (result, slice_) in enumerate(self.steps):
            if result in windows:
                read |= dict.fromkeys(range(*windows[result].span(slice_, slice_ + 1)), at)
            written += [at] if result == self.output else []
        return all(read.get(slice_, -1) <= at for slice_, at in enumerate(written))

    def _slice_bytes(self, tensor: int, rows: Mapping[int, tuple[Counts, Counts]]) -> Counts:
        noun = self.graph.tensors[tensor]
        whole = noun.size_bytes // max(noun.shape[self.axis], 1)
        lines = noun.shape[self.band_axis] if self.band_axis >= 0 else 1
        most = np.array(self._per_size(np.maximum, rows[tensor]) if self.band_axis >= 0 else [1])
        return -(-(whole // lines * most) // self.align_bytes) * self.align_bytes

    def traffic(self, members: Sequence[EdgeNode], inputs: Sequence[int]) -> tuple[Counts, Counts, Counts]:
        """By size of bands: [sizes, inputs] bytes read of each of these from outside; bytes written to rings; bytes read from them."""
        bands = np.array([-(-self.graph.tensors[self.output].shape[self.band_axis] // size) if size else 1 for size in self.sizes])
        read: dict[int, Counts] = {tensor: np.zeros(len(bands), np.int64) for tensor in inputs}
        weights = {tensor for tensor in inputs if is_weight(self.graph, tensor)}
        turns = Counter(tensor for tensor, _ in groupby(result for result, _ in self.steps)) if weights else Counter[int]()
        for node in members if weights else ():
            for tensor in weights.intersection(node.inputs):
                result, nbytes = node.outputs[0], self.graph.tensors[tensor].size_bytes
                reads = reads_of(self.graph, node)
                if self.axis == 1 and reads is not None and tensor in reads.weights:  # each slice its own
                    read[tensor] = read[tensor] + -(-nbytes // self.graph.tensors[result].shape[1]) * np.array(self.lines[result])
                else:
                    read[tensor] = read[tensor] + nbytes * turns[result] * bands
        for tensor in (each for each in self.inputs if each in read):
            for reader in self.readers[tensor] if tensor != self.loaded else (_Reader(tensor, SliceWindow(), None),):
                read[tensor] = read[tensor] + self._read_bytes(tensor, reader, bands)
        written = {tensor: self._made_bytes(tensor) for tensor in self.slots}
        from_rings = [nbytes * len(self.readers[tensor]) for tensor, nbytes in written.items()]
        none = np.zeros(len(bands), np.int64)
        by_input = np.array([*read.values()], np.int64).reshape(-1, len(bands)).T
        return by_input, sum(written.values(), none), sum(from_rings, none)

    def _made_bytes(self, tensor: int) -> Counts:
        noun = self.graph.tensors[tensor]
        whole = noun.shape[self.axis] * (noun.shape[self.band_axis] if self.band_axis >= 0 else 1)
        return noun.size_bytes * np.array(self.lines[tensor], np.int64) // max(whole, 1)

    def _read_bytes(self, tensor: int, reader: _Reader, bands: Counts) -> Counts:
        """Of a tensor from outside: all of it in each band, or the rows that the band needs."""
        noun = self.graph.tensors[tensor]
        if reader.across is None or self.band_axis < 0:
            return noun.size_bytes * bands
        lines = noun.shape[self.band_axis]
        low, high = reader.across.span(*self.rows[reader.result])
        return noun.size_bytes // lines * np.array(self._per_size(np.add, (np.maximum(low, 0), np.minimum(high, lines))))

    def holder(self, tensor: int) -> int:
        """The tensor whose ring a tensor lies in: what is written over it, where that alone reads it, slice by slice."""
        while True:
            result = self.readers[tensor][0].result
            may = [at for at in self.takes.get(result, ()) if self.slots.get(at) == 1 and len(self.readers[at]) == 1]
            if result == self.output or may[:1] != [tensor]:
                return tensor
            tensor = result

    def workspace_bytes(self) -> Counts:
        """By size of bands the bytes of all rings."""
        total: Counts = np.zeros(len(self.sizes), np.int64)
        for tensor, slots in self.slots.items():
            if self.holder(tensor) == tensor:
                total = total + slots * self.slice_bytes[tensor]
        return total

    def rings(self) -> tuple[Ring, ...]:
        """The ring of each tensor that is made within, first made first, with bands of the first size."""
        rings: dict[int, Ring] = {}
        offset = 0
        for tensor, slots in self.slots.items():  # the last first, so that holders have theirs
            if (holder := self.holder(tensor)) != tensor:
                rings[tensor] = rings[holder]
                continue
            rings[tensor] = Ring(offset, slots, int(self.slice_bytes[tensor][0]))
            offset += slots * rings[tensor].slot_bytes
        return tuple(reversed(rings.values()))


def _bits(tensor: EdgeTensor) -> int:
    return BITS[tensor.stored_dtype or tensor.dtype]


@dataclass(frozen=True, slots=True)
class Cut:
    first: int  # of the network's operators
    last: int
    axis: int  # of the result: slices are one entry along it
    band_axis: int = -1  # -1: no bands
    band: int = 0  # entries of the result along it in one band
    staged: bool = False  # without bands: whether the first operator's input comes through a ring too, read once, perhaps written over


@dataclass(frozen=True, slots=True)
class CutBody:
    """The operators of a cut as a network of their own, and where the rings lie in the workspace."""

    cut: Cut
    graph: EdgeGraph  # its last operator makes the result
    rings: tuple[Ring, ...]  # of what each operator but the last makes

    @property
    def rows(self) -> list[tuple[int, int]]:
        """[low, high) of the result along the second axis, band after band; all of it where there are no bands."""
        if self.cut.band_axis < 0:
            return [(0, 0)]
        whole = self.graph.tensors[self.graph.outputs[0]].shape[self.cut.band_axis]
        return [(low, min(low + self.cut.band, whole)) for low in range(0, whole, self.cut.band)]


def cut_body(node: EdgeNode) -> CutBody | None:
    """What a node that is a cut consists of; None for another."""
    values = node.attributes
    return CutBody(values["cut"], values["body"], values["rings"]) if "cut" in values else None


def can_be_cut(graph: EdgeGraph, node: EdgeNode, axis: int, band_axis: int = -1) -> bool:
    """Whether an operator makes its result slice by slice along an axis, of whole bytes each, and in bands along another.

    Operators with windows or weights have no bands along channels, and none beside slices along them.
    """
    reads = reads_of(graph, node)
    if band_axis >= 0 and (
        not can_be_cut(graph, node, band_axis) or (1 in (axis, band_axis) and not (reads and reads.is_number_by_number))
    ):
        return False
    tensors = [graph.tensors[at] for at in (node.outputs[0], *(reads.of_input if reads is not None else ()))]
    return reads is not None and axis in reads.axes and all(BITS[each.stored_dtype or each.dtype] >= 8 for each in tensors)


def with_cuts(graph: EdgeGraph, cuts: Sequence[Cut], align_bytes: int = 1) -> EdgeGraph:
    """The network with each cut as one operator, whose workspace holds the rings, each slice at a multiple of the alignment.

    Raises FormatError for cuts that overlap, or of operators that cannot be cut so.
    """
    nodes: list[EdgeNode] = []
    at, shared = 0, shared_bytes(graph)
    for cut in sorted(cuts, key=lambda each: each.first):
        if not at <= cut.first <= cut.last < len(graph.nodes):
            raise FormatError(f"cuts: expected operators from {at} to {len(graph.nodes) - 1}, none twice, got {cut.first} to {cut.last}")
        nodes += [*graph.nodes[at : cut.first], _node(graph, cut, align_bytes, shared)]
        at = cut.last + 1
    return renumbered(graph, [*nodes, *graph.nodes[at:]])


def _node(graph: EdgeGraph, cut: Cut, align_bytes: int, shared: SharedBytes) -> EdgeNode:
    members = graph.nodes[cut.first : cut.last + 1]
    run = _run(graph, cut, align_bytes)
    if run is None:
        text = f"{members[0].name} to {members[-1].name} cannot be cut along axis {cut.axis}, in bands of {cut.band} along {cut.band_axis}"
        raise FormatError(f"cuts: operators {text}")
    inputs = tuple(dict.fromkeys(at for node in members for at in node.inputs if at >= 0 and at not in run.slots and at != run.output))
    whole = replace(graph, name=f"{members[0].name} to {members[-1].name}", outputs=(run.output,))
    if cut.staged:
        whole, members = _staged(whole, members)
        inputs = tuple(dict.fromkeys((members[0].inputs[0], *inputs)))
    read, written, from_rings = run.traffic(graph.nodes[cut.first : cut.last + 1], inputs)
    traffic = CutTraffic(tuple(read[0].tolist()), int(written[0]), int(from_rings[0]))
    body = renumbered(replace(whole, inputs=tuple(at for at in inputs if not is_weight(graph, at))), members)
    return EdgeNode(
        name=members[-1].name if cut.first == cut.last else whole.name,
        kind="Cut",
        domain=CUT_DOMAIN,
        inputs=inputs,
        outputs=(run.output,),
        attributes={"cut": cut, "body": body, "rings": run.rings(), "traffic": traffic},
        macs=run.macs[0],
        workspace_bytes=int(run.workspace_bytes()[0]),
        in_place=() if shared.is_in_parts(run.output) else tuple((0, inputs.index(one)) for one in run.written_over()),
    )


def _run(graph: EdgeGraph, cut: Cut, align_bytes: int) -> CutStages | None:
    """The run of a cut; None where its operators cannot be cut so."""
    members = graph.nodes[cut.first : cut.last + 1]
    shape = graph.tensors[members[-1].outputs[0]].shape
    if not 0 <= cut.axis < len(shape) or not -1 <= cut.band_axis < len(shape) or cut.band_axis == cut.axis:
        return None
    if cut.band_axis >= 0 and not 0 < cut.band <= shape[cut.band_axis]:
        return None
    if not all(can_be_cut(graph, node, cut.axis, cut.band_axis) for node in members):
        return None
    outside = {at for index, node in enumerate(graph.nodes) if not cut.first <= index <= cut.last for at in node.inputs} | {*graph.outputs}
    run = CutStages.of(graph, members[-1], cut.axis, cut.band_axis, (cut.band,), align_bytes)
    for node in reversed(members[:-1]):
        longer = None if node.outputs[0] in outside else run.led_by(node)
        if longer is None:
            return None
        run = longer
    return run.staged(first_source(graph, members)) if cut.staged else run


def first_source(graph: EdgeGraph, members: Sequence[EdgeNode]) -> int:
    inner = {node.outputs[0] for node in members}
    return next(at for node in members for at in node.inputs if at >= 0 and at not in inner and not is_weight(graph, at))


def _staged(graph: EdgeGraph, members: Sequence[EdgeNode]) -> tuple[EdgeGraph, tuple[EdgeNode, ...]]:
    """The same with a copy of the first tensor in between."""
    source, copy = first_source(graph, members), len(graph.tensors)
    tensor = graph.tensors[source]
    graph = replace(graph, tensors=(*graph.tensors, replace(tensor, name=f"{tensor.name} slices", constant=False)))
    load = EdgeNode(f"load {tensor.name}", LOAD, CUT_DOMAIN, (source,), (copy,))
    return graph, (load, *(replace(node, inputs=tuple(copy if at == source else at for at in node.inputs)) for node in members))


def steps_of(body: CutBody) -> tuple[tuple[int, int], ...]:
    """(tensor of the body, slice) in the order in which they are made, the same in each band: each just before it is first read."""
    nodes = body.graph.nodes
    run: CutStages | None = CutStages.of(body.graph, nodes[-1], body.cut.axis, -1, (0,), 1)
    for node in reversed(nodes[:-1]):
        run = None if run is None else run.led_by(node)
    return () if run is None else run.steps


def with_inputs_outside(graph: EdgeGraph) -> EdgeGraph:
    """The network whose inputs are read from where the caller has them, as weights are: they are in none of the memories."""
    tensors = (replace(tensor, constant=True) if at in graph.inputs else tensor for at, tensor in enumerate(graph.tensors))
    return replace(graph, tensors=tuple(tensors))


def cuts_of(graph: EdgeGraph) -> tuple[Cut, ...]:
    """The cuts that a network was made with."""
    return tuple(body.cut for node in graph.nodes if (body := cut_body(node)) is not None)


def extra_macs(graph: EdgeGraph) -> float:
    """The share of multiplications that are done again: 0.0 where none is."""
    bodies = [cut_body(node) for node in graph.nodes]
    once = sum(
        node.macs if body is None else sum(member.macs for member in body.graph.nodes)
        for node, body in zip(graph.nodes, bodies, strict=True)
    )
    return max(0.0, sum(node.macs for node in graph.nodes) / once - 1) if once else 0.0
