"""A graph run node by node by torch, and everything looked at: whether it is what the graph says of it.

    takes   a graph without writes that came from elsewhere, and its inputs
    leaves  its outputs; a FormatError where something has another shape, other strides or another dtype than is said

Kernels, and some operators of torch, take it on trust that their arguments look as was said. Where shapes do not depend on data, what is so
once is so always.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from lowtide.cost.operators import argument, operator
from lowtide.errors import FormatError
from lowtide.ir.bodies import is_region
from lowtide.ir.graph import Graph, Node, Value
from lowtide.ir.result_specs import pieces_of, same_strides

Regions = Mapping[str, Callable[..., Sequence[Any]]]


def watched(graph: Graph, inputs: Sequence[Any], order: Sequence[int] | None = None, regions: Regions | None = None) -> list[Any]:
    """The outputs. Raises FormatError naming the node, for what looks otherwise, and for what torch refuses."""
    values: dict[Value, Any] = {}
    for value, tensor in zip(graph.inputs, inputs, strict=True):
        values[value] = looked_at(value, tensor)
    with torch.no_grad(), torch.autocast("cpu", enabled=False), torch._C._AutoDispatchBelowAutograd():
        for index in range(len(graph.nodes)) if order is None else order:
            node = graph.nodes[index]
            for output, result in zip(node.outputs, _results(node, values, regions or {}), strict=True):
                if output is not None:
                    values[output] = looked_at(output, result)
    return [values[value] for value in graph.outputs]


def looked_at(value: Value, tensor: Any) -> Any:
    """The tensor. Raises FormatError where it is not as the value says."""
    if not isinstance(tensor, torch.Tensor):
        raise FormatError(f"{value.name}: expected a tensor, got a {type(tensor).__name__}")
    plain = tensor.layout is torch.strided and tensor.device.type == "cpu" and not tensor.is_conj() and not tensor.is_neg()
    dtype, shape, stride = str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.stride()
    if not plain or (dtype, shape) != (value.dtype, value.shape) or not same_strides(shape, stride, value.stride):
        expected = f"{value.dtype}{list(value.shape)}, strides {list(value.stride)}"
        raise FormatError(f"{value.name}: expected {expected}, as the graph says, got {dtype}{list(shape)}, strides {list(stride)}")
    return tensor


def _results(node: Node, values: Mapping[Value, Any], regions: Regions) -> Sequence[Any]:
    args, kwargs = [argument(arg, values) for arg in node.args], {key: argument(arg, values) for key, arg in node.kwargs}
    if is_region(node):
        return regions[node.results[0].name](*args)
    called = operator(node.op)
    try:
        made_here = called(*args, **kwargs)
    except (RuntimeError, TypeError, ValueError, IndexError) as error:
        raise FormatError(f"{node.op}: expected arguments as torch takes them: {error}") from error
    results = pieces_of(made_here)
    if len(results) != len(node.outputs):
        raise FormatError(f"{node.op}: expected {len(node.outputs)} results, as the graph says, got {len(results)}")
    return results
