"""Rules that compute the same numbers by other roundings: for `exact=False` alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lowtide.ir.graph import Arg, Node, Storage, Value
from lowtide.ir.operators.forms import EPSILON_OF_NORMS
from lowtide.ir.sizes import contiguous_stride
from lowtide.rewrite.algebra.rule import Match
from lowtide.rewrite.algebra.uses import Uses, is_row_by_row, layout

_CONVOLUTION = "aten.convolution.default"


def elu_from_result(uses: Uses) -> Iterator[Match]:
    """elu_backward(g, x) -> elu_backward(g, elu(x)), of ELU, CELU and SELU: exp(x) is found as the result and one."""
    forward = {(node.args[0], *_elu(node.args[1:])): node.outputs[0] for node in uses.nodes_of("aten.elu.default")}
    for node in uses.nodes_of("aten.elu_backward.default"):
        gradient, alpha, scale, input_scale, is_result, x = node.args
        y = forward.get((x, alpha, scale, input_scale))
        if is_result or y is None or not isinstance(x, Value) or not uses.is_forward(x) or layout(x) != layout(y):
            continue
        if not all(isinstance(each, (int, float)) and each > 0 for each in (alpha, scale, input_scale)):
            continue
        if uses.read_by_backward(x.storage) != [node] or not uses.read_by_backward(y.storage) or x.storage is y.storage:
            continue
        inplace = tuple((y if value is x else value, form) for value, form in node.inplace)
        late = replace(node, args=(gradient, alpha, scale, input_scale, True, y), inplace=inplace)
        yield Match({node: (late,)}, x.storage)


def _elu(parameters: tuple[Arg, ...]) -> tuple[Arg, ...]:
    """With those that were left out."""
    defaults: tuple[Arg, ...] = (1.0, 1, 1)
    return (*parameters, *defaults[len(parameters) :])


def norms_folded(uses: Uses) -> Iterator[Match]:
    """batch_norm(conv(x, w, b)) with statistics that are given -> conv(x, w * s, (b - mean) * s + beta), s = gamma / sqrt(var + eps)."""
    for norm in [node for node in uses.graph.nodes if node.op in EPSILON_OF_NORMS]:
        convolution = uses.maker(norm.args[0], _CONVOLUTION)
        if convolution is None or norm.writes or not _is_given(norm) or convolution.args[6] or not _fits(uses, norm, convolution):
            continue
        held = norm.args[0]
        assert isinstance(held, Value)
        yield Match({convolution: (), norm: tuple(_folded(uses, norm, convolution))}, held.storage)


def _is_given(norm: Node) -> bool:
    """Whether its statistics are not those of its input."""
    return norm.op != "aten.native_batch_norm.default" or norm.args[5] is False


def _fits(uses: Uses, norm: Node, convolution: Node) -> bool:
    """Whether nothing else reads what the convolution makes, and all that counts is of one type."""
    made, result, weight = convolution.outputs[0], norm.outputs[0], convolution.args[1]
    if made is None or result is None or not isinstance(weight, Value) or not is_row_by_row(weight) or layout(made) != layout(result):
        return False
    beside: list[Storage] = [value.storage for value in norm.outputs[1:] if value is not None]
    if any(uses.readers[storage] or storage in uses.kept for storage in beside) or uses.readers[made.storage] != [norm]:
        return False
    given = [value for value in (weight, convolution.args[2], *norm.args[1:5]) if isinstance(value, Value)]
    return made.storage not in uses.kept and all(value.dtype == made.dtype for value in given) and None not in norm.args[3:5]


def _folded(uses: Uses, norm: Node, convolution: Node) -> Iterator[Node]:
    """The nodes that make the weight, the bias, and with them the convolution."""
    made, (x, weight, bias, *more) = norm.outputs[0], convolution.args
    _, gamma, beta, mean, var, *_ = norm.args
    assert made is not None
    assert isinstance(weight, Value)
    assert isinstance(var, Value)
    named = f"{made.name}_folded"

    def node(op: str, *args: Arg, like: Value = var) -> Node:
        return Node(op, args, (uses.fresh(replace(like, storage=made.storage), named, like.dtype, like.shape),), source=norm.source)

    steps = [node("aten.add.Scalar", var, norm.args[EPSILON_OF_NORMS[norm.op]])]
    steps.append(node("aten.rsqrt.default", steps[-1].outputs[0]))
    if gamma is not None:
        steps.append(node("aten.mul.Tensor", steps[-1].outputs[0], gamma))
    scale = steps[-1].outputs[0]
    assert scale is not None
    shape = (*scale.shape, *(1 for _ in weight.shape[1:]))
    wide = replace(uses.fresh(scale, f"{named}_wide", scale.dtype, shape), storage=scale.storage, stride=contiguous_stride(shape))
    steps.append(Node("aten.view.default", (scale, shape), (wide,), source=norm.source))
    steps.append(node("aten.mul.Tensor", weight, wide, like=weight))
    scaled = steps[-1].outputs[0]
    if bias is not None:
        steps.append(node("aten.sub.Tensor", mean, bias))
    steps.append(node("aten.mul.Tensor", mean if bias is None else steps[-1].outputs[0], scale))
    steps.append(node("aten.neg.default", steps[-1].outputs[0]) if beta is None else node("aten.sub.Tensor", beta, steps[-1].outputs[0]))
    yield from steps
    yield replace(convolution, args=(x, scaled, steps[-1].outputs[0], *more), outputs=(made,), inplace=())
