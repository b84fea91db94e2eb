"""Floating-point operations of products, from shapes alone. A multiplication and an addition are two operations."""

from __future__ import annotations

from math import prod

from lowtide.ir.graph import Node
from lowtide.ir.operators.row import Count
from lowtide.ir.operators.shapes import made_shape, shape_of


def matrices(left: int, right: int) -> Count:
    """`[..., m, k] @ [..., k, n]`, at these positions: 2 m k n for each of the batch."""
    return lambda node: 2 * prod(shape_of(node, left)) * shape_of(node, right)[-1]


def vectors(left: int, right: int) -> Count:
    """`[m, k] @ [k]`, `[k] @ [k]` and `[m] x [n]`: every element of the larger one, or of the result, is a product added up."""
    return lambda node: 2 * max(prod(shape_of(node, left)), prod(made_shape(node, 0)), prod(shape_of(node, right)))


def convolution(node: Node) -> int:
    """Each element of the result is a sum over one kernel; transposed, each element of the input is spread over one."""
    shape = shape_of(node, 0) if node.args[6] else made_shape(node, 0)
    return 2 * shape[0] * prod(shape[2:]) * prod(shape_of(node, 1))


def convolution_backward(transposed: int) -> Count:
    """The gradients of input and weight are convolutions of as many operations as the forward one; that of the bias is a sum."""

    def count(node: Node) -> int:
        spread = shape_of(node, 1) if node.args[transposed] else shape_of(node, 0)
        each = 2 * spread[0] * prod(spread[2:]) * prod(shape_of(node, 2))
        return each * sum(output is not None for output in node.outputs[:2])

    return count


def attention(node: Node) -> int:
    """Two products of matrices for each head: `q k^T` and `p v`."""
    query, key, value = (shape_of(node, position) for position in (0, 1, 2))
    return 2 * prod(query[:-1]) * key[-2] * (query[-1] + value[-1])


def attention_backward(node: Node) -> int:
    """`q k^T` once more, and the gradients of p, v, q and k: five products."""
    query, key, value = (shape_of(node, position) for position in (1, 2, 3))
    return 2 * prod(query[:-1]) * key[-2] * (3 * query[-1] + 2 * value[-1])
