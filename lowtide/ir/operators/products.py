"""Products of matrices and vectors, convolutions and attention among them: their axes, their loops, what they take.

A multiplication and an addition are two operations. A convolution's axes are batch, channels and groups, and in space only where the window
is of one element; it is seven loops or more. Attention's are batch, heads, and queries where no mask is implied; it is two products for
each head.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

from lowtide.errors import of_kind
from lowtide.ir.graph import Arg, Node, Value
from lowtide.ir.operators.axes import SAME, SUM, Axis, DimsByArgument, Role, axis, given
from lowtide.ir.operators.row import AxesRule, Count, Draws, Fusion, MaskSplit, Operator, bytes_of, made_shape, read_bytes, shape_of


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


def _convolved(node: Node) -> int:
    """Each element of the result is a sum over one kernel; transposed, each element of the input is spread over one."""
    shape = shape_of(node, 0) if node.args[6] else made_shape(node)
    return 2 * shape[0] * prod(shape[2:]) * prod(shape_of(node, 1))


def _convolved_backward(transposed: int) -> Count:
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

_CONVOLUTIONS = (
    Operator(name="aten.convolution", axes=convolution, fusion=Fusion.COMPLEX, flops=_convolved),
    Operator(name="aten.convolution_overrideable", flops=_convolved),
    Operator(
        name="aten.convolution_backward",
        axes=convolution_backward,
        flops=_convolved_backward(transposed=7),
        moved_bytes=convolution_gradients,
        split=MaskSplit(mask=10, groups=_GRADIENTS),
    ),
    Operator(
        name="aten.convolution_backward_overrideable",
        flops=_convolved_backward(transposed=6),
        moved_bytes=convolution_gradients,
        split=MaskSplit(mask=9, groups=_GRADIENTS),
    ),
)


def attention(node: Node) -> Iterator[Axis]:
    """query[b, h, q, e], key[b, h, k, e], value, dropout, causal -> result[b, h, q, e], logarithms[b, h, q]."""
    for dim in (0, 1):
        yield from axis(node, {0: dim, 1: dim, 2: dim, **_mask(node, dim)}, {0: dim, 1: dim})
    if node.args[4:5] in ((), (False,)):
        yield from axis(node, {0: 2, **_mask(node, 2)}, {0: 2, 1: 2})


def attention_backward(node: Node) -> Iterator[Axis]:
    """gradient, query, key, value, result, logarithms, dropout, causal -> gradients of query, key, value."""
    for dim in (0, 1):
        yield from axis(node, {**dict.fromkeys(range(6), dim), **_mask(node, dim)}, {0: dim, 1: dim, 2: dim})
    if node.args[7] is False:
        roles: dict[int, Role] = {0: 2, 1: SUM, 2: SUM}
        yield from axis(node, {0: 2, 1: 2, 4: 2, 5: 2, **_mask(node, 2)}, roles)


def _mask(node: Node, dim: int) -> dict[Any, int]:
    """Where a mask, [b, h, q, k] or [q, k], is cut along with a dimension."""
    mask: Arg = dict(node.kwargs).get("attn_mask")
    at = dim - 4
    return {("attn_mask",): at} if isinstance(mask, Value) and len(mask.shape) >= -at and mask.shape[at] != 1 else {}


def multiplications(node: Node) -> int:
    """Two products of matrices for each head: `q k^T` and `p v`."""
    query, key, value = (shape_of(node, position) for position in (0, 1, 2))
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def multiplications_backward(node: Node) -> int:
    """`q k^T` once more, and the gradients of p, v, q and k: five products."""
    query, key, value = (shape_of(node, position) for position in (1, 2, 3))
    return 2 * prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


def _forward(name: str, probability: int, **columns: Any) -> Operator:
    """Attention that draws where its probability of dropout is not zero, which is the argument at a position."""
    return Operator(name=f"aten.{name}", draws=Draws.WITH_PROBABILITY, probability=probability, **columns)


_ATTENTION = (
    _forward("_scaled_dot_product_flash_attention_for_cpu", 3, axes=attention, flops=multiplications, fusion=Fusion.COMPLEX),
    _forward("_scaled_dot_product_flash_attention", 3, flops=multiplications),
    _forward("_scaled_dot_product_flash_attention.quantized", 6, flops=multiplications),
    _forward("_scaled_dot_product_efficient_attention", 5, flops=multiplications),
    _forward("_scaled_dot_product_cudnn_attention", 5, flops=multiplications),
    _forward("_scaled_dot_product_attention_math", 4, fusion=Fusion.COMPLEX),
    _forward("_scaled_dot_product_attention_math_for_mps", 4),
    _forward("scaled_dot_product_attention", 4, fusion=Fusion.COMPLEX),
    Operator(name="aten._scaled_dot_product_fused_attention_overrideable", draws=Draws.ALWAYS),
    Operator(name="aten._cudnn_attention_forward", draws=Draws.ALWAYS),
    Operator(name="aten._efficient_attention_forward", draws=Draws.ALWAYS),
    Operator(name="aten._flash_attention_forward", draws=Draws.ALWAYS),
    Operator(name="aten._flash_attention_forward_no_dropout_inplace", draws=Draws.ALWAYS),
    Operator(name="aten._fill_mem_eff_dropout_mask_", draws=Draws.ALWAYS),
    Operator(name="aten._fused_sdp_choice", draws=Draws.ALWAYS),
    Operator(name="aten._triton_scaled_dot_attention", draws=Draws.ALWAYS),
    Operator(name="aten._scaled_dot_product_flash_attention_for_cpu_backward", axes=attention_backward, flops=multiplications_backward),
    Operator(name="aten._scaled_dot_product_flash_attention_backward", flops=multiplications_backward),
    Operator(name="aten._scaled_dot_product_efficient_attention_backward", draws=Draws.AGAIN, flops=multiplications_backward),
    Operator(name="aten._scaled_dot_product_cudnn_attention_backward", draws=Draws.AGAIN, flops=multiplications_backward),
    Operator(name="aten._cudnn_attention_backward", draws=Draws.AGAIN),
)


def einsum(text: str) -> AxesRule:
    """A product by its letters, "mk,kn->mn": each letter an axis, those that the result lacks are summed.

    An argument in brackets is added, "[mn],mk,kn->mn": it may be broadcast, and there is no axis over what is summed, as every part would
    add it.
    """
    given_text, _, result_text = text.partition("->")
    terms = given_text.split(",")

    def rule(node: Node) -> Iterator[Axis]:
        added = any(term.startswith("[") for term in terms)
        for letter in dict.fromkeys(letter for letter in given_text if letter.isalpha()):
            if letter in result_text:
                sliced: DimsByArgument = {at: dim for at, term in enumerate(terms) if (dim := _place(node, at, term, letter)) is not None}
                yield from axis(node, sliced, {0: result_text.index(letter)})
            elif not added:
                yield from axis(node, {at: term.index(letter) for at, term in enumerate(terms) if letter in term}, {0: SUM})

    return rule


def _place(node: Node, at: int, term: str, letter: str) -> int | None:
    """The dimension of a term along which it has a letter, counted from the back; None where it lacks it."""
    letters = term.strip("[]")
    value = given(node, (at,))
    if value is None or letter not in letters:
        return None
    dim = letters.index(letter) - len(letters)
    return None if -dim > len(value.shape) or (term.startswith("[") and value.shape[dim] == 1) else dim


def matmul(node: Node) -> Iterator[Axis]:
    """[.., m, k] @ [.., k, n], batches broadcast; a vector on either side has no m, or no n."""
    one, two, result = of_kind(Value, node.args[0]), of_kind(Value, node.args[1]), node.results[0]
    rows, columns = len(one.shape) > 1, len(two.shape) > 1
    batch = len(result.shape) - rows - columns
    for dim in range(batch):
        from_back = dim - batch
        sliced: dict[int, int] = {}
        for at, value in ((0, one), (1, two)):
            if len(value.shape) - 2 >= -from_back and value.shape[from_back - 2] != 1:
                sliced[at] = from_back - 2
        yield from axis(node, sliced, {0: dim})
    if rows:
        yield from axis(node, {0: -2}, {0: batch})
    if columns:
        yield from axis(node, {1: -1}, {0: -1})
    yield from axis(node, {0: -1, 1: -2 if columns else -1}, {0: SUM})


def linear(node: Node) -> Iterator[Axis]:
    last = len(of_kind(Value, node.args[0]).shape) - 1
    for dim in range(last):
        yield from axis(node, {0: dim}, {0: dim})
    yield from axis(node, {1: 0, 2: 0}, {0: last})
    if given(node, (2,)) is None:
        yield from axis(node, {0: last, 1: 1}, {0: SUM})


def matrices(left: int, right: int) -> Count:
    """`[..., m, k] @ [..., k, n]`, at these positions: 2 m k n for each of the batch."""
    return lambda node: 2 * prod(shape_of(node, left)) * shape_of(node, right)[-1]


def vectors(left: int, right: int) -> Count:
    """`[m, k] @ [k]`, `[k] @ [k]` and `[m] x [n]`: every element of the larger one, or of the result, is a product added up."""
    return lambda node: 2 * max(prod(shape_of(node, left)), prod(made_shape(node)), prod(shape_of(node, right)))


def _product(name: str, text: str, flops: Count, **columns: Any) -> Operator:
    """A product by its letters, see `einsum`."""
    return Operator(name=name, axes=einsum(text), any_strides=True, flops=flops, **columns)


ROWS = (
    *_ATTENTION,
    *_CONVOLUTIONS,
    _product("aten.mm", "mk,kn->mn", matrices(0, 1), fusion=Fusion.COMPLEX, in_layout="lowtide.mm_in_layout.default"),
    Operator(name="aten.mm.default", out="aten.mm.out", adding="aten.addmm_.default", added="aten.addmm.default", weight_of_rows=1),
    _product("aten.bmm", "bmk,bkn->bmn", matrices(0, 1), fusion=Fusion.COMPLEX, in_layout="lowtide.bmm_in_layout.default"),
    Operator(name="aten.bmm.default", out="aten.bmm.out", adding="aten.baddbmm_.default", added="aten.baddbmm.default"),
    _product("aten.addmm", "[mn],mk,kn->mn", matrices(1, 2), fusion=Fusion.COMPLEX, in_layout="lowtide.addmm_in_layout.default"),
    Operator(name="aten.addmm.default", out="aten.addmm.out", weight_of_rows=2),
    _product("aten.baddbmm", "[bmn],bmk,bkn->bmn", matrices(1, 2), fusion=Fusion.COMPLEX, in_layout="lowtide.baddbmm_in_layout.default"),
    Operator(name="aten.baddbmm.default", out="aten.baddbmm.out"),
    Operator(name="aten.addbmm", flops=matrices(1, 2), in_layout="lowtide.addbmm_in_layout.default"),
    *(Operator(name=f"lowtide.{name}_in_layout", flops=matrices(0, 1)) for name in ("mm", "bmm")),
    *(Operator(name=f"lowtide.{name}_in_layout", flops=matrices(1, 2)) for name in ("addmm", "baddbmm", "addbmm")),
    _product("aten.mv", "mk,k->m", vectors(0, 1)),
    _product("aten.addmv", "[m],mk,k->m", vectors(1, 2)),
    _product("aten.dot", "k,k->", vectors(0, 1)),
    _product("aten.vdot", "k,k->", vectors(0, 1)),
    _product("aten.addr", "[mn],m,n->mn", vectors(1, 2)),
    Operator(name="aten.matmul", axes=matmul, any_strides=True, fusion=Fusion.COMPLEX, flops=matrices(0, 1)),
    Operator(name="aten.linear", axes=linear, any_strides=True, fusion=Fusion.COMPLEX),
)
