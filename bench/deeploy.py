"""The networks of MLPerf Tiny as Deeploy publishes them: integers kept as floats, and a custom operator that rescales them.

`RequantShift` multiplies by a whole number for each channel, adds another, divides by a power of two and rounds, and clips to the levels of
its result: what Deeploy's kernels compute (TargetLibraries/Generic, RequantShift_s8.c, with rounding).
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.edge.graph import EdgeGraph, EdgeNode
from lowtide.edge.onnx import read_onnx

_ACCUMULATES = frozenset({"Add", "Conv", "Gemm", "MatMul"})
_HANDS_ON = frozenset({"Flatten", "MaxPool", "Reshape", "Squeeze", "Transpose", "Unsqueeze"})


def requant_shift(attributes: Mapping[str, Any], x: NDArray[Any], mul: NDArray[Any], add: NDArray[Any]) -> NDArray[Any]:
    """`RequantShift` of whole numbers that a file has as floats."""
    low, high = levels(attributes)
    shift = int(attributes["div"]).bit_length() - 1
    total = x.astype(np.int64) * mul.astype(np.int64) + add.astype(np.int64)
    rounded = (total + ((1 << shift) >> 1)) >> shift
    return np.clip(rounded, low, high).astype(x.dtype)


FUNCTIONS = {"RequantShift": requant_shift}


def levels(attributes: Mapping[str, Any]) -> tuple[int, int]:
    """The least and the greatest result of a `RequantShift`."""
    count, signed = (int(np.ravel(attributes[name])[0]) for name in ("n_levels_out", "signed"))
    return (-(count // 2), count // 2 - 1) if signed else (0, count - 1)


def integer_dtypes(graph: EdgeGraph, input_dtype: str = "int8") -> dict[str, str]:
    """The dtypes in which a device holds the activations of such a network, by tensor."""
    dtypes = {graph.tensors[at].name: input_dtype for at in graph.inputs}
    for node in graph.nodes:
        first, result = graph.tensors[node.inputs[0]].name, graph.tensors[node.outputs[0]].name
        if (dtype := _result_dtype(node, dtypes.get(first))) is not None:
            dtypes[result] = dtype
    return dtypes


def _result_dtype(node: EdgeNode, of_input: str | None) -> str | None:
    if node.kind == "RequantShift":
        return "int8" if levels(node.attributes)[0] else "uint8"
    return "int32" if node.kind in _ACCUMULATES else of_input if node.kind in _HANDS_ON else None


def read_deeploy(path: str | os.PathLike[str], input_dtype: str = "int8") -> EdgeGraph:
    """The network of such a file, its activations in bytes as a device holds them, each operator with its `RequantShift` as one."""
    dtypes = integer_dtypes(read_onnx(path, groups=False), input_dtype)
    grouped = read_onnx(path)
    alive = {tensor.name for tensor in grouped.tensors}
    return read_onnx(path, stored={name: dtype for name, dtype in dtypes.items() if name in alive})
