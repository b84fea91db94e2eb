"""Rewrites that a search over splits begins with: mean losses as sums, tensors made of sizes, gradients of looked-up rows added straight.

The mean over labels divides by how many count, which the forward pass finds on its way; the backward pass asks for it, and for a gradient
that looks like the loss. So nothing of the backward pass could run before the whole loss exists. Written out, the labels are counted first,
the loss is a sum that is divided, and the gradient is divided before it goes back:

    loss, total = nll_loss_forward(scores, labels, mean)        count = (labels != ignored).sum()
    one = ones_like(loss)                                       one = full((), 1)
    back = nll_loss_backward(one, scores, labels, mean, total)  loss = nll_loss_forward(scores, labels, sum) / count
                                                                back = nll_loss_backward(one / count, scores, labels, sum, count)

The loss is rounded otherwise, by one part in two to the number of its bits, and so are gradients: not exact.

A gradient of looked-up rows added straight to what it would be added to.

The gradient of an embedding is as large as its table, and zero but for the rows that were looked up. Where the table serves twice, as that
of words does at both ends of a language model, it is made only to be added to the other gradient:

    rows = embedding_dense_backward(gradient, indices, 50257, -1, False)        numbers = arange(50257)
    total = add(other, rows)                                                    total = add_rows(other, numbers, indices, gradient)

which may work in the other's memory, and with some of the numbers does so for these rows of it: so that neither gradient is ever whole.
The rows of one word are then added one by one to what is there, not first to one another: not exact.

What is made like another tensor, made of its sizes instead. `empty_like(x)` asks `x` for its looks alone, and yet comes after it and holds
it. Of numbers it can be made at any time: random numbers are then drawn, and gradients begun, without waiting for what they are shaped
like. The bits are the same.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from lowtide.errors import of_kind
from lowtide.ir.graph import Arg, Atom, Graph, Kind, Node, Storage, Value
from lowtide.ir.operators.nodes import forms_of
from lowtide.ir.sizes import ITEM_BYTES, contiguous_stride, product
from lowtide.rewrite.base import Rewritten, replace_nodes

_EMPTY_LIKE, _EMPTY_STRIDED = "aten.empty_like.default", "aten.empty_strided.default"


def make_anew(graph: Graph) -> Rewritten:
    """Every such tensor whose sizes are numbers."""
    return replace_nodes(graph, {node: (anew,) for node in graph.nodes if (anew := _made(node)) is not None})


def _made(node: Node) -> Node | None:
    """The node that makes the same of numbers; None where there is none."""
    op = forms_of(node.op).of_sizes
    value = node.outputs[0] if op else None
    if value is None or not all(isinstance(size, int) for size in (*value.shape, *value.stride)):
        return None
    layout = (("dtype", Atom("dtype", value.dtype)), ("device", Atom("device", value.storage.device)))
    args: tuple[Arg, ...] = (value.shape,)
    if value.stride == contiguous_stride(value.shape):
        return replace(node, op=op, args=args, kwargs=layout)
    if node.op == _EMPTY_LIKE:
        return replace(node, op=_EMPTY_STRIDED, args=(*args, value.stride), kwargs=layout)
    return None


_CAST = "aten._to_copy.default"
_MEAN, _SUM = 1, 2  # as torch numbers reductions


@dataclass(frozen=True, slots=True)
class _Loss:
    """One loss: where its operators say how they reduce, and what a mean divides by."""

    forward: str
    backward: tuple[str, ...]
    reduction: int  # the argument of the forward operator; of the backward one the next
    ignored: int | None = None  # the argument that says which labels do not count; None where all elements do


_LOSSES = (
    _Loss("aten.nll_loss_forward.default", ("aten.nll_loss_backward.default", "lowtide.cross_entropy_backward.default"), 3, 4),
    _Loss("aten.nll_loss2d_forward.default", ("aten.nll_loss2d_backward.default",), 3, 4),
    _Loss("aten.mse_loss.default", ("aten.mse_loss_backward.default",), 2),
    _Loss("aten.smooth_l1_loss.default", ("aten.smooth_l1_loss_backward.default",), 2),
    _Loss("aten.huber_loss.default", ("aten.huber_loss_backward.default",), 2),
)
LOSSES = frozenset(loss.forward for loss in _LOSSES)


def sum_losses(graph: Graph) -> Rewritten:
    """Every mean loss of these as a sum, where nothing else reads what it divides by."""
    origins = _origins(graph)
    means = {node: loss for loss in _LOSSES for node in graph.nodes if node.op == loss.forward and _is_mean(node, loss, 0)}
    counts: dict[tuple[Arg, ...], Value] = {}
    instead: dict[Node, tuple[Node, ...]] = {}
    for node, loss in means.items():
        backward = [
            other for other in graph.nodes if other.op in loss.backward and _same(node, other, origins) and _is_mean(other, loss, 1)
        ]
        if _can_be(graph, node, loss, backward):
            instead[node] = tuple(_forward(node, loss, counts))
            instead |= {other: tuple(_backward(other, loss, counts[_key(node, loss)] if loss.ignored else None)) for other in backward}
    return replace_nodes(graph, instead)


def _is_mean(node: Node, loss: _Loss, later: int) -> bool:
    place = loss.reduction + later
    return (node.args[place] if len(node.args) > place else _MEAN) == _MEAN and not node.kwargs


def _same(forward: Node, backward: Node, origins: Mapping[Arg, Arg]) -> bool:
    """Whether a backward operator is of the same scores and labels, which may have been held as int32 in between."""
    return backward.args[1] == forward.args[0] and origins.get(backward.args[2], backward.args[2]) == forward.args[1]


def _origins(graph: Graph) -> dict[Arg, Arg]:
    """By what was int64, then int32, and is int64 again: what it was, as labels and those that do not count fit into int32."""
    casts = {node.outputs[0]: node.args[0] for node in graph.nodes if node.op == _CAST and node.outputs[0] is not None}
    origins: dict[Arg, Arg] = {}
    for again, between in casts.items():
        first = casts.get(between) if isinstance(between, Value) and between.dtype == "int32" else None
        if isinstance(first, Value) and again is not None and first.dtype == again.dtype == "int64":
            origins[again] = first
    return origins


def _can_be(graph: Graph, node: Node, loss: _Loss, backward: list[Node]) -> bool:
    scores = node.args[0]
    if not isinstance(scores, Value) or scores.dtype == "float16" or node.outputs[0] is None:  # in which sums go beyond its range
        return False
    if loss.ignored is None:
        return True
    total = node.outputs[1]
    readers = [other for other in graph.nodes if total in other.inputs]
    return node.args[2] is None and total not in graph.outputs and all(other in backward for other in readers)


def _key(node: Node, loss: _Loss) -> tuple[Arg, ...]:
    assert loss.ignored is not None
    return node.args[1], node.args[loss.ignored], node.outputs[0].dtype if node.outputs[0] is not None else ""


def _forward(node: Node, loss: _Loss, counts: dict[tuple[Arg, ...], Value]) -> Iterator[Node]:
    """The loss as a sum that is divided; what it is divided by, if it has to be counted."""
    result = node.results[0]
    total = _like(result, f"{result.name}_sum")
    outputs = (total, *(None for _ in node.outputs[1:]))
    if loss.ignored is None:
        scores = of_kind(Value, node.args[0])
        divide = Node("aten.div.Scalar", (total, prod(map(int, scores.shape))), (result,), source=node.source)
    else:
        if _key(node, loss) not in counts:
            counting = tuple(_counting(node, loss, result))
            counts[_key(node, loss)] = counting[-1].results[0]
            yield from counting
        divide = Node("aten.div.Tensor", (total, counts[_key(node, loss)]), (result,), source=node.source)
    yield replace(node, args=_reduced(node.args, loss.reduction), outputs=outputs)
    yield replace(divide, inplace=((total, f"{divide.op.replace('div.', 'div_.')}"),))


def _counting(node: Node, loss: _Loss, result: Value) -> Iterator[Node]:
    """How many labels count, as a number of the loss's type."""
    assert loss.ignored is not None
    labels = of_kind(Value, node.args[1])
    storage = Storage(f"{result.name}_counts", prod(map(int, labels.shape)), labels.storage.device, result.storage.kind)
    flags = Value(storage.name, storage, "bool", labels.shape, labels.stride)
    yield Node("aten.ne.Scalar", (labels, node.args[loss.ignored]), (flags,), source=node.source)
    count = _like(result, f"{result.name}_count")
    yield Node("aten.sum.default", (flags,), (count,), (("dtype", Atom("dtype", count.dtype)),), source=node.source)


def _backward(node: Node, loss: _Loss, count: Value | None) -> Iterator[Node]:
    """The gradient of a sum, given a share of what the mean was given."""
    given, scores = of_kind(Value, node.args[0]), of_kind(Value, node.args[1])
    share = _like(given, f"{node.results[0].name}_share")
    by = prod(map(int, scores.shape)) if count is None else count
    yield Node("aten.div.Scalar" if count is None else "aten.div.Tensor", (given, by), (share,), source=node.source)
    args = (share, *_reduced(node.args, loss.reduction + 1)[1:])
    inplace = tuple(pair for pair in node.inplace if pair[0] in args[1:])
    yield replace(node, args=args if count is None else (*args[:-1], count), inplace=inplace)


def _reduced(args: tuple[Arg, ...], place: int) -> tuple[Arg, ...]:
    return (*args[:place], _SUM, *args[place + 1 :])


def _like(value: Value, name: str) -> Value:
    nbytes = ITEM_BYTES[value.dtype]
    return Value(name, Storage(name, nbytes, value.storage.device, value.storage.kind), value.dtype, (), ())


ROWS, _ADD = "aten.embedding_dense_backward.default", "aten.add.Tensor"


def add_into_sums(graph: Graph) -> Rewritten:
    """Every such sum of two gradients whose rows nobody else reads."""
    makers = {value: node for node in graph.nodes for value in node.outputs if value is not None and node.op == ROWS}
    readers: dict[Value, int] = dict.fromkeys(graph.outputs, 2)
    for node in graph.nodes:
        readers |= {value: readers.get(value, 0) + 1 for value in node.inputs if value in makers}
    instead: dict[Node, tuple[Node, ...]] = {}
    for node in graph.nodes:
        for place in (0, 1) if node.op == _ADD and not node.kwargs and len(node.args) == 2 else ():
            rows, other = node.args[place], node.args[1 - place]
            if isinstance(rows, Value) and isinstance(other, Value) and readers.get(rows) == 1 and _fits(makers, rows, other):
                instead |= {makers[rows]: (), node: _added(makers[rows], node, other)}
                break
    return replace_nodes(graph, instead)


def _fits(makers: Mapping[Value, Node], rows: Value, other: Value) -> bool:
    maker = makers.get(rows)
    if (
        maker is None
        or rows is other
        or not isinstance(rows.shape[0], int)
        or (rows.dtype, rows.shape, rows.stride) != (other.dtype, other.shape, other.stride)
    ):
        return False
    return can_add_rows(maker) and not maker.after


def can_add_rows(maker: Node) -> bool:
    """Whether the rows that a gradient of an embedding is made of can be added one by one: all count, as they are."""
    gradient, indices, _, padding, scaled = maker.args
    if not isinstance(gradient, Value) or not isinstance(indices, Value) or not isinstance(padding, int):
        return False
    dense = all(value.stride == contiguous_stride(value.shape) for value in (gradient, indices))
    return dense and padding < 0 and not scaled and not maker.kwargs


def rows_of(maker: Node, name: str) -> tuple[Node, Node]:
    """The views of a gradient's rows, and of the numbers of the rows of the table that they belong to."""
    gradient, indices = of_kind(Value, maker.args[0]), of_kind(Value, maker.args[1])
    count, width = product(indices.shape), gradient.shape[-1]
    flat = replace(indices, name=f"{name}_indices", shape=(count,), stride=(1,))
    rows = replace(gradient, name=f"{name}_rows", shape=(count, width), stride=(width, 1))
    return (
        Node("aten.view.default", (indices, (count,)), (flat,), source=maker.source),
        Node("aten.view.default", (gradient, (count, width)), (rows,), source=maker.source),
    )


def _added(maker: Node, node: Node, other: Value) -> tuple[Node, ...]:
    """The nodes that add the gradient's rows to the other gradient."""
    name = node.results[0].name
    views, numbers = rows_of(maker, name), _numbers(other, name)
    args = (other, numbers.outputs[0], *(view.outputs[0] for view in views))
    return numbers, *views, replace(node, op="lowtide.add_rows.default", args=args, inplace=((other, "lowtide.add_rows_.default"),))


def _numbers(table: Value, name: str) -> Node:
    """What makes the numbers of a table's rows, one after another."""
    count = of_kind(int, table.shape[0])
    dtype = "int32" if count <= 2**31 else "int64"
    storage = Storage(f"{name}_numbers", count * ITEM_BYTES[dtype], table.storage.device, Kind.ACTIVATION)
    layout = (("dtype", Atom("dtype", dtype)), ("device", Atom("device", storage.device)))
    return Node("aten.arange.default", (count,), (Value(storage.name, storage, dtype, (count,), (1,)),), layout)
