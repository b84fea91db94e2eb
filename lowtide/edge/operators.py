"""What is known of ONNX's operators: which results are views, which may be written in place, and how many products they take.

One table a question. An operator that is in no table is one that reads all it needs before its result has a place of its own.

And quantised operators as a device computes them, without a float in memory. A file in QDQ form has floats between integers:
DequantizeLinear, an operator, perhaps an activation, QuantizeLinear. A device has one kernel for all of it. So has it for an operator and
the RequantShift behind it. Each such group becomes one node that holds its members as a network of its own (`attributes["body"]`); its
inputs are what they read from outside.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from lowtide.edge.graph import EdgeGraph, EdgeNode, EdgeTensor

# The result is the first input's bytes under another shape. Cast where it changes nothing; Dropout as it is after training.
VIEWS = frozenset({"Cast", "Dropout", "Flatten", "Identity", "Reshape", "Squeeze", "Unsqueeze"})

# Number by number: each number of the result reads the numbers at its own position, so that it may be written over them.
_ONE_INPUT = (
    "Abs", "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BatchNormalization", "BitwiseNot", "Cast", "Ceil", "Celu", "Clip", "Cos",
    "Cosh", "DequantizeLinear", "Elu", "Erf", "Exp", "Floor", "Gelu", "HardSigmoid", "HardSwish", "IsInf", "IsNaN", "LeakyRelu", "Log",
    "Mish", "Neg", "Not", "PRelu", "QLinearLeakyRelu", "QLinearSigmoid", "QuantizeLinear", "Reciprocal", "Relu", "RequantShift", "Round",
    "Selu", "Shrink", "Sigmoid", "Sign", "Sin", "Sinh", "Softplus", "Softsign", "Sqrt", "Swish", "Tan", "Tanh", "ThresholdedRelu",
)  # fmt: skip
_TWO_INPUTS = (
    "Add", "And", "BitShift", "BitwiseAnd", "BitwiseOr", "BitwiseXor", "Div", "Equal", "Greater", "GreaterOrEqual", "Less", "LessOrEqual",
    "Mod", "Mul", "Or", "Pow", "Sub", "Xor",
)  # fmt: skip
IN_PLACE: dict[str, tuple[int, ...] | None] = {  # the inputs that may be written over; None for all
    **dict.fromkeys(_ONE_INPUT, (0,)),
    **dict.fromkeys(_TWO_INPUTS, (0, 1)),
    **dict.fromkeys(("QLinearAdd", "QLinearMul"), (0, 3)),
    **dict.fromkeys(("Max", "Mean", "Min", "Sum")),
    "Where": (0, 1, 2),
}


@dataclass(frozen=True, slots=True)
class Arguments:
    """A call of an operator: its inputs (None for one that is left out), its outputs, its attributes."""

    inputs: Sequence[EdgeTensor | None]
    outputs: Sequence[EdgeTensor]
    attributes: dict[str, Any]

    def shape(self, position: int) -> tuple[int, ...]:
        """An input's shape; () where it is left out."""
        one = self.inputs[position] if position < len(self.inputs) else None
        return one.shape if one is not None else ()


def _convolution(weights: int) -> Callable[[Arguments], int]:
    """Each number of the result sums up over a filter, [out, in / groups, ...]."""
    return lambda call: math.prod(call.outputs[0].shape) * math.prod(call.shape(weights)[1:])


def _transposed_convolution(call: Arguments) -> int:
    """Each number of the input goes into every place of a filter, [in, out / groups, ...]."""
    return math.prod(call.shape(0)) * math.prod(call.shape(1)[1:])


def _product(call: Arguments) -> int:
    """[..., m, k] @ [..., k, n]."""
    return math.prod(call.outputs[0].shape) * (call.shape(0)[-1] if call.shape(0) else 0)


def _matrix_product(call: Arguments) -> int:
    """[m, k] @ [k, n], the first perhaps transposed."""
    rows = call.shape(0)
    return math.prod(call.outputs[0].shape) * (rows[-2 if call.attributes.get("transA") else -1] if len(rows) == 2 else 0)


def _recurrent(call: Arguments) -> int:
    """At each step of [steps, batch, in] all weights, [directions, gates, in] and [directions, gates, hidden]."""
    return math.prod(call.shape(0)[:2]) * (math.prod(call.shape(1)) + math.prod(call.shape(2)))


_MACS: dict[str, Callable[[Arguments], int]] = {
    **dict.fromkeys(("Conv", "ConvInteger", "FusedConv", "NhwcFusedConv", "RequantizedConv"), _convolution(1)),
    "QLinearConv": _convolution(3),
    "ConvTranspose": _transposed_convolution,
    **dict.fromkeys(("FusedMatMul", "MatMul", "MatMulInteger", "QLinearMatMul", "RequantizedMatMul"), _product),
    **dict.fromkeys(("FusedGemm", "Gemm", "QGemm", "RequantizedGemm"), _matrix_product),
    **dict.fromkeys(("GRU", "LSTM", "RNN"), _recurrent),
}

# Of the domain com.microsoft, which onnx's own inference does not know: the shape is that of another operator on some of the inputs, the
# dtype that of the input at a position.
SAME_SHAPE_AS: dict[str, tuple[str, slice, int]] = {
    "DequantizeLinear": ("Identity", slice(0, 1), 1),
    "FusedConv": ("Conv", slice(0, 3), 0),
    "Gelu": ("Identity", slice(0, 1), 0),
    "QGemm": ("Gemm", slice(0, 4, 3), 8),
    "QLinearAdd": ("Add", slice(0, 4, 3), 0),
    "QLinearAveragePool": ("AveragePool", slice(0, 1), 0),
    "QLinearConcat": ("Concat", slice(2, None, 3), 1),
    "QLinearGlobalAveragePool": ("GlobalAveragePool", slice(0, 1), 0),
    "QLinearLeakyRelu": ("Identity", slice(0, 1), 0),
    "QLinearMul": ("Mul", slice(0, 4, 3), 0),
    "QLinearSigmoid": ("Identity", slice(0, 1), 0),
    "QLinearSoftmax": ("Identity", slice(0, 1), 0),
    "QuantizeLinear": ("Identity", slice(0, 1), 2),
}


def macs(kind: str, call: Arguments) -> int:
    """Multiplications with addition of one call; 0 for operators that are in no table."""
    return _MACS[kind](call) if kind in _MACS else 0


def views(kind: str, call: Arguments, *, slices: bool = False) -> tuple[tuple[int, int], ...]:
    """(output, input) by position, where the output's bytes are the input's.

    With `slices` also those of Concat and Split along the outermost axis that is no 1, whose parts lie one behind the other.
    """
    kept = [position for position, output in enumerate(call.outputs) if output.dtype]
    first = call.inputs[0] if call.inputs else None
    if kind in VIEWS and kept == [0] and first is not None and _stored(first) == _stored(call.outputs[0]):
        return ((0, 0),)
    if kind == "Transpose" and first is not None and _keeps_its_order(first.shape, call.attributes.get("perm")):
        return ((0, 0),)
    if not slices or kind not in ("Concat", "Split") or any(one is None for one in call.inputs[:1]):
        return ()
    whole, parts = (call.outputs[0], call.inputs) if kind == "Concat" else (call.inputs[0], call.outputs)
    axis = call.attributes.get("axis", 0) % max(len(whole.shape), 1) if whole is not None else 0
    if whole is None or any(extent != 1 for extent in whole.shape[:axis]) or not _are_laid_end_to_end(whole, parts):
        return ()
    count = len(parts)
    return tuple((0, part) if kind == "Concat" else (part, 0) for part in range(count))


def _are_laid_end_to_end(whole: EdgeTensor, parts: Sequence[EdgeTensor | None]) -> bool:
    """Whether each part is whole bytes of its own: no constant, none twice."""
    names = [part.name for part in parts if part is not None and not part.constant and part.dtype]
    return len(set(names)) == len(parts) and sum(part.size_bytes for part in parts if part is not None) == whole.size_bytes


def _stored(tensor: EdgeTensor) -> tuple[int, str]:
    return tensor.size_bytes, tensor.stored_dtype or tensor.dtype


def _keeps_its_order(shape: Sequence[int], axes: Sequence[int] | None) -> bool:
    """Whether a permutation moves only axes of one entry, so that no number moves."""
    turned = axes if axes is not None else range(len(shape))[::-1]
    long = [axis for axis in turned if shape[axis] != 1]
    return long == sorted(long)


def in_place(kind: str, call: Arguments) -> tuple[tuple[int, int], ...]:
    """(output, input) by position, where the output may be written over the input: as many bytes, in the same positions."""
    if kind not in IN_PLACE or sum(bool(output.dtype) for output in call.outputs) != 1:
        return ()
    positions, output = IN_PLACE[kind], call.outputs[0]
    taken = ((position, one) for position, one in enumerate(call.inputs) if positions is None or position in positions)
    return tuple(
        (0, position)
        for position, one in taken
        if one is not None and not one.constant and one.shape == output.shape and one.size_bytes == output.size_bytes
    )


DOMAIN = "lowtide.group"
_OPENS = "DequantizeLinear"
_CLOSES = frozenset({"QuantizeLinear", "RequantShift"})


def grouped(graph: EdgeGraph) -> EdgeGraph:
    """The network with its groups as nodes. What comes between two operators of a group must be read by nobody else."""
    search = _Search(graph)
    groups = {last: members for last in range(len(graph.nodes)) if (members := search.group(last))}
    inner = {at for last, members in groups.items() for at in members if at != last and graph.nodes[at].kind != _OPENS}
    nodes: list[EdgeNode] = []
    wanted = set(graph.outputs)
    for at in reversed(range(len(graph.nodes))):
        node = _group_node(graph, groups[at]) if at in groups else graph.nodes[at]
        if at not in inner and not wanted.isdisjoint(node.outputs):  # a DequantizeLinear goes once all its readers have one of their own
            nodes.append(node)
            wanted.update(node.inputs)
    return renumbered(graph, nodes[::-1])


class _Search:
    """Who makes and who reads each tensor."""

    def __init__(self, graph: EdgeGraph) -> None:
        self.graph = graph
        self.maker = {tensor: at for at, node in enumerate(graph.nodes) for tensor in node.outputs}
        self.readers = dict.fromkeys(range(len(graph.tensors)), 0)
        for tensor in (*graph.outputs, *(tensor for node in graph.nodes for tensor in {*node.inputs} if tensor >= 0)):
            self.readers[tensor] += 1

    def group(self, last: int) -> tuple[int, ...]:
        """The members of the group that a node closes, in order; none where it closes none."""
        nodes = self.graph.nodes
        if nodes[last].kind not in _CLOSES:
            return ()
        core = self._before(last)
        members = [last]
        while core is not None and _is_activation(nodes[core]):
            members.append(core)
            core = self._before(core)
        if core is None or nodes[core].kind in _CLOSES or sum(bool(self.graph.tensors[at].dtype) for at in nodes[core].outputs) != 1:
            return ()
        members.append(core)
        read = {at for member in members for at in nodes[member].inputs if at >= 0}
        results = {at for member in members for at in nodes[member].outputs}
        opening = {self.maker[at] for at in read - results if at in self.maker and nodes[self.maker[at]].kind == _OPENS}
        floats = {at for at in read - results if not self.graph.tensors[at].constant and self.maker.get(at) not in opening}
        if nodes[last].kind == "QuantizeLinear" and nodes[core].kind != _OPENS and (floats or not opening):
            return ()
        return tuple(sorted({*members, *opening}))

    def _before(self, at: int) -> int | None:
        """The node whose result is a node's first input, where nobody else reads it."""
        tensor = self.graph.nodes[at].inputs[0]
        return self.maker.get(tensor) if self.readers[tensor] == 1 else None


def _is_activation(node: EdgeNode) -> bool:
    return node.domain == "" and IN_PLACE.get(node.kind) == (0,) and node.kind not in {*_CLOSES, _OPENS, "Cast", "RequantShift"}


def _group_node(graph: EdgeGraph, members: Sequence[int]) -> EdgeNode:
    nodes = [graph.nodes[at] for at in members]
    results = {tensor for node in nodes for tensor in node.outputs}
    inputs = tuple(dict.fromkeys(at for node in nodes for at in node.inputs if at >= 0 and at not in results))
    last = nodes[-1]
    body = renumbered(
        replace(graph, name=last.name, inputs=tuple(at for at in inputs if not graph.tensors[at].constant), outputs=last.outputs), nodes
    )
    kinds = [node.kind for node in nodes if node.kind != _OPENS] or [_OPENS]
    core = next((node for node in nodes if node.kind != _OPENS), nodes[0])
    output = graph.tensors[last.outputs[0]]
    alike = tuple(
        (0, position)
        for position, at in enumerate(inputs)
        if (tensor := graph.tensors[at]).size_bytes == output.size_bytes and not tensor.constant
    )
    is_view = core.kind in VIEWS and len(kinds) == 2 and len(alike) == 1 and _scales_alike(graph, nodes)
    by_number = all(node.kind in IN_PLACE for node in nodes)
    same_shape = tuple(pair for pair in alike if graph.tensors[inputs[pair[1]]].shape == output.shape)
    return EdgeNode(
        name=last.name,
        kind="+".join(kinds),
        domain=DOMAIN,
        inputs=inputs,
        outputs=last.outputs,
        attributes={"body": body},
        macs=sum(node.macs for node in nodes),
        views=alike if is_view else (),
        in_place=same_shape if by_number else (),
    )


def _scales_alike(graph: EdgeGraph, nodes: Sequence[EdgeNode]) -> bool:
    """Whether what closes a group undoes what opens it: the same integers by the same constants, none along an axis.

    Of another dtype the numbers are cut off where that ends: uint8 200 becomes int8 127.
    """
    first, last = nodes[0], nodes[-1]
    if graph.tensors[first.inputs[0]].dtype != graph.tensors[last.outputs[0]].dtype:
        return False
    if len(nodes) != 3 or first.kind != _OPENS or last.kind != "QuantizeLinear" or len(first.inputs) != len(last.inputs):
        return False
    return all(
        one in graph.constants
        and other in graph.constants
        and np.size(graph.constants[one]) == 1
        and np.array_equal(graph.constants[one], graph.constants[other])
        and graph.tensors[one].dtype == graph.tensors[other].dtype
        for one, other in zip(first.inputs[1:], last.inputs[1:], strict=True)
    )


def renumbered(graph: EdgeGraph, nodes: Iterable[EdgeNode]) -> EdgeGraph:
    """The graph with these nodes, and the tensors that they leave in it."""
    nodes = tuple(nodes)
    used = {*graph.inputs, *graph.outputs, *(at for node in nodes for at in (*node.inputs, *node.outputs) if at >= 0)}
    number = {at: new for new, at in enumerate(sorted(used))} | {-1: -1}
    return replace(
        graph,
        tensors=tuple(graph.tensors[at] for at in sorted(used)),
        nodes=tuple(
            replace(node, inputs=tuple(number[at] for at in node.inputs), outputs=tuple(number[at] for at in node.outputs))
            for node in nodes
        ),
        inputs=tuple(number[at] for at in graph.inputs),
        outputs=tuple(number[at] for at in graph.outputs),
        constants={number[at]: array for at, array in graph.constants.items() if at in number},
    )
