"""Convolutions: axes are batch, channels and groups, and in space only where the window is of one element; seven loops or more."""

from __future__ import annotations

from collections.abc import Iterator
from math import prod

from lowtide.errors import of_kind
from lowtide.ir.graph import Arg, Node, Value
from lowtide.ir.operators.axes import SAME, SUM, Axis, DimsByArgument, axis, given
from lowtide.ir.operators.row import Count, Fusion, MaskSplit, Operator
from lowtide.ir.operators.shapes import bytes_of, made_shape, read_bytes, shape_of


def convolution(node: Node) -> Iterator[Axis]:
    """x[n, in, ..], weight[out, in, ..], bias[out], stride, padding, dilation, transposed, output padding, groups."""
    x, weight = of_kind(Value, node.args[0]), of_kind(Value, node.args[1])
    if len(x.shape) != len(weight.shape):
        return  # without a batch
    into, out = _channels(node.args[6])
    yield from axis(node, {0: 0}, {0: 0})
    if node.args[8] == 1:
        yield from axis(node, {1: out, 2: 0}, {0: 1})
        if given(node, (2,)) is None:
            yield from axis(node, {0: 1, 1: into}, {0: SUM})
    else:
        yield from axis(node, {0: 1, 1: 0, 2: 0}, {0: 1}, [(8,)])
    if _of_one_element(weight, node.args[3:8]):
        for dim in range(2, len(x.shape)):
            yield from axis(node, {0: dim}, {0: dim})


def convolution_backward(node: Node) -> Iterator[Axis]:
    """gradient, x, weight, sizes of bias, stride, padding, dilation, transposed, output padding, groups, mask -> of x, weight, bias."""
    x, weight = of_kind(Value, node.args[1]), of_kind(Value, node.args[2])
    if len(x.shape) != len(weight.shape):
        return
    into, out = _channels(node.args[7])
    bias = [(3, 0)] if isinstance(node.args[3], tuple) and node.args[3] else []
    yield from axis(node, {0: 0, 1: 0}, {0: 0, 1: SUM, 2: SUM})
    if node.args[9] == 1:
        yield from axis(node, {0: 1, 2: out}, {0: SUM, 1: out, 2: 0}, bias)
        yield from axis(node, {1: 1, 2: into}, {0: 1, 1: into, 2: SAME})
    else:
        yield from axis(node, {0: 1, 1: 1, 2: 0}, {0: 1, 1: 0, 2: 0}, [*bias, (9,)])
    if _of_one_element(weight, node.args[4:9]):
        for dim in range(2, len(x.shape)):
            sliced: DimsByArgument = {0: dim, 1: dim}
            yield from axis(node, sliced, {0: dim, 1: SUM, 2: SUM})


def _channels(transposed: Arg) -> tuple[int, int]:
    """The dimensions of a weight that are the input's channels, and the output's."""
    return (0, 1) if transposed is True else (1, 0)


def _of_one_element(weight: Value, geometry: tuple[Arg, ...]) -> bool:
    """Whether each element of the result follows from one position of the input, one by one."""
    stride, padding, _, transposed, _ = geometry
    ones = isinstance(stride, tuple) and all(step == 1 for step in stride)
    none = isinstance(padding, tuple) and all(amount == 0 for amount in padding)
    return ones and none and transposed is False and all(extent == 1 for extent in weight.shape[2:])


def multiplications(node: Node) -> int:
    """Each element of the result is a sum over one kernel; transposed, each element of the input is spread over one."""
    shape = shape_of(node, 0) if node.args[6] else made_shape(node)
    return 2 * shape[0] * prod(shape[2:]) * prod(shape_of(node, 1))


def multiplications_backward(transposed: int) -> Count:
    """The gradients of input and weight are convolutions of as many operations as the forward one; that of the bias is a sum."""

    def count(node: Node) -> int:
        spread = shape_of(node, 1) if node.args[transposed] else shape_of(node, 0)
        each = 2 * spread[0] * prod(spread[2:]) * prod(shape_of(node, 2))
        return each * sum(output is not None for output in node.outputs[:2])

    return count


def convolution_gradients(node: Node) -> int:
    """The weight is read for the gradient of the input, the input for that of the weight."""
    unread = [position for position, output in ((2, node.outputs[0]), (1, node.outputs[1])) if output is None]
    return read_bytes(node, unread) + bytes_of(node.results)


# Backends compute the gradient of the input by one kernel, and those of weight and bias by another.
_GRADIENTS = ((0,), (1, 2))

ROWS = (
    Operator(name="aten.convolution", axes=convolution, fusion=Fusion.COMPLEX, flops=multiplications),
    Operator(name="aten.convolution_overrideable", flops=multiplications),
    Operator(
        name="aten.convolution_backward",
        axes=convolution_backward,
        flops=multiplications_backward(transposed=7),
        moved_bytes=convolution_gradients,
        split=MaskSplit(mask=10, groups=_GRADIENTS),
    ),
    Operator(
        name="aten.convolution_backward_overrideable",
        flops=multiplications_backward(transposed=6),
        moved_bytes=convolution_gradients,
        split=MaskSplit(mask=9, groups=_GRADIENTS),
    ),
)
