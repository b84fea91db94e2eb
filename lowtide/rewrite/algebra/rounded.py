"""Gradients from results where they would be from what was given, by other roundings: for `exact=False` alone."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lowtide.ir.graph import Arg, Value
from lowtide.rewrite.algebra.rule import Match
from lowtide.rewrite.algebra.uses import Uses, is_row_by_row, layout


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


def layer_norm_from_result(uses: Uses) -> Iterator[Match]:
    """native_layer_norm_backward(g, x, mean, rstd) -> layer_norm_backward(g, layer_norm(x), rstd), of norms that have no weight.

    With a weight the result would have to be divided by it: what is near 0 there says nothing of the input any more.
    """
    for node in uses.nodes_of("aten.native_layer_norm_backward.default"):
        gradient, x, _, _, rstd, *weights, mask = node.args
        forward = uses.maker(rstd, "aten.native_layer_norm.default")
        if forward is None or forward.args[0] is not x or any(each is not None for each in weights) or mask != (True, False, False):
            continue
        y, made = forward.outputs[0], node.outputs[0]
        if y is None or made is None or not isinstance(x, Value) or not isinstance(gradient, Value) or not uses.is_forward(x):
            continue
        if not all(is_row_by_row(each) and layout(each) == layout(y) for each in (x, gradient, made)):
            continue
        if uses.read_by_backward(x.storage) == [node] and uses.read_by_backward(y.storage) and x.storage is not y.storage:
            late = replace(node, op="lowtide.layer_norm_backward.default", args=(gradient, y, rstd), outputs=(made,), inplace=())
            yield Match({node: (late,)}, x.storage)
