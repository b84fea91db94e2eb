"""Rules after which sums are rounded otherwise: for `exact=False` alone.

**Batch norms whose statistics are given** are folded into the layer before them: only its weight and bias are scaled.

batch_norm(layer(x, w, b)) = layer(x, w * s, (b - mean) * s + beta) s = gamma / sqrt(var + eps)

**Gradients of what convolutions read**: autograd holds that tensor for them, and only its sizes matter.

**Gradients of ELU and of layer norms without a weight** are found from results, so that inputs may be let go.

**Products that are added to something** become one operator, which adds while it multiplies. The gradient of what several products read
is the sum of a product for each: of the input of query, key and value, or of both halves of a gated layer. An operator that adds its
product to what lies there needs no memory for the product, and no pass over both to add them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from lowtide.errors import of_kind
from lowtide.ir.graph import Arg, Node, Storage, Value
from lowtide.ir.operators.nodes import forms_of
from lowtide.ir.sizes import contiguous_stride
from lowtide.rewrite.base import Match, Uses, count_of, is_dense, is_row_by_row, layout

_ADD = "aten.add.Tensor"


def products_added(uses: Uses) -> Iterator[Match]:
    """add(mm(a, b), c) -> addmm(c, a, b), in the memory of c where that is free; so of bmm, and through views."""
    for node in uses.nodes_of(_ADD):
        values = [value for value in node.args if isinstance(value, Value)]
        if node.kwargs or node.writes or len(node.args) != 2 or len(values) != 2:
            continue
        products = [each for each in values if _is_product(uses, each, node)]
        if products:
            product = max(products, key=lambda each: uses.place[uses.makers_of[each.storage]])  # the other is there sooner
            other = values[0] if product is values[1] else values[1]
            maker = uses.makers_of[product.storage]
            gone = dict.fromkeys((maker, *uses.views[product.storage]), ())
            yield Match({**gone, node: tuple(_added_product(uses, maker, node, other))}, product.storage)


def _is_product(uses: Uses, value: Value, node: Node) -> bool:
    """Whether a value is a whole product that is made to be added here, to something that lies as it does."""
    maker, result = uses.makers_of.get(value.storage), node.outputs[0]
    if maker is None or not forms_of(maker.op).added or maker.kwargs or result is None or value.storage in uses.kept:
        return False
    if [uses.readers[value.storage], sum(given.storage is value.storage for given in node.inputs)] != [[node], 1]:
        return False
    if uses.written_between(maker, node):
        return False
    values = [given for given in (*node.args, *maker.results, result) if isinstance(given, Value)]
    if not all(is_row_by_row(given) and given.dtype == value.dtype for given in values):
        return False
    return len({given.shape for given in (*node.inputs, result)}) == 1 and count_of(value) == count_of(maker.results[0])


def _added_product(uses: Uses, maker: Node, node: Node, other: Value) -> Iterator[Node]:
    """The nodes in the place of the sum: what it is added to seen as the product lies, the product, the sum seen as it was."""
    product, result = maker.results[0], node.results[0]
    if product.shape == result.shape:
        yield _multiplied(maker, node, other, result)
        return
    seen = replace(other, name=uses.name(f"{other.name}_seen"), shape=product.shape, stride=product.stride)
    flat = replace(result, name=uses.name(f"{result.name}_flat"), shape=product.shape, stride=product.stride)
    yield Node("aten.view.default", (other, product.shape), (seen,), source=node.source)
    yield _multiplied(maker, node, seen, flat)
    yield Node("aten.view.default", (flat, result.shape), (result,), source=node.source)


def _multiplied(maker: Node, node: Node, onto: Value, result: Value) -> Node:
    op, after = forms_of(maker.op).added, tuple(dict.fromkeys((*maker.after, *node.after)))
    inplace = ((onto, op.replace(".default", "_.default")),)
    return replace(node, op=op, args=(onto, *maker.args), outputs=(result,), inplace=inplace, after=after)


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
        y, result = forward.outputs[0], node.outputs[0]
        if y is None or result is None or not isinstance(x, Value) or not isinstance(gradient, Value) or not uses.is_forward(x):
            continue
        if not all(is_row_by_row(each) and layout(each) == layout(y) for each in (x, gradient, result)):
            continue
        if uses.read_by_backward(x.storage) == [node] and uses.read_by_backward(y.storage) and x.storage is not y.storage:
            late = replace(node, op="lowtide.layer_norm_backward.default", args=(gradient, y, rstd), outputs=(result,), inplace=())
            yield Match({node: (late,)}, x.storage)


_BACKWARD, _FORWARD = "aten.convolution_backward.default", "aten.convolution.default"


def gradient_without_input(uses: Uses) -> Iterator[Match]:
    """convolution_backward(g, x, w, ..., mask=[True, False, False]) -> convolution(g, w, transposed), and the other way round.

    What a convolution reads is held for the gradient of its weight still, but may be gone before this one is made.
    """
    by_input: dict[object, dict[Node, tuple[Node, ...]]] = {}
    for node in uses.nodes_of(_BACKWARD):
        new, x = _without_input(node), node.args[1]
        if new is not None and isinstance(x, Value) and uses.is_forward(x):
            by_input.setdefault(x.storage, {})[node] = (new,)
    for instead in by_input.values():
        yield Match(instead, of_kind(Value, next(iter(instead)).args[1]).storage)


def _without_input(node: Node) -> Node | None:
    gradient, x, weight, _, *geometry, transposed, _, groups, mask = node.args
    read = [value for value in (gradient, x, weight) if isinstance(value, Value)]
    if mask != (True, False, False) or node.kwargs or not all(map(is_row_by_row, (*read, *node.results))):
        return None
    if len(read) < 3 or len({each.dtype for each in read}) > 1:
        return None
    if not all(isinstance(sizes, tuple) and len(sizes) == len(read[1].shape) - 2 for sizes in geometry):
        return None
    added = (0,) * (len(read[1].shape) - 2) if transposed else _added(read, geometry)
    if added is None:
        return None
    args = (gradient, weight, None, *geometry, not transposed, added, groups)
    return replace(node, op=_FORWARD, args=args, outputs=node.outputs[:1], inplace=())


def _added(read: Sequence[Value], geometry: Sequence[Arg]) -> tuple[int, ...] | None:
    """By dimension, how much longer what the convolution read is than what the transposed one makes; None where that is no number."""
    gradient, x, weight = (value.shape[2:] for value in read)
    sums = []
    for sizes in zip(x, gradient, weight, *(each for each in geometry if isinstance(each, tuple)), strict=True):
        numbers = [each for each in sizes if isinstance(each, int)]
        if len(numbers) < len(sizes):
            return None
        there, here, kernel, step, pad, apart = numbers
        sums.append(there - ((here - 1) * step - 2 * pad + apart * (kernel - 1) + 1))
    return tuple(sums)


_CONVOLUTION = "aten.convolution.default"
_TRANSPOSED = 6  # the argument of a convolution that says so


@dataclass(frozen=True)
class _Layer:
    """What a norm stands behind."""

    node: Node
    weight: Value
    bias: Arg
    shape: tuple[int, ...]  # of a factor for each channel, as it multiplies the weight

    def again(self, weight: Value, bias: Value, result: Value) -> Node:
        if self.node.op == _CONVOLUTION:
            op, args = self.node.op, (self.node.args[0], weight, bias, *self.node.args[3:])
        else:
            op, args = "aten.addmm.default", (bias, self.node.args[forms_of(self.node.op).weight_of_rows - 1], weight)
        return replace(self.node, op=op, args=args, outputs=(result,), inplace=())


def folded_into_convolutions(uses: Uses) -> Iterator[Match]:
    """batch_norm(conv(x, w, b)) -> conv(x, w * s, (b - mean) * s + beta)."""
    yield from _places(uses, lambda op: op == _CONVOLUTION)


def folded_into_products(uses: Uses) -> Iterator[Match]:
    """batch_norm(addmm(b, x, w)) -> addmm((b - mean) * s + beta, x, w * s)."""
    yield from _places(uses, lambda op: forms_of(op).weight_of_rows > 0)


def _places(uses: Uses, is_layer: Callable[[str], bool]) -> Iterator[Match]:
    for norm in [node for node in uses.graph.nodes if forms_of(node.op).epsilon and _is_given(node)]:
        layer_result = norm.args[0]
        maker = uses.makers_of.get(layer_result.storage) if isinstance(layer_result, Value) else None
        layer = _layer(maker) if maker is not None and is_layer(maker.op) else None
        if layer is not None and isinstance(layer_result, Value) and _fits(uses, norm, layer_result, layer):
            gone = dict.fromkeys((layer.node, *uses.views[layer_result.storage]), ())
            yield Match({**gone, norm: tuple(_folded(uses, norm, layer))}, layer_result.storage)


def _layer(node: Node) -> _Layer | None:
    """A convolution that is not transposed, or a product of rows by a weight; None for others."""
    if node.kwargs:
        return None
    weight = node.args[forms_of(node.op).weight_of_rows or 1]
    if not isinstance(weight, Value) or (node.op == _CONVOLUTION and node.args[_TRANSPOSED]):
        return None
    if node.op == _CONVOLUTION:
        return _Layer(node, weight, node.args[2], (int(weight.shape[0]), *(1 for _ in weight.shape[1:])))
    return _Layer(node, weight, node.args[0] if node.op == "aten.addmm.default" else None, (int(weight.shape[1]),))


def _is_given(norm: Node) -> bool:
    """Whether its statistics are not those of its input, and it writes none."""
    return not norm.writes and (norm.op != "aten.native_batch_norm.default" or norm.args[5] is False)


def _fits(uses: Uses, norm: Node, normed: Value, layer: _Layer) -> bool:
    """Whether nothing else reads what the layer makes, both have as many channels, and all that counts is of one type."""
    layer_result, result = layer.node.outputs[0], norm.outputs[0]
    if layer_result is None or result is None or uses.readers[layer_result.storage] != [norm] or layer_result.storage in uses.kept:
        return False
    beside: list[Storage] = [value.storage for value in norm.outputs[1:] if value is not None]
    if any(uses.readers[storage] or storage in uses.kept for storage in beside) or None in norm.args[3:5]:
        return False
    lie_alike = len({(value.dtype, value.shape, value.stride) for value in (layer_result, normed, result)}) == 1
    given = [value for value in (layer.weight, layer.bias, *norm.args[1:5]) if isinstance(value, Value)]
    vectors = [value for value in given if value is not layer.weight]
    fixed = is_row_by_row(layer.weight) if layer.node.op == _CONVOLUTION else is_dense(layer.weight)
    channels = layer_result.shape[1]
    one_type = all(value.dtype == layer_result.dtype for value in given) and all(value.shape == (channels,) for value in vectors)
    return lie_alike and fixed and one_type and not uses.written_between(layer.node, norm)


def _folded(uses: Uses, norm: Node, layer: _Layer) -> Iterator[Node]:
    """The nodes that make the weight, the bias, and with them the layer's result."""
    result, (_, gamma, beta, mean, *_), var = norm.results[0], norm.args, of_kind(Value, norm.args[4])
    named = f"{result.name}_folded"
    steps: list[Node] = []

    def step(op: str, *args: Arg, like: Value = var) -> Value:
        new = uses.fresh(result, named, like.dtype, like.shape)
        steps.append(Node(op, args, (replace(new, stride=like.stride),), source=norm.source))
        return steps[-1].results[0]

    scale = step("aten.rsqrt.default", step("aten.add.Scalar", var, norm.args[forms_of(norm.op).epsilon]))
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
    yield layer.again(weight, bias, result)
