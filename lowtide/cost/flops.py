"""What an operator does: floating-point operations and bytes moved, from its shapes alone.

A multiplication and an addition are two operations. Operators that no rule names do as good as none: moving their bytes is what takes their
time. Each element that an operator has to touch is moved once: a lookup reads the rows that it looks up and not the table, an argument
that is asked for its shape alone is not read. Views move nothing.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Iterable, Mapping
from math import prod

from lowtide.errors import CheckError
from lowtide.ir.graph import Arg, Node, Value, values_of
from lowtide.ir.ops import is_view
from lowtide.ir.sizes import ITEM_BYTES, Size


def node_flops(node: Node) -> int:
    """Floating-point operations of one run. Raises CheckError where a shape is symbolic."""
    rule = _RULES.get(_base(node))
    return rule(node) if rule is not None else 0


def node_moved_bytes(node: Node) -> int:
    """Bytes read and written by one run, each element that is touched once. Raises CheckError where a shape is symbolic."""
    base = _base(node)
    if is_view(node) or base in _UNTOUCHED:
        return 0
    if (rule := _MOVED.get(base)) is not None:
        return rule(node)
    return _read_bytes(node, _UNREAD.get(node.op, _UNREAD.get(base, ()))) + _bytes(node.results)


def compute_dtype(node: Node) -> str:
    """In what a node computes: the widest of what it reads and makes, by which the peak rate of a device is chosen."""
    kinds = [value.dtype for value in (*node.outputs, *node.inputs) if value is not None and "float" in value.dtype]
    return max(kinds, key=lambda dtype: ITEM_BYTES[dtype], default="float32")


def _base(node: Node) -> str:
    """The operator's name without its overload: "aten.add"."""
    return ".".join(node.op.split(".")[:2])


def _value_bytes(value: Value) -> int:
    """A dimension of stride 0 is read once."""
    distinct = [_int(size) for size, stride in zip(value.shape, value.stride, strict=True) if stride != 0 or size == 0]
    return prod(distinct) * ITEM_BYTES[value.dtype]


def _bytes(values: Iterable[Value]) -> int:
    return sum(map(_value_bytes, values))


def _read_bytes(node: Node, unread: Container[int]) -> int:
    """The bytes of all arguments but those at the positions `unread`, each once."""
    args = tuple(arg for place, arg in enumerate(node.args) if place not in unread)
    return _bytes(dict.fromkeys(values_of((*args, *(arg for _, arg in node.kwargs)))))


def _lookup(node: Node) -> int:
    """Of the table as many elements are read as the result has."""
    return _read_bytes(node, (0,)) + 2 * _bytes(node.results)


def _likelihood(node: Node) -> int:
    """Of the scores one for each target is read."""
    scores, targets = node.args[0], node.args[1]
    assert isinstance(scores, Value)
    return _read_bytes(node, (0,)) + prod(_ints(node, targets)) * ITEM_BYTES[scores.dtype] + _bytes(node.results)


def _into_places(node: Node, index: int, source: int, *, adds: bool) -> int:
    """Elements of what the caller owns are written over, or added to, where an index says; the rest of it is not touched."""
    given = node.args[source]
    written = given if isinstance(given, Value) else node.args[index]  # a number goes wherever the index points
    written_bytes = prod(_ints(node, written)) * ITEM_BYTES[node.writes[0][0].dtype]
    return _read_bytes(node, (0,)) + (1 + adds) * written_bytes


def _convolution_gradients(node: Node) -> int:
    """The weight is read for the gradient of the input, the input for that of the weight."""
    unread = [place for place, output in ((2, node.outputs[0]), (1, node.outputs[1])) if output is None]
    return _read_bytes(node, unread) + _bytes(node.results)


def _mm(node: Node, left: int, right: int) -> int:
    """`[..., m, k] @ [..., k, n]`: 2 m k n for each of the batch."""
    one, two = _shape(node, left), _shape(node, right)
    return 2 * prod(one) * two[-1]


def _convolution(node: Node) -> int:
    """Each element of the result is a sum over one kernel; transposed, each element of the input is spread over one."""
    shape = _shape(node, 0) if node.args[6] else _made(node, 0)
    return 2 * shape[0] * prod(shape[2:]) * prod(_shape(node, 1))


def _vectors(node: Node, left: int, right: int) -> int:
    """`[m, k] @ [k]`, `[k] @ [k]` and `[m] x [n]`: every element of the larger one, or of the result, is a product added up."""
    return 2 * max(prod(_shape(node, left)), prod(_made(node, 0)), prod(_shape(node, right)))


def _convolution_backward(node: Node, transposed: int) -> int:
    """The gradients of input and weight are convolutions of as many operations as the forward one; that of the bias is a sum."""
    spread = _shape(node, 1) if node.args[transposed] else _shape(node, 0)
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
    "aten.addbmm": lambda node: _mm(node, 1, 2),
    "aten.mv": lambda node: _vectors(node, 0, 1),
    "aten.dot": lambda node: _vectors(node, 0, 1),
    "aten.vdot": lambda node: _vectors(node, 0, 1),
    "aten.addmv": lambda node: _vectors(node, 1, 2),
    "aten.addr": lambda node: _vectors(node, 1, 2),
    "aten.convolution": _convolution,
    "aten.convolution_overrideable": _convolution,
    "aten.convolution_backward": lambda node: _convolution_backward(node, 7),
    "aten.convolution_backward_overrideable": lambda node: _convolution_backward(node, 6),
    "aten._scaled_dot_product_flash_attention_for_cpu": _attention,
    "aten._scaled_dot_product_flash_attention": _attention,
    "aten._scaled_dot_product_efficient_attention": _attention,
    "aten._scaled_dot_product_cudnn_attention": _attention,
    "aten._scaled_dot_product_flash_attention_for_cpu_backward": _attention_backward,
    "aten._scaled_dot_product_flash_attention_backward": _attention_backward,
    "aten._scaled_dot_product_efficient_attention_backward": _attention_backward,
    "aten._scaled_dot_product_cudnn_attention_backward": _attention_backward,
}

# Memory is had, not touched.
_UNTOUCHED = frozenset(f"aten.{name}" for name in ("empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"))

# Arguments that are asked for their shapes, or that are written over as a whole: by operator, or by overload.
_UNREAD: Mapping[str, tuple[int, ...]] = {
    **{f"aten.{name}": (0,) for name in ("zeros_like", "ones_like", "full_like", "rand_like", "randn_like", "randint_like")},
    **{f"aten.{name}": (0,) for name in ("new_zeros", "new_ones", "new_full", "copy", "copy_", "fill", "fill_", "zero", "zero_")},
    **{f"aten.{name}": (0,) for name in ("uniform", "normal_functional", "exponential", "random", "bernoulli.p", "bernoulli.Tensor")},
    **{f"aten.{name}": (0,) for name in ("uniform_", "normal_", "exponential_", "random_", "bernoulli_")},
    **{f"aten.{name}_backward": (1,) for name in ("nll_loss", "nll_loss2d", "max_pool2d_with_indices", "max_pool3d_with_indices")},
    **{f"aten.{name}_backward": (1,) for name in ("avg_pool2d", "avg_pool3d", "_adaptive_avg_pool2d", "_adaptive_avg_pool3d")},
    **{f"aten.{name}_backward": (1,) for name in ("adaptive_max_pool2d", "adaptive_max_pool3d")},
}

_MOVED: Mapping[str, Callable[[Node], int]] = {
    **{f"aten.{name}": _lookup for name in ("embedding", "index", "index_select", "gather", "take")},
    **{f"aten.{name}": _likelihood for name in ("nll_loss_forward", "nll_loss2d_forward")},
    "aten.index_put_": lambda node: _into_places(node, 1, 2, adds=len(node.args) > 3 and bool(node.args[3])),
    "aten.scatter_": lambda node: _into_places(node, 2, 3, adds=False),
    "aten.scatter_add_": lambda node: _into_places(node, 2, 3, adds=True),
    "aten.index_copy_": lambda node: _into_places(node, 2, 3, adds=False),
    "aten.index_add_": lambda node: _into_places(node, 2, 3, adds=True),
    "aten.convolution_backward": _convolution_gradients,
    "aten.convolution_backward_overrideable": _convolution_gradients,
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
