"""A network as a small device runs it: operators by name, tensors with the bytes that they take as stored. No torch, no onnx.

An optional output that a file leaves out is a tensor without dtype and bytes, so that outputs keep their positions.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class EdgeTensor:
    """A tensor of a network."""

    name: str
    shape: tuple[int, ...]
    dtype: str  # as NumPy and onnx name it: "int8", "float32", "uint4", "bool"
    size_bytes: int  # as stored: packed where a number takes less than a byte
    constant: bool = False  # weights: they lie in flash, or in a space of their own
    stored_dtype: str = ""  # where memory holds the numbers as another: "int8" for integers that a file has as floats


@dataclass(frozen=True, slots=True)
class EdgeNode:
    """One operator."""

    name: str
    kind: str  # as the file names it: "Conv", "RequantShift"
    domain: str  # "" for onnx's own
    inputs: tuple[int, ...]  # tensors by position; -1 for an optional one that is left out
    outputs: tuple[int, ...]
    attributes: Mapping[str, Any] = field(default_factory=dict)
    macs: int = 0  # multiplications with addition
    workspace_bytes: int = 0
    views: tuple[tuple[int, int], ...] = ()  # (output, input) by position: the output is the input's bytes under another shape
    in_place: tuple[tuple[int, int], ...] = ()  # (output, input) by position: may be written over the input, where nobody reads that later
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
