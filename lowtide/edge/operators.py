"""What is known of ONNX's operators: which results are views, which may be written in place, and how many products they take.

One table a question. An operator that is in no table is one that reads all it needs before its result has a place of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from lowtide.edge.graph import EdgeNode, EdgeTensor

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
    """Multiplications with addition of one call; 0 for operators that are in no table, `is_counted` tells which."""
    return _MACS[kind](call) if kind in _MACS else 0


def is_counted(node: EdgeNode) -> bool:
    """Whether 0 products means that there are none: not for an operator of a domain of its own that is in no table."""
    if "body" in node.attributes:
        return all(is_counted(member) for member in node.attributes["body"].nodes)
    return not node.domain or any(node.kind in table for table in (_MACS, IN_PLACE, VIEWS, SAME_SHAPE_AS))


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
