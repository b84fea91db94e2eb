"""One operator computed for a part of its result: the kernels of whole operators, with shapes and padding of that part."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from lowtide.edge.graph import EdgeGraph, EdgeNode
from lowtide.edge.models import Array, Engine, Function, Kernel, kernel_of
from lowtide.edge.windows import LOAD, NodeWindows, is_weight, reads_of

Shape = tuple[int, ...]
Pads = Mapping[int, tuple[int, int]]  # by axis: entries of padding before and after
_ATEN_PADDING = {"convolution": 4, "max_pool2d_with_indices": 3, "avg_pool2d": 3}  # where it is among the arguments


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
        node = replace(node, attributes=_with_pads(node, reads, graph, pads))
    return _shaped(graph, {**shapes, node.outputs[0]: shape}), node


def _shaped(graph: EdgeGraph, shapes: Mapping[int, Shape]) -> EdgeGraph:
    tensors = list(graph.tensors)
    for at, shape in shapes.items():
        tensors[at] = replace(tensors[at], shape=shape)
    return replace(graph, tensors=tuple(tensors))


def _sliced_body(body: EdgeGraph, outer: Sequence[Shape], shape: Shape, pads: Pads) -> EdgeGraph:
    """A group's members: up to the one with windows they have its input's extents, from there the result's."""
    shapes = dict(zip(body.inputs, outer, strict=True))
    nodes = []
    for member in body.nodes:
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
    for axis in sorted(windows):
        low, high = windows[axis].span(0, graph.tensors[node.outputs[0]].shape[axis])
        both.append(pads.get(axis, (max(0, -low), max(0, high - graph.tensors[source].shape[axis]))))
    if node.domain == "aten":
        args, at = list(node.attributes["args"]), _ATEN_PADDING[node.kind]
        args[at:] = [[0] * len(both), *args[at + 1 :]]
        return {**node.attributes, "args": tuple(args)}
    values = {name: value for name, value in node.attributes.items() if name != "auto_pad"}
    return {**values, "pads": [before for before, _ in both] + [after for _, after in both]}
