"""A cut gone over slice by slice, with nothing but windows and rings in hand. Shares no code with what made it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import NoReturn

from lowtide.edge.graph import EdgeGraph, EdgeNode
from lowtide.edge.windows import NodeWindows, is_weight, reads_of
from lowtide.errors import CheckError


def check_cut(graph: EdgeGraph, node: EdgeNode) -> None:
    """Raises CheckError, naming the operator, unless a cut can be run in its workspace and counts all that it multiplies, reads and writes.

    - every operator of it reads windows of whatever is made within
    - rings lie in the workspace, apart, but for one that a result is written into over its only input
    - a slice is in its ring, with all rows that are read, whenever it is read; slices are made once a band, each just before it is read
    - the bands together make all of the result; the result goes over an input only where no slice of that is read afterwards
    """
    _CutWalk(graph, node).check()


class _CutWalk:
    """One band of a cut after the other."""

    def __init__(self, graph: EdgeGraph, node: EdgeNode) -> None:
        self.node, self.body = node, node.attributes["body"]
        cut = node.attributes["cut"]
        self.axis, self.band_axis, self.band = cut.axis, cut.band_axis, cut.band
        self.maker = {member.outputs[0]: at for at, member in enumerate(self.body.nodes)}
        self.result = self.body.outputs[0]
        self.ring_of = dict(zip(self.maker, node.attributes["rings"], strict=False))
        self.outside = dict(zip(self.body.inputs, (at for at in node.inputs if at >= 0 and not is_weight(graph, at)), strict=True))
        weights = sorted({at for member in self.body.nodes for at in member.inputs if at >= 0 and is_weight(self.body, at)})
        self.weights = dict(zip(weights, sorted({at for at in node.inputs if at >= 0 and is_weight(graph, at)}), strict=True))
        self.reads: list[NodeWindows] = []
        for member in self.body.nodes:
            windows = reads_of(self.body, member)
            if windows is None or self.axis not in windows.axes or (self.band_axis >= 0 and self.band_axis not in windows.axes):
                self._refuse(f"{member.name} cannot be cut along axes {self.axis} and {self.band_axis}")
            self.reads.append(windows)
        self.lines = dict.fromkeys(self.maker, 0)  # slices, by the rows of each, that were made in all bands
        self.written = 0  # slices of the result in this band
        self.made_last = -1  # the tensor whose slice was made last in this band
        self.read_bytes = {at: 0 for at in node.inputs if at >= 0}
        self.overwritable = set(self.outside)

    def _refuse(self, text: str) -> NoReturn:
        raise CheckError(f"cut {self.node.name}: {text}")

    def check(self) -> None:
        if self.body.nodes[-1].outputs[0] != self.result or len(self.node.attributes["rings"]) != len(self.maker) - 1:
            self._refuse(f"expected a ring for each of {len(self.maker) - 1} tensors between its operators")
        self._check_rings()
        whole = self._extent(self.result, self.band_axis)
        done = 0
        while done < whole:
            rows = (done, min(done + self.band, whole) if self.band_axis >= 0 else whole)
            if rows[1] <= done:
                self._refuse(f"expected bands of 1 entry or more, got {self.band}")
            self._check_band(rows)
            done = rows[1]
        macs = sum(-(-member.macs * self.lines[member.outputs[0]] // self._lines(member.outputs[0])) for member in self.body.nodes)
        if macs != self.node.macs:
            self._refuse(f"expected {macs} multiplications, got {self.node.macs}")
        self._check_traffic()
        claimed = {self.node.inputs[source] for _, source in self.node.in_place}
        allowed = {self.outside[one] for one in self.overwritable} if self.band_axis < 0 else set()
        if not claimed <= allowed:
            self._refuse("its result cannot be written over an input that is still read")

    def _check_traffic(self) -> None:
        """Each ring is written as often as its tensor is made, and read as often by each that reads that tensor."""
        written = read = 0
        for tensor in self.ring_of:
            nbytes = self.body.tensors[tensor].size_bytes * self.lines[tensor] // self._lines(tensor)
            written += nbytes
            read += nbytes * sum(tensor in member.inputs for member in self.body.nodes)
        expected = (tuple(self.read_bytes[at] for at in self.node.inputs), written, read)
        claimed = self.node.attributes["traffic"]
        if expected != (claimed.read_bytes, claimed.ring_written_bytes, claimed.ring_read_bytes):
            self._refuse(f"expected {expected} as bytes of its inputs that are read, of rings written and read, got {claimed}")

    def _count_band(self) -> None:
        """What a band reads from outside: the rows that it needs, or all where an operator reads all."""
        for member, reads in zip(self.body.nodes, self.reads, strict=True):
            for one in {*member.inputs} & {*self.outside}:
                noun, window = self.body.tensors[one], reads.window(one, self.band_axis) if self.band_axis >= 0 else None
                low, high, lines = 0, 1, 1
                if window is not None:
                    lines = noun.shape[self.band_axis]
                    low, high = window.span(*self.rows[member.outputs[0]])
                self.read_bytes[self.outside[one]] += noun.size_bytes // lines * (min(high, lines) - max(low, 0))

    def _extent(self, tensor: int, axis: int) -> int:
        return self.body.tensors[tensor].shape[axis] if axis >= 0 else 1

    def _lines(self, tensor: int) -> int:
        return self._extent(tensor, self.axis) * self._extent(tensor, self.band_axis)

    def _check_rings(self) -> None:
        spans: dict[tuple[int, int], list[int]] = {}
        for tensor, ring in self.ring_of.items():
            span = (ring.offset_bytes, ring.offset_bytes + ring.slots * ring.slot_bytes)
            if ring.slots < 1 or span[0] < 0 or span[1] > self.node.workspace_bytes:
                self._refuse(f"the ring of {self.body.tensors[tensor].name} lies outside of its {self.node.workspace_bytes} bytes")
            spans.setdefault(span, []).append(tensor)
        apart = sorted(spans)
        for one, other in pairwise(apart):
            if other[0] < one[1]:
                self._refuse(f"rings at bytes {one[0]} and {other[0]} of its workspace overlap")
        for tensors in spans.values():
            for tensor, over in pairwise(tensors):
                member = self.body.nodes[self.maker[over]]
                if tensor not in [member.inputs[source] for _, source in member.in_place]:
                    self._refuse(f"{self.body.tensors[over].name} is written over {self.body.tensors[tensor].name} in its ring")

    def _check_band(self, rows: tuple[int, int]) -> None:
        """Makes each slice of the result, and before it what it needs."""
        self.rows = self._rows(rows)
        self.count = dict.fromkeys(self.maker, 0)
        self.slots: dict[tuple[int, int], tuple[int, int]] = {}  # by ring and slot: the tensor and slice in it
        self.written, self.made_last = 0, -1
        self._count_band()
        waiting = [(self.result, self._extent(self.result, self.axis))]
        while waiting:  # a tensor, and how many slices of it are wanted
            tensor, wanted = waiting[-1]
            if self.count[tensor] >= wanted:
                waiting.pop()
            elif (missing := self._missing(tensor)) is not None:
                waiting.append(missing)
            else:
                self._make(tensor)

    def _rows(self, rows: tuple[int, int]) -> Mapping[int, tuple[int, int]]:
        rows_of = {self.result: rows}
        for member, reads in zip(self.body.nodes[::-1], self.reads[::-1], strict=True):
            for tensor in {*member.inputs} & {*self.maker} if self.band_axis >= 0 else ():
                window = reads.window(tensor, self.band_axis)
                if window is None:
                    self._refuse(f"{member.name} reads all of {self.body.tensors[tensor].name}, which is made in bands")
                low, high = window.span(*rows_of[member.outputs[0]])
                other = rows_of.get(tensor, (low, high))
                rows_of[tensor] = (max(0, min(low, other[0])), min(self._extent(tensor, self.band_axis), max(high, other[1])))
        return rows_of

    def _spans(self, tensor: int) -> list[tuple[int, int, int]]:
        """(input, low, high) of the slices that the next one of a tensor reads."""
        at, spans = self.maker[tensor], []
        for one in dict.fromkeys(self.body.nodes[at].inputs):
            window = self.reads[at].window(one, self.axis)
            if one in self.maker and window is None:
                self._refuse(f"{self.body.nodes[at].name} reads all of {self.body.tensors[one].name}, which is made in slices")
            if window is not None and (one in self.maker or one in self.outside):
                low, high = window.span(self.count[tensor], self.count[tensor] + 1)
                spans.append((one, max(0, low), min(self._extent(one, self.axis), high)))
            elif one in self.outside and self.written:
                self.overwritable.discard(one)
        return spans

    def _missing(self, tensor: int) -> tuple[int, int] | None:
        """What has to be made first: of several what is made latest, as that reads the others."""
        missing = [(self.maker[one], one, high) for one, _, high in self._spans(tensor) if one in self.maker and self.count[one] < high]
        return max(missing)[1:] if missing else None

    def _make(self, tensor: int) -> None:
        at, slice_ = self.maker[tensor], self.count[tensor]
        for one, low, high in self._spans(tensor):
            for each in range(low, high):
                if one in self.outside and each < self.written:
                    self.overwritable.discard(one)
                if one in self.maker and self.slots.get(self._slot(one, each)) != (one, each):
                    self._refuse(f"{self.body.nodes[at].name} reads slice {each} of {self.body.tensors[one].name}, which its ring has lost")
        for one in {*self.body.nodes[at].inputs} & {*self.weights}:
            if self.axis == 1 and one in self.reads[at].weights:  # a slice reads its own weights, once
                self.read_bytes[self.weights[one]] += -(-self.body.tensors[one].size_bytes // self._extent(tensor, 1))
            elif tensor != self.made_last:  # others are read anew at each turn
                self.read_bytes[self.weights[one]] += self.body.tensors[one].size_bytes
        self.made_last = tensor
        self.count[tensor] += 1
        lines = self.rows[tensor] if self.band_axis >= 0 else (0, 1)
        self.lines[tensor] += lines[1] - lines[0]
        if tensor == self.result:
            self.written += 1
            return
        noun = self.body.tensors[tensor]
        if noun.size_bytes * (lines[1] - lines[0]) // self._lines(tensor) > self.ring_of[tensor].slot_bytes:
            self._refuse(f"a slice of {noun.name} is larger than a slot of its ring, {self.ring_of[tensor].slot_bytes} bytes")
        self.slots[self._slot(tensor, slice_)] = (tensor, slice_)

    def _slot(self, tensor: int, slice_: int) -> tuple[int, int]:
        ring = self.ring_of[tensor]
        return ring.offset_bytes, slice_ % ring.slots
