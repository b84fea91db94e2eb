"""Rules of convolutions: batch, channels and groups; in space only where the window is of one element."""

from __future__ import annotations

from collections.abc import Iterator

from lowtide.ir.graph import Arg, Node, Value
from lowtide.ir.operators.axes.axis import Axis
from lowtide.ir.operators.axes.builders import SAME, SUM, NodeLocation, Rule, axis, given


def convolution(node: Node) -> Iterator[Axis]:
    """x[n, in, ..], weight[out, in, ..], bias[out], stride, padding, dilation, transposed, output padding, groups."""
    x, weight = given(node, (0,)), given(node, (1,))
    if x is None or weight is None or len(x.shape) != len(weight.shape):
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
    x, weight = given(node, (1,)), given(node, (2,))
    if x is None or weight is None or len(x.shape) != len(weight.shape):
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
            sliced: NodeLocation = {0: dim, 1: dim}
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


RULES: dict[str, Rule] = {"aten.convolution": convolution, "aten.convolution_backward": convolution_backward}
