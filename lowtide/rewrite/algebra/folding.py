"""Batch norms whose statistics are given, folded into the layer before them: a weight and a bias are scaled, which are few numbers.

batch_norm(layer(x, w, b)) = layer(x, w * s, (b - mean) * s + beta)        s = gamma / sqrt(var + eps)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from lowtide.ir.graph import Arg, Node, Storage, Value
from lowtide.ir.operators.forms import EPSILON_OF_NORMS, WEIGHT_OF_ROWS
from lowtide.ir.sizes import contiguous_stride
from lowtide.rewrite.algebra.rule import Match
from lowtide.rewrite.algebra.uses import Uses, is_dense, is_row_by_row

_CONVOLUTION = "aten.convolution.default"
_TRANSPOSED = 6  # the argument of a convolution that says so


@dataclass(frozen=True)
class _Layer:
    """What a norm stands behind."""

    node: Node
    weight: Value
    bias: Arg
    shape: tuple[int, ...]  # of a factor for each channel, as it multiplies the weight

    def again(self, weight: Value, bias: Value, made: Value) -> Node:
        if self.node.op == _CONVOLUTION:
            op, args = self.node.op, (self.node.args[0], weight, bias, *self.node.args[3:])
        else:
            op, args = "aten.addmm.default", (bias, self.node.args[WEIGHT_OF_ROWS[self.node.op] - 1], weight)
        return replace(self.node, op=op, args=args, outputs=(made,), inplace=())


def folded_into_convolutions(uses: Uses) -> Iterator[Match]:
    """batch_norm(conv(x, w, b)) -> conv(x, w * s, (b - mean) * s + beta)."""
    yield from _places(uses, (_CONVOLUTION,))


def folded_into_products(uses: Uses) -> Iterator[Match]:
    """batch_norm(addmm(b, x, w)) -> addmm((b - mean) * s + beta, x, w * s)."""
    yield from _places(uses, WEIGHT_OF_ROWS)


def _places(uses: Uses, ops: Sequence[str] | dict[str, int]) -> Iterator[Match]:
    for norm in [node for node in uses.graph.nodes if node.op in EPSILON_OF_NORMS and _is_given(node)]:
        held = norm.args[0]
        maker = uses.makers_of.get(held.storage) if isinstance(held, Value) else None
        layer = _layer(maker) if maker is not None and maker.op in ops else None
        if layer is not None and isinstance(held, Value) and _fits(uses, norm, held, layer):
            gone = dict.fromkeys((layer.node, *uses.views[held.storage]), ())
            yield Match({**gone, norm: tuple(_folded(uses, norm, layer))}, held.storage)


def _layer(node: Node) -> _Layer | None:
    """A convolution that is not transposed, or a product of rows by a weight; None for others."""
    if node.kwargs:
        return None
    weight = node.args[WEIGHT_OF_ROWS.get(node.op, 1)]
    if not isinstance(weight, Value) or (node.op == _CONVOLUTION and node.args[_TRANSPOSED]):
        return None
    if node.op == _CONVOLUTION:
        return _Layer(node, weight, node.args[2], (int(weight.shape[0]), *(1 for _ in weight.shape[1:])))
    return _Layer(node, weight, node.args[0] if node.op == "aten.addmm.default" else None, (int(weight.shape[1]),))


def _is_given(norm: Node) -> bool:
    """Whether its statistics are not those of its input, and it writes none."""
    return not norm.writes and (norm.op != "aten.native_batch_norm.default" or norm.args[5] is False)


def _fits(uses: Uses, norm: Node, held: Value, layer: _Layer) -> bool:
    """Whether nothing else reads what the layer makes, both have as many channels, and all that counts is of one type."""
    made, result = layer.node.outputs[0], norm.outputs[0]
    if made is None or result is None or uses.readers[made.storage] != [norm] or made.storage in uses.kept:
        return False
    beside: list[Storage] = [value.storage for value in norm.outputs[1:] if value is not None]
    if any(uses.readers[storage] or storage in uses.kept for storage in beside) or None in norm.args[3:5]:
        return False
    lie_alike = len({(value.dtype, value.shape, value.stride) for value in (made, held, result)}) == 1
    given = [value for value in (layer.weight, layer.bias, *norm.args[1:5]) if isinstance(value, Value)]
    vectors = [value for value in given if value is not layer.weight]
    fixed = is_row_by_row(layer.weight) if layer.node.op == _CONVOLUTION else is_dense(layer.weight)
    channels = made.shape[1]
    one_type = all(value.dtype == made.dtype for value in given) and all(value.shape == (channels,) for value in vectors)
    return lie_alike and fixed and one_type and not uses.written_between(layer.node, norm)


def _folded(uses: Uses, norm: Node, layer: _Layer) -> Iterator[Node]:
    """The nodes that make the weight, the bias, and with them the layer's result."""
    made, (_, gamma, beta, mean, var, *_) = norm.results[0], norm.args
    named = f"{made.name}_folded"
    assert isinstance(var, Value)
    steps: list[Node] = []

    def step(op: str, *args: Arg, like: Value = var) -> Value:
        new = uses.fresh(made, named, like.dtype, like.shape)
        steps.append(Node(op, args, (replace(new, stride=like.stride),), source=norm.source))
        return steps[-1].results[0]

    scale = step("aten.rsqrt.default", step("aten.add.Scalar", var, norm.args[EPSILON_OF_NORMS[norm.op]]))
    scale = scale if gamma is None else step("aten.mul.Tensor", scale, gamma)
    wide = scale
    if scale.shape != layer.shape:
        wide = replace(scale, name=uses.name(f"{named}_wide"), shape=layer.shape, stride=contiguous_stride(layer.shape))
        steps.append(Node("aten.view.default", (scale, layer.shape), (wide,), source=norm.source))
    weight = step("aten.mul.Tensor", layer.weight, wide, like=layer.weight)
    shift = mean if layer.bias is None else step("aten.sub.Tensor", mean, layer.bias)
    shift = step("aten.mul.Tensor", shift, scale)
    bias = step("aten.neg.default", shift) if beta is None else step("aten.sub.Tensor", beta, shift)
    yield from steps
    yield layer.again(weight, bias, made)
