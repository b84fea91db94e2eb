"""What is generated: nodes whose operator, arguments and types a kernel exists for. All others are torch's."""

from __future__ import annotations

from collections.abc import Callable, Collection

from lowtide.cpu import expressions
from lowtide.cpu.expressions import name_of
from lowtide.cpu.layout import VIEWS
from lowtide.ir.graph import Graph, Node, Value

NORMS = ("native_batch_norm", "_native_batch_norm_legit_no_training", "cudnn_batch_norm")
_MOST_DIMENSIONS = 6
_MOST_KEYS = 2**14  # of a softmax: a few rows of them lie on a thread's stack
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def is_given_norm(node: Node) -> bool:
    """Whether this is a batch norm whose statistics are given."""
    if name_of(node) not in NORMS or node.writes or any(value is not None for value in node.outputs[1:]):
        return False
    training = node.args[5] if name_of(node) != "_native_batch_norm_legit_no_training" else False
    return training is False and all(isinstance(arg, Value) for arg in node.args[3:5])


def is_known(node: Node, fixed: Collection[Value]) -> bool:
    """Whether a kernel is generated for a node, where `fixed` values are constants."""
    name = name_of(node)
    results = [value for value in node.outputs if value is not None]
    if not name or not results or node.writes or node.body is not None or node.after:
        return False
    if not all(is_plain(value) for value in (*results, *node.inputs)):
        return False
    if name == "as_strided" and not _is_same(node.inputs[0], results[0]):
        return False
    if name in VIEWS or name == "cat":
        return True
    if name in ("clone", "contiguous") or expressions.is_known(node):
        return all(value.shape == results[0].shape or value.dtype == "float32" for value in node.inputs)
    return name in _KNOWN and _KNOWN[name](node, fixed)


def is_plain(value: Value) -> bool:
    """Whether kernels can read and make a tensor like this."""
    sizes = (*value.shape, *value.stride)
    plain = value.dtype == "float32" and value.storage.device == "cpu" and all(isinstance(size, int) for size in sizes)
    return plain and 0 not in value.shape and 0 < len(value.shape) <= _MOST_DIMENSIONS


def _is_same(value: Value, result: Value) -> bool:
    """Whether a view sees a tensor just as it is; strides along extents of 1 mean nothing."""
    if value.shape != result.shape or value.offset != result.offset:
        return False
    return all(size == 1 or mine == its for size, mine, its in zip(value.shape, value.stride, result.stride, strict=True))


# Over what a mean goes, by the number of dimensions: pixels of an image, places of [batch, places, channels] or [batch, y, x, channels].
AVERAGED = ((4, [2, 3]), (3, [1]), (4, [1, 2]))


def _convolution(node: Node, fixed: Collection[Value]) -> bool:
    a, weight, bias, _, _, _, transposed, *_ = node.args
    if not isinstance(a, Value) or not isinstance(weight, Value) or transposed or node.kwargs:
        return False
    return len(a.shape) == 4 and weight in fixed and (bias is None or bias in fixed)


def _product(node: Node, fixed: Collection[Value]) -> bool:
    weight, bias = node.args[-1], node.args[0] if name_of(node) == "addmm" else None
    if node.kwargs or not isinstance(weight, Value) or weight not in fixed:
        return False
    return bias is None or (bias in fixed and isinstance(bias, Value) and bias.shape == weight.shape[1:])


def _mean(node: Node, fixed: Collection[Value]) -> bool:
    a, dims = node.args[0], node.args[1] if len(node.args) > 1 else None
    if not isinstance(a, Value) or not isinstance(dims, tuple) or node.kwargs:
        return False
    rank = len(a.shape)
    return (rank, sorted(dim % rank for dim in dims if isinstance(dim, int))) in AVERAGED


def _layer_norm(node: Node, fixed: Collection[Value]) -> bool:
    a, shape, gamma, beta, _ = node.args
    given = all(each is None or each in fixed for each in (gamma, beta))
    alone = not any(value is not None for value in node.outputs[1:])
    return isinstance(a, Value) and isinstance(shape, tuple) and len(shape) == 1 and given and alone


def _batch_norm(node: Node, fixed: Collection[Value]) -> bool:
    return is_given_norm(node) and all(value in fixed for value in node.inputs[1:]) and node.inputs[0] not in fixed


def _pool(node: Node, fixed: Collection[Value]) -> bool:
    a = node.args[0]
    return isinstance(a, Value) and len(a.shape) == 4 and not any(value is not None for value in node.outputs[1:]) and not node.kwargs


def _average(node: Node, fixed: Collection[Value]) -> bool:
    """Not where a window that goes beyond the padding (`ceil_mode`) counts places: it counts only some of them."""
    args = [*node.args, *[None] * 7][:7]
    return _pool(node, fixed) and (args[4] is not True or args[5] is False or isinstance(args[6], int))


def _global_pool(node: Node, fixed: Collection[Value]) -> bool:
    return _pool(node, fixed) and node.args[1] == (1, 1)


def _batched(node: Node, fixed: Collection[Value]) -> bool:
    return not node.kwargs and all(isinstance(arg, Value) for arg in node.args)


def _softmax(node: Node, fixed: Collection[Value]) -> bool:
    a, dim = node.args[:2]
    if not isinstance(a, Value) or not isinstance(dim, int) or node.kwargs or any(node.args[2:]):
        return False
    return dim % len(a.shape) == len(a.shape) - 1 and int(a.shape[-1]) <= _MOST_KEYS


def _attention(node: Node, fixed: Collection[Value]) -> bool:
    """Without dropout, without the logarithms that only a gradient reads."""
    args, options = [*node.args, 0.0, False][:5], dict(node.kwargs)
    mask, alone = options.get("attn_mask"), not any(value is not None for value in node.outputs[1:])
    if not set(options) <= {"attn_mask", "scale", "is_causal"} or args[3] != 0.0 or not alone:
        return False
    tensors = [*args[:3], *(() if mask is None else (mask,))]
    if not all(isinstance(each, Value) and len(each.shape) in (2, 4) for each in tensors):
        return False
    query, key, value = (each for each in args[:3] if isinstance(each, Value))
    return query.shape[1] == key.shape[1] == value.shape[1] and int(key.shape[2]) <= _MOST_KEYS


_KNOWN: dict[str, Callable[[Node, Collection[Value]], bool]] = {
    "convolution": _convolution, "addmm": _product, "mm": _product, "mean": _mean, "native_layer_norm": _layer_norm,
    **dict.fromkeys(NORMS, _batch_norm), "max_pool2d_with_indices": _pool, "avg_pool2d": _average, "bmm": _batched, "_softmax": _softmax,
    "_safe_softmax": _softmax, ATTENTION: _attention, "_adaptive_avg_pool2d": _global_pool,
}  # fmt: skip


def following(body: Graph, given: Collection[Value]) -> set[Value]:
    """These values, and all that follow from them alone."""
    values = set(given)
    for node in body.nodes:
        if all(value in values for value in node.inputs):
            values.update(node.results)
    return values
