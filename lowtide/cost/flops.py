"""What an operator does: floating-point operations and bytes moved, from its shapes alone.

A multiplication and an addition are two operations. Operators that no rule names do as good as none: moving their bytes is what takes their
time. Views move nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from math import prod

from lowtide.errors import CheckError
from lowtide.ir.graph import Arg, Node, Value
from lowtide.ir.ops import is_view
from lowtide.ir.sizes import ITEM_BYTES, Size


def node_flops(node: Node) -> int:
    """Floating-point operations of one run. Raises CheckError where a shape is symbolic."""
    rule = _RULES.get(".".join(node.op.split(".")[:2]))
    return rule(node) if rule is not None else 0


def node_moved_bytes(node: Node) -> int:
    """Bytes read and written by one run, each input and result once. Raises CheckError where a shape is symbolic."""
    if is_view(node):
        return 0
    return sum(_value_bytes(value) for value in (*node.inputs, *node.results))


def compute_dtype(node: Node) -> str:
    """In what a node computes: the widest of what it reads and makes, by which the peak rate of a device is chosen."""
    kinds = [value.dtype for value in (*node.outputs, *node.inputs) if value is not None and "float" in value.dtype]
    return max(kinds, key=lambda dtype: ITEM_BYTES[dtype], default="float32")


def _value_bytes(value: Value) -> int:
    """A dimension of stride 0 is read once."""
    distinct = [_int(size) for size, stride in zip(value.shape, value.stride, strict=True) if stride != 0 or size == 0]
    return prod(distinct) * ITEM_BYTES[value.dtype]


def _mm(node: Node, left: int, right: int) -> int:
    """`[..., m, k] @ [..., k, n]`: 2 m k n for each of the batch."""
    one, two = _shape(node, left), _shape(node, right)
    return 2 * prod(one) * two[-1]


def _convolution(node: Node) -> int:
    """Each element of the result is a sum over one kernel; transposed, each element of the input is spread over one."""
    shape = _shape(node, 0) if node.args[6] else _made(node, 0)
    return 2 * shape[0] * prod(shape[2:]) * prod(_shape(node, 1))


def _convolution_backward(node: Node) -> int:
    """The gradients of input and weight are convolutions of as many operations as the forward one; that of the bias is a sum."""
    spread = _shape(node, 1) if node.args[7] else _shape(node, 0)
    each = 2 * spread[0] * prod(spread[2:]) * prod(_shape(node, 2))
    return each * sum(output is not None for output in node.outputs[:2])


def _attention(node: Node) -> int:
    """Two products of matrices for each head: `q k^T` and `p v`."""
    query, key, value = (_shape(node, place) for place in (0, 1, 2))
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def _attention_backward(node: Node) -> int:
    """`q k^T` once more, and the gradients of p, v, q and k: five products."""
    query, key, value = (_shape(node, place) for place in (1, 2, 3))
    return 2 * prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])


_RULES: Mapping[str, Callable[[Node], int]] = {
    "aten.mm": lambda node: _mm(node, 0, 1),
    "aten.bmm": lambda node: _mm(node, 0, 1),
    "aten.matmul": lambda node: _mm(node, 0, 1),
    "aten.addmm": lambda node: _mm(node, 1, 2),
    "aten.baddbmm": lambda node: _mm(node, 1, 2),
    "aten.convolution": _convolution,
    "aten.convolution_overrideable": _convolution,
    "aten.convolution_backward": _convolution_backward,
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten._scaled_dot_product_flash_attention": _attention,
    "aten._scaled_dot_product_efficient_attention": _attention,
    "aten._scaled_dot_product_cudnn_attention": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten._scaled_dot_product_flash_attention_backward": _attention_backward,
    "aten._scaled_dot_product_efficient_attention_backward": _attention_backward,
    "aten._scaled_dot_product_cudnn_attention_backward": _attention_backward,
}


def _shape(node: Node, place: int) -> tuple[int, ...]:
    return _ints(node, node.args[place] if place < len(node.args) else None)


def _made(node: Node, place: int) -> tuple[int, ...]:
    return _ints(node, node.outputs[place])


def _ints(node: Node, value: Arg) -> tuple[int, ...]:
    if not isinstance(value, Value):
        raise CheckError(f"{node.op}: expected a tensor to count its operations by, got {value!r}")
    return tuple(map(_int, value.shape))


def _int(size: Size) -> int:
    try:
        return operator.index(size)
    except TypeError as error:
        raise CheckError(f"expected a size, got {size}: give its dimensions values first") from error
