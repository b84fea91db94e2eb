"""A cut, run: slices computed one after the other, from and into rings in the workspace that wrap around.

A slice is computed by the kernels of whole operators, with shapes and padding of that part of the result.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.edge.cuts import CutBody, steps_of
from lowtide.edge.graph import EdgeGraph, EdgeNode, EdgeTensor, from_bytes, numpy_dtype, to_bytes
from lowtide.edge.models import Array, Engine, Function, Kernel, kernel_of
from lowtide.edge.windows import LOAD, NodeWindows, is_weight, reads_of, without_weights
from lowtide.errors import CheckError

Span = tuple[int, int]
Shape = tuple[int, ...]
Pads = Mapping[int, tuple[int, int]]  # by axis: entries of padding before and after
_ATEN_PADDING = {"convolution": 4, "max_pool2d_with_indices": 3, "avg_pool2d": 3}  # where it is among the arguments


@dataclass(frozen=True)
class Lying:
    """The bytes of a tensor, or of a workspace, where they lie, and whose each is."""

    raw: NDArray[np.uint8]
    owners: NDArray[np.int64]
    owner: int


class CutRun:
    """One run of a cut: parts of tensors from outside, slices in rings, and the result where it lies."""

    def __init__(
        self, body: CutBody, kernels: SliceKernels, outside: Mapping[int, Lying | Array], result: Lying, workspace: Lying, where: str
    ) -> None:
        self.body, self.graph, self.kernels, self.where = body, body.graph, kernels, where
        self.outside, self.result, self.workspace = outside, result, workspace
        self.axes = [axis for axis in (body.cut.axis, body.cut.band_axis) if axis >= 0]
        self.reads: list[NodeWindows] = [reads_of(self.graph, node) or NodeWindows(frozenset(), {}) for node in self.graph.nodes]
        self.maker = {node.outputs[0]: at for at, node in enumerate(self.graph.nodes)}
        self.contents: dict[int, tuple[int, int, Span]] = {}  # by the workspace's byte where a slot begins: tensor, slice, rows

    def run(self) -> None:
        """Raises CheckError where a slice is read that is not there."""
        order = steps_of(self.body)
        for band in self.body.rows:
            rows = self._rows(band)
            self.contents.clear()
            self.workspace.owners[:] = -1
            for tensor, slice_ in order:
                self._make(self.maker[tensor], slice_, rows)

    def _rows(self, band: Span) -> dict[int, Span]:
        """By tensor [low, high) of its entries along the second axis that a band makes."""
        axis, output = self.body.cut.band_axis, self.graph.outputs[0]
        rows: dict[int, Span] = {output: band}
        for node, reads in zip(reversed(self.graph.nodes), reversed(self.reads), strict=True):
            for tensor in reads.of_input if axis >= 0 else ():
                window = reads.window(tensor, axis)
                if window is not None:
                    low, high = window.span(*rows[node.outputs[0]])
                    before = rows.get(tensor, (low, high))
                    rows[tensor] = (max(0, min(low, before[0])), min(self.graph.tensors[tensor].shape[axis], max(high, before[1])))
        return rows

    def _make(self, at: int, slice_: int, rows: Mapping[int, Span]) -> None:
        node, cut = self.graph.nodes[at], self.body.cut
        result = node.outputs[0]
        spans = {cut.axis: (slice_, slice_ + 1)} | ({cut.band_axis: rows[result]} if cut.band_axis >= 0 else {})
        arrays: list[Array | None] = []
        pads: dict[int, Span] = {}
        for tensor in node.inputs:
            if tensor < 0 or (tensor not in self.maker and tensor not in self.outside):
                array = None if tensor < 0 else np.asarray(self.graph.constants[tensor])
                arrays.append(array[slice(*spans[1])] if array is not None and 1 in spans and tensor in self.reads[at].weights else array)
                continue
            needs: dict[int, Span] = {}
            for axis, window in self.reads[at].of_input.get(tensor, {}).items():
                shape = self.graph.tensors[tensor].shape
                low, high = window.span(*spans.get(axis, (0, self.graph.tensors[result].shape[axis])))
                if axis in self.axes:
                    needs[axis] = (max(0, low), min(shape[axis], high))
                if axis in self.axes or not self.reads[at].is_number_by_number:
                    pads[axis] = (max(0, -low), max(0, high - shape[axis]))
            arrays.append(self._part(tensor, needs, rows))
        whole = self.graph.tensors[result].shape
        shape = tuple(spans[axis][1] - spans[axis][0] if axis in spans else extent for axis, extent in enumerate(whole))
        self._put(result, spans, self.kernels.compute(at, arrays, shape, pads), shape)

    def _part(self, tensor: int, needs: Mapping[int, Span], rows: Mapping[int, Span]) -> Array:
        """What is needed of a tensor: of one from outside, or of slices in a ring."""
        noun, cut = self.graph.tensors[tensor], self.body.cut
        if tensor in self.outside:
            return self._from_outside(tensor, needs)
        ring, parts = self.body.rings[self.maker[tensor]], []
        have = rows.get(tensor, (0, 0))
        for slice_ in range(*needs[cut.axis]):
            begin = ring.offset_bytes + slice_ % ring.slots * ring.slot_bytes
            if self.contents.get(begin) != (tensor, slice_, have):
                raise CheckError(f"{self.where}: expected slice {slice_} of `{noun.name}` in its ring, got {self.contents.get(begin)}")
            shape = self._shape(noun, {cut.axis: (slice_, slice_ + 1)}, have)
            size = int(np.prod(shape)) * _dtype(noun).itemsize
            if (self.workspace.owners[begin : begin + size] != tensor).any():
                raise CheckError(f"{self.where}: slice {slice_} of `{noun.name}` has been written over in its ring")
            part = from_bytes(self.workspace.raw[begin : begin + size], _stored(noun), shape)
            if cut.band_axis >= 0:
                low, high = needs[cut.band_axis]
                part = part.take(range(low - have[0], high - have[0]), axis=cut.band_axis)
            parts.append(part)
        return np.concatenate(parts, axis=cut.axis).astype(numpy_dtype(noun.dtype), copy=False)

    def _from_outside(self, tensor: int, needs: Mapping[int, Span]) -> Array:
        noun, source = self.graph.tensors[tensor], self.outside[tensor]
        index = tuple(slice(*needs[axis]) if axis in needs else slice(None) for axis in range(len(noun.shape)))
        if not isinstance(source, Lying):
            return np.ascontiguousarray(source[index])
        if (_typed(source.owners, noun)[index] != source.owner).any():
            raise CheckError(f"{self.where}: reads `{noun.name}` where it has been written over")
        part = _typed(source.raw, noun)[index].copy().view(_dtype(noun))[..., 0]
        return np.ascontiguousarray(part.astype(numpy_dtype(noun.dtype), copy=False))

    def _put(self, result: int, spans: Mapping[int, Span], array: Array, shape: Sequence[int]) -> None:
        noun, cut = self.graph.tensors[result], self.body.cut
        if array.shape != tuple(shape) or array.dtype != numpy_dtype(noun.dtype):
            raise CheckError(f"{self.where}: `{noun.name}`: expected {noun.dtype} {tuple(shape)}, got {array.dtype} {array.shape}")
        stored = array.astype(_dtype(noun))
        if not np.array_equal(stored.astype(array.dtype), array, equal_nan=array.dtype.kind == "f"):
            raise CheckError(f"{self.where}: `{noun.name}`: expected numbers that {_stored(noun)} holds, got others")
        raw = to_bytes(stored, _stored(noun))
        if result == self.graph.outputs[0]:
            index = tuple(slice(*spans[axis]) if axis in spans else slice(None) for axis in range(len(noun.shape)))
            _typed(self.result.raw, noun)[index] = raw.reshape(*shape, -1)
            _typed(self.result.owners, noun)[index] = self.result.owner
            return
        ring, slice_ = self.body.rings[self.maker[result]], spans[cut.axis][0]
        if len(raw) > ring.slot_bytes:
            raise CheckError(f"{self.where}: `{noun.name}`: a slice takes {len(raw)} bytes, its ring has {ring.slot_bytes}")
        begin = ring.offset_bytes + slice_ % ring.slots * ring.slot_bytes
        self.workspace.raw[begin : begin + len(raw)] = raw
        self.workspace.owners[begin : begin + len(raw)] = result
        self.contents[begin] = (result, slice_, spans.get(cut.band_axis, (0, 0)))

    def _shape(self, noun: EdgeTensor, spans: Mapping[int, Span], rows: Span) -> tuple[int, ...]:
        spans = {**spans, self.body.cut.band_axis: rows} if self.body.cut.band_axis >= 0 else spans
        return tuple(spans[axis][1] - spans[axis][0] if axis in spans else extent for axis, extent in enumerate(noun.shape))


def _stored(noun: EdgeTensor) -> str:
    return noun.stored_dtype or noun.dtype


def _dtype(noun: EdgeTensor) -> np.dtype[np.generic]:
    return numpy_dtype(_stored(noun))


def _typed(flat: NDArray[np.generic], noun: EdgeTensor) -> NDArray[np.generic]:
    """[*shape, bytes of a number] a view of a tensor's bytes, or of whose they are."""
    return flat.reshape(*noun.shape, _dtype(noun).itemsize)


class SliceKernels:
    """What computes parts of the results of a cut's operators, made as shapes come up: a few for each operator, as edges differ."""

    def __init__(self, body: EdgeGraph, functions: Mapping[str, Function], engine: Engine) -> None:
        self.body, self.functions, self.engine = body, functions, engine
        self.known: dict[tuple[Any, ...], Kernel] = {}

    def compute(self, at: int, arrays: Sequence[Array | None], shape: Shape, pads: Pads) -> Array:
        """[shape] a part of what node `at` of the body makes, of these parts of its inputs."""
        node = self.body.nodes[at]
        key = (at, shape, tuple(sorted(pads.items())), *(None if each is None else each.shape for each in arrays))
        if key not in self.known:
            shapes = {tensor: each.shape for tensor, each in zip(node.inputs, arrays, strict=True) if each is not None}
            self.known[key] = _kernel(*_sliced(self.body, node, shapes, shape, pads), pads, self.functions, self.engine)
        result: Array = self.known[key](arrays)[0]
        return result


def _kernel(graph: EdgeGraph, node: EdgeNode, pads: Pads, functions: Mapping[str, Function], engine: Engine) -> Kernel:
    if node.kind == LOAD:
        return lambda inputs: [np.asarray(inputs[0])]
    kernel = kernel_of(graph, node, functions, engine)
    if node.domain != "aten" or node.kind not in _ATEN_PADDING:
        return kernel
    source = node.attributes["args"][0].position
    is_max = node.kind.startswith("max")

    def padded(inputs: Sequence[Array | None]) -> Sequence[Array]:
        array = np.asarray(inputs[source])
        value = (-np.inf if array.dtype.kind == "f" else np.iinfo(array.dtype).min) if is_max else 0
        wider = np.pad(array, [pads.get(axis, (0, 0)) for axis in range(array.ndim)], constant_values=value)
        return kernel([wider if at == source else each for at, each in enumerate(inputs)])

    return padded


def _sliced(graph: EdgeGraph, node: EdgeNode, shapes: Mapping[int, Shape], shape: Shape, pads: Pads) -> tuple[EdgeGraph, EdgeNode]:
    """A node and its graph where tensors have these shapes, and the result that one."""
    if "body" in node.attributes:
        outer = [shapes[at] for at in node.inputs if not is_weight(graph, at)]
        node = replace(node, attributes={**node.attributes, "body": _sliced_body(node.attributes["body"], outer, shape, pads)})
    elif (reads := reads_of(graph, node)) is not None and not reads.is_number_by_number:
        channels = graph.tensors[node.outputs[0]].shape[1]
        node = replace(node, attributes=_with_pads(node, reads, graph, pads))
        if shape[1] < channels:  # weights are given with each slice
            graph = replace(graph, constants={at: array for at, array in graph.constants.items() if at not in reads.weights})
            node = replace(node, attributes=_with_groups(node.attributes, channels, shape[1]))
    return _shaped(graph, {**shapes, node.outputs[0]: shape}), node


def _shaped(graph: EdgeGraph, shapes: Mapping[int, Shape]) -> EdgeGraph:
    tensors = list(graph.tensors)
    for at, shape in shapes.items():
        tensors[at] = replace(tensors[at], shape=shape)
    return replace(graph, tensors=tuple(tensors))


def _sliced_body(body: EdgeGraph, outer: Sequence[Shape], shape: Shape, pads: Pads) -> EdgeGraph:
    """A group's members: up to the one with windows they have its input's extents, from there the result's."""
    shapes = dict(zip(body.inputs, outer, strict=True))
    body, others = without_weights(body)
    sliced = {node.outputs[0] for node in others}
    nodes = []
    for member in body.nodes:
        if member.outputs[0] not in sliced:
            nodes.append(member)
            continue
        reads = reads_of(body, member) or NodeWindows(frozenset(), {})
        source = next(iter(reads.of_input))
        extents = list(body.tensors[member.outputs[0]].shape)
        for axis in pads:
            extents[axis] = shapes[source][axis] if reads.is_number_by_number else shape[axis]
        shapes[member.outputs[0]] = tuple(extents)
        nodes.append(member if reads.is_number_by_number else replace(member, attributes=_with_pads(member, reads, body, pads)))
    return replace(_shaped(body, shapes), nodes=tuple(nodes))


def _with_pads(node: EdgeNode, reads: NodeWindows, graph: EdgeGraph, pads: Pads) -> dict[str, Any]:
    """The attributes of a node with windows, padded so. Along other axes it stays as it is."""
    source, windows = next(iter(reads.of_input.items()))
    both = []
    for axis in sorted(each for each in windows if each > 1):
        low, high = windows[axis].span(0, graph.tensors[node.outputs[0]].shape[axis])
        both.append(pads.get(axis, (max(0, -low), max(0, high - graph.tensors[source].shape[axis]))))
    if node.domain == "aten":
        args, at = list(node.attributes["args"]), _ATEN_PADDING[node.kind]
        args[at:] = [[0] * len(both), *args[at + 1 :]]
        return {**node.attributes, "args": tuple(args)}
    values = {name: value for name, value in node.attributes.items() if name != "auto_pad"}
    return {**values, "pads": [before for before, _ in both] + [after for _, after in both]}


def _with_groups(attributes: Mapping[str, Any], channels: int, fewer: int) -> dict[str, Any]:
    """The attributes of an operator that has a group for each channel where there are fewer of these."""
    if "args" in attributes:
        args = attributes["args"]
        return {**attributes, "args": (*args[:8], fewer if args[8:] == (channels,) else args[8])} if len(args) == 9 else {**attributes}
    return {**attributes, **({"group": fewer} if attributes.get("group") == channels else {})}
