"""A network as a small device runs it: operators by name, tensors with the bytes that they take as stored. No torch, no onnx.

An optional output that a file leaves out is a tensor without dtype and bytes, so that outputs keep their positions.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.errors import FormatError

BITS = {
    "bool": 8, "int8": 8, "uint8": 8, "int16": 16, "uint16": 16, "int32": 32, "uint32": 32, "int64": 64, "uint64": 64,
    "float16": 16, "float32": 32, "float64": 64, "bfloat16": 16, "complex64": 64, "complex128": 128,
    "float8_e4m3fn": 8, "float8_e4m3fnuz": 8, "float8_e5m2": 8, "float8_e5m2fnuz": 8, "float8_e8m0fnu": 8,
    "float4_e2m1fn": 4, "int4": 4, "uint4": 4, "int2": 2, "uint2": 2,
}  # fmt: skip
_BARE = {np.dtype(name).name for name in ("?", *"bBhHiIlLqQefdFD")}  # that NumPy knows by itself


def stored_bytes(shape: Sequence[int], dtype: str) -> int:
    """The bytes that a tensor of this shape takes. Raises KeyError for a dtype that is none of `BITS`."""
    return -(-math.prod(shape) * BITS[dtype] // 8)


def numpy_dtype(dtype: str) -> np.dtype[Any]:
    """NumPy's dtype of a name; those that NumPy lacks come from ml_dtypes, which onnx brings."""
    if dtype in _BARE:
        return np.dtype(dtype)
    import ml_dtypes

    other: np.dtype[Any] = np.dtype(getattr(ml_dtypes, dtype))
    return other


def to_bytes(array: NDArray[Any], dtype: str) -> NDArray[np.uint8]:
    """[bytes] an array as a memory holds it."""
    numbers = np.ascontiguousarray(array, numpy_dtype(dtype)).reshape(-1).view(np.uint8)
    if BITS[dtype] >= 8:
        return numbers
    per_byte = 8 // BITS[dtype]
    padded = np.zeros(-(-len(numbers) // per_byte) * per_byte, np.uint8)
    padded[: len(numbers)] = numbers & (2 ** BITS[dtype] - 1)
    shifts = np.arange(per_byte, dtype=np.uint8) * np.uint8(BITS[dtype])
    packed: NDArray[np.uint8] = np.bitwise_or.reduce(padded.reshape(-1, per_byte) << shifts, axis=1).astype(np.uint8)
    return packed


def from_bytes(raw: NDArray[np.uint8], dtype: str, shape: Sequence[int]) -> NDArray[Any]:
    """[shape] the array whose bytes a memory holds: a copy."""
    if BITS[dtype] >= 8:
        return raw.copy().view(numpy_dtype(dtype)).reshape(shape)
    bits = BITS[dtype]
    shifts = np.arange(8 // bits, dtype=np.uint8) * np.uint8(bits)
    numbers = (raw[:, None] >> shifts & np.uint8(2**bits - 1)).reshape(-1)[: math.prod(shape)].astype(np.uint8)
    if dtype.startswith("int"):  # ml_dtypes reads the sign from the low bits alone
        signed = (numbers << np.uint8(8 - bits)).view(np.int8) >> np.int8(8 - bits)
        return signed.astype(numpy_dtype(dtype)).reshape(shape)
    return numbers.view(numpy_dtype(dtype)).reshape(shape)


@dataclass(frozen=True, slots=True)
class EdgeTensor:
    name: str
    shape: tuple[int, ...]
    dtype: str  # as NumPy and onnx name it: "int8", "float32", "uint4", "bool"
    size_bytes: int  # as stored: packed where a number takes less than a byte
    constant: bool = False  # weights: they lie in flash, or in a space of their own
    stored_dtype: str = ""  # where memory holds the numbers as another: "int8" for integers that a file has as floats


@dataclass(frozen=True, slots=True)
class EdgeNode:
    name: str
    kind: str  # as the file names it: "Conv", "RequantShift"
    domain: str  # "" for onnx's own
    inputs: tuple[int, ...]  # tensors by position; -1 for an optional one that is left out
    outputs: tuple[int, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    macs: int = 0  # multiplications with addition
    workspace_bytes: int = 0
    views: tuple[tuple[int, int], ...] = ()  # (output, input) by position: the output is the input's bytes, or one a part of the other
    in_place: tuple[tuple[int, int], ...] = ()  # (output, input) by position, of one output: may be written over an input that dies there
    after: tuple[int, ...] = ()  # operators by index that run before it, whether it reads of them or not


@dataclass(frozen=True)
class EdgeGraph:
    """A network: its operators in an order that is right."""

    name: str
    tensors: tuple[EdgeTensor, ...]
    nodes: tuple[EdgeNode, ...]
    inputs: tuple[int, ...]  # tensors that the caller gives, constants not among them
    outputs: tuple[int, ...]
    constants: Mapping[int, Any] = field(default_factory=dict)  # NumPy arrays by tensor, where the file has them
    opsets: Mapping[str, int] = field(default_factory=dict)  # versions of the operators by domain, as onnx counts them

    def __repr__(self) -> str:
        """In one line: weights are long."""
        return f"<EdgeGraph {self.name}: {len(self.nodes)} operators, {len(self.tensors)} tensors>"


def view_starts(graph: EdgeGraph, node: EdgeNode) -> Iterator[tuple[int, int, int]]:
    """(output, input, bytes from where the input begins to where the output does) of each view of a node.

    Several inputs of one output are its parts, one behind the other, and so are several outputs of one input.
    """
    is_whole = len({output for output, _ in node.views}) == 1 < len(node.views)
    start = 0
    for output, source in node.views:
        yield node.outputs[output], node.inputs[source], -start if is_whole else start
        start += graph.tensors[node.inputs[source] if is_whole else node.outputs[output]].size_bytes


class SharedBytes:
    """Which tensors are bytes of one storage, and where each begins in it."""

    def __init__(self, graph: EdgeGraph) -> None:
        self.graph = graph
        self.group, self.start = list(range(len(graph.tensors))), [0] * len(graph.tensors)
        self.members = [[at] for at in range(len(graph.tensors))]
        views = {node.outputs[output] for node in graph.nodes for output, _ in node.views}
        self.made_apart = {at for node in graph.nodes for at in node.outputs if at >= 0 and at not in views} | {*graph.inputs}

    def unite(self, node: EdgeNode) -> bool:
        """Puts a node's views where they belong; False, and nothing changed, where something else lies there.

        Nobody makes parts of what the caller gives, or of constants.
        """
        before = self.group.copy(), self.start.copy(), [each.copy() for each in self.members]
        for output, source, start in view_starts(self.graph, node):
            if not self._unite(output, source, start):
                self.group, self.start, self.members = before
                return False
        return True

    def unite_in_place(self, node: EdgeNode, readers: Counter[int]) -> None:
        """Has what a node writes over begin where the result is a part, if the node alone reads that: both are written there."""
        for output, source in node.in_place:
            one, other = node.outputs[output], node.inputs[source]
            alike = self.graph.tensors[one].size_bytes == self.graph.tensors[other].size_bytes
            if (
                self.is_in_parts(one)
                and alike
                and readers[other] == 1
                and self.members[self.group[other]] == [other]
                and other not in self.graph.inputs
            ):
                self.made_apart.discard(one)
                self._unite(other, one, 0)
                return

    def is_in_parts(self, tensor: int) -> bool:
        """Whether several operators make the storage in which a tensor lies."""
        return sum(each in self.made_apart for each in self.members[self.group[tensor]]) > 1

    def _unite(self, output: int, source: int, start: int) -> bool:
        one, other = self.group[output], self.group[source]
        shift = self.start[source] + start - self.start[output]
        if one == other:
            return shift == 0
        for at in self.members[one]:
            self.start[at] += shift
            self.group[at] = other
        self.members[other] += self.members[one]
        self.members[one] = []
        return self._is_apart(other)

    def _is_apart(self, group: int) -> bool:
        """Whether those of a storage that somebody makes lie apart."""
        roots = sorted((self.start[at], self.graph.tensors[at].size_bytes, at) for at in self.members[group] if at in self.made_apart)
        given = any(self.graph.tensors[at].constant or at in self.graph.inputs for at in self.members[group])
        end = -(2**62)
        for start, nbytes, _ in roots:
            if start < end:
                return False
            end = start + nbytes
        return not (given and (len(roots) > 1 or any(at not in self.graph.inputs for _, _, at in roots)))


def shared_bytes(graph: EdgeGraph) -> SharedBytes:
    """Of a network's views, and of what is written over where it is a part. Raises FormatError where views cannot be where they belong."""
    shared = SharedBytes(graph)
    for node in graph.nodes:
        if not shared.unite(node):
            raise FormatError(f"operator {node.name}: its views cannot all be where they belong: read it without")
    readers = Counter(at for node in graph.nodes for at in {*node.inputs}) + Counter(graph.outputs)
    for node in reversed(graph.nodes):
        shared.unite_in_place(node, readers)
    return shared


def with_views_that_fit(graph: EdgeGraph) -> EdgeGraph:
    """The network without views of parts that cannot all be where they belong: such operators copy.

    Each that copies makes a tensor of its own, so that one which fitted before may fit no more: all are looked at anew.
    """
    while True:
        shared = SharedBytes(graph)
        for node in graph.nodes:
            if len(node.views) == 1:
                shared.unite(node)
        odd = next((at for at, node in enumerate(graph.nodes) if len(node.views) > 1 and not shared.unite(node)), None)
        if odd is None:
            return graph
        graph = replace(graph, nodes=(*graph.nodes[:odd], replace(graph.nodes[odd], views=()), *graph.nodes[odd + 1 :]))
