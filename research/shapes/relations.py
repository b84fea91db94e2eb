"""What operators say about sizes: which extents are equal, whatever the dimensions are (BladeDISC++, section 2.1).

Views and copies keep the number of elements, matching operands share extents, a product of matrices sums over an extent that both
have. Each rule takes a node and gives pairs of sizes. An operator without a rule says nothing. A broadcast extent may be 1 instead of its
partner's: it equals the result's only where it is known to be 2 or more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain
from typing import TypeAlias

from lowtide.ir.graph import Arg, Graph, Node, Value
from lowtide.ir.operators.nodes import functional_base
from lowtide.ir.shapes.polynomial import Polynomial, number
from lowtide.ir.sizes import Size, product
from research.shapes.compare import sign_of
from research.shapes.sign import Sign
from research.shapes.solve import Equation, ShapeGraph

Pair: TypeAlias = "tuple[Size, Size]"
Rule: TypeAlias = "Callable[[Node, ShapeGraph], Iterator[Pair]]"


def equations(graph: Graph, known: ShapeGraph) -> Iterator[Equation]:
    """What the operators of a graph, bodies included, say about its sizes, of which something may be known already.

    What is equal as it stands is left out.
    """
    for index, node in enumerate(graph.nodes):
        rule = RULES.get(functional_base(node.op))
        for first, second in rule(node, known) if rule is not None else ():
            if first is not second and first != second:
                yield Equation(first, second, f"node {index} ({node.op})")
        if node.body is not None:
            yield from (each._replace(because=f"{each.because} in the body of node {index}") for each in equations(node.body, known))


def _elements(node: Node, known: ShapeGraph) -> Iterator[Pair]:
    """The result has as many elements as the first argument."""
    for given, result in _ends(node):
        if given.dtype == result.dtype:  # a view of another type counts otherwise
            yield product(given.shape), product(result.shape)


def _same(node: Node, known: ShapeGraph) -> Iterator[Pair]:
    """The result is shaped as the first argument."""
    for given, result in _ends(node):
        yield from zip(given.shape, result.shape, strict=False)


def _partners(node: Node, known: ShapeGraph) -> Iterator[Pair]:
    """All arguments are broadcast to the shape of the result, or of what is written."""
    for result in node.results[:1]:
        for given in node.inputs:
            yield from _broadcast(given, result, known)


def _broadcast(given: Value, result: Value, known: ShapeGraph) -> Iterator[Pair]:
    for one, other in zip(reversed(given.shape), reversed(result.shape), strict=False):
        over = Polynomial.of(known.simplified(one)) - number(2)
        if sign_of(over, known.dimensions) in (Sign.NOT_NEGATIVE, Sign.ZERO):
            yield one, other


def _matrices(first: int, second: int, broadcast: bool = False) -> Rule:
    """Products of matrices: [.., n, k] @ [.., k, m] is [.., n, m], in batches of equal extents unless they may be broadcast."""

    def rule(node: Node, known: ShapeGraph) -> Iterator[Pair]:
        one, two = _tensor(node, first), _tensor(node, second)
        if one is None or two is None or len(one.shape) < 2 or len(one.shape) != len(two.shape):
            return
        yield one.shape[-1], two.shape[-2]
        for result in node.outputs[:1]:
            if result is not None:
                yield from zip((one.shape[-2], two.shape[-1]), result.shape[-2:], strict=True)
                yield from chain(*(zip(each.shape[:-2], result.shape, strict=False) for each in (one, two) if not broadcast))

    return rule


def _permuted(node: Node, known: ShapeGraph) -> Iterator[Pair]:
    """Extents in another order: `permute` says it, `transpose` and `t` exchange two."""
    for given, result in _ends(node):
        rank, axes = len(given.shape), [arg for arg in node.args[1:] if isinstance(arg, int)]
        positions = list(range(rank))
        if functional_base(node.op) == "aten.permute":
            positions = [each % rank for each in _tuple(node.args[1] if len(node.args) > 1 else None) if isinstance(each, int)]
        elif rank > 1:
            one, two = (each % rank for each in (axes if len(axes) == 2 else (0, 1)))
            positions[one], positions[two] = positions[two], positions[one]
        if len(positions) == len(result.shape):
            yield from ((given.shape[position], extent) for position, extent in zip(positions, result.shape, strict=True))


def _joined(node: Node, known: ShapeGraph) -> Iterator[Pair]:
    """Tensors end to end: one extent is the sum, the others are equal."""
    exprs, result = [each for each in _tuple(node.args[0]) if isinstance(each, Value)], node.outputs[0]
    if result is None or not result.shape or any(len(each.shape) != len(result.shape) for each in exprs):
        return
    dim = node.args[1] if len(node.args) > 1 else 0
    axis = dim % len(result.shape) if isinstance(dim, int) else 0
    yield sum((each.shape[axis] for each in exprs[1:]), start=exprs[0].shape[axis]), result.shape[axis]
    for each in exprs:
        yield from ((each.shape[position], extent) for position, extent in enumerate(result.shape) if position != axis)


def _looked_up(node: Node, known: ShapeGraph) -> Iterator[Pair]:
    """Rows of a table by number: [v, d] by [..] is [.., d]."""
    table, positions, result = _tensor(node, 0), _tensor(node, 1), node.outputs[0]
    if table is not None and positions is not None and result is not None:
        yield from zip((*positions.shape, *table.shape[1:]), result.shape, strict=False)


def _labelled(node: Node, known: ShapeGraph) -> Iterator[Pair]:
    """One label for each example."""
    scores, labels = _tensor(node, 0), _tensor(node, 1)
    if scores is not None and labels is not None and labels.shape:
        yield scores.shape[0], labels.shape[0]


def _attention(node: Node, known: ShapeGraph) -> Iterator[Pair]:
    """Queries [.., n, d], keys [.., k, d] and values [.., k, e] give [.., n, e]."""
    query, key, value, result = _tensor(node, 0), _tensor(node, 1), _tensor(node, 2), node.outputs[0]
    if query is None or key is None or value is None or result is None:
        return
    yield from ((query.shape[0], key.shape[0]), (key.shape[0], value.shape[0]), (key.shape[-2], value.shape[-2]))
    yield from ((query.shape[-1], key.shape[-1]), (query.shape[0], result.shape[0]), (query.shape[-2], result.shape[-2]))


def _ends(node: Node) -> Iterator[tuple[Value, Value]]:
    """The first argument and the first result, where both are tensors."""
    given, result = _tensor(node, 0), node.outputs[0] if node.outputs else None
    if given is not None and result is not None:
        yield given, result


def _tensor(node: Node, position: int) -> Value | None:
    arg = node.args[position] if position < len(node.args) else None
    return arg if isinstance(arg, Value) else None


def _tuple(arg: Arg) -> tuple[Arg, ...]:
    return arg if isinstance(arg, tuple) else ()


def _named(rule: Rule, *names: str) -> dict[str, Rule]:
    return {f"aten.{name}": rule for name in names}


RULES: Mapping[str, Rule] = {
    **_named(_elements, "view", "reshape", "_unsafe_view", "_reshape_alias", "flatten", "unflatten", "squeeze", "unsqueeze", "view_as"),
    **_named(
        _same, "_softmax", "_log_softmax", "softmax", "log_softmax", "native_layer_norm", "native_batch_norm", "native_dropout", "dropout",
        "contiguous", "alias", "detach", "clone", "_to_copy", "to", "empty_like", "zeros_like", "ones_like", "full_like", "rand_like",
        "native_group_norm", "cumsum",
    ),
    **_named(
        _partners, "add", "sub", "mul", "div", "pow", "maximum", "minimum", "where", "eq", "ne", "lt", "le", "gt", "ge", "logical_and",
        "logical_or", "bitwise_and", "bitwise_or", "masked_fill", "addcmul", "addcdiv", "lerp", "relu", "gelu", "silu", "sigmoid", "tanh",
        "exp", "log", "sqrt", "rsqrt", "neg", "abs", "erf", "sin", "cos", "reciprocal", "square", "clamp", "hardtanh", "threshold_backward",
        "gelu_backward", "silu_backward", "tanh_backward", "sigmoid_backward", "native_dropout_backward", "_softmax_backward_data",
        "_log_softmax_backward_data", "copy", "expand", "fill", "zero",
    ),
    **_named(_matrices(0, 1), "mm", "bmm"),
    **_named(_matrices(0, 1, broadcast=True), "matmul"),
    **_named(_matrices(1, 2), "addmm", "baddbmm"),
    **_named(_permuted, "permute", "transpose", "t"),
    **_named(_joined, "cat"),
    **_named(_looked_up, "embedding"),
    **_named(_labelled, "nll_loss_forward", "cross_entropy_loss"),
    **_named(
        _attention, "_scaled_dot_product_flash_attention", "_scaled_dot_product_efficient_attention",
        "_scaled_dot_product_flash_attention_for_cpu",
    ),
}  # fmt: skip
