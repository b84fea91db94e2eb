"""Mean losses as sums, divided in the end: what a loop over parts can put together.

The mean over labels divides by how many count, which the forward pass finds on its way; the backward pass asks for it, and for a gradient
that looks like the loss. So nothing of the backward pass could run before the whole loss exists. Written out, the labels are counted first,
the loss is a sum that is divided, and the gradient is divided before it goes back:

    loss, total = nll_loss_forward(scores, labels, mean)        count = (labels != ignored).sum()
    one = ones_like(loss)                                       one = full((), 1)
    back = nll_loss_backward(one, scores, labels, mean, total)  loss = nll_loss_forward(scores, labels, sum) / count
                                                                back = nll_loss_backward(one / count, scores, labels, sum, count)

The loss is rounded otherwise, by one part in two to the number of its bits, and so are gradients: not exact.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import prod

from lowtide.ir.graph import Arg, Atom, Graph, Node, Storage, Value
from lowtide.ir.sizes import ITEM_BYTES
from lowtide.rewrite.base import Rewritten, replace_nodes

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
    held = {node.outputs[0]: node.args[0] for node in graph.nodes if node.op == _CAST and node.outputs[0] is not None}
    found: dict[Arg, Arg] = {}
    for again, between in held.items():
        first = held.get(between) if isinstance(between, Value) and between.dtype == "int32" else None
        if isinstance(first, Value) and again is not None and first.dtype == again.dtype == "int64":
            found[again] = first
    return found


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
    made = node.outputs[0]
    assert made is not None
    total = _like(made, f"{made.name}_sum")
    outputs = (total, *(None for _ in node.outputs[1:]))
    if loss.ignored is None:
        scores = node.args[0]
        assert isinstance(scores, Value)
        divide = Node("aten.div.Scalar", (total, prod(map(int, scores.shape))), (made,), source=node.source)
    else:
        if _key(node, loss) not in counts:
            counting = tuple(_counting(node, loss, made))
            counts[_key(node, loss)] = counting[-1].results[0]
            yield from counting
        divide = Node("aten.div.Tensor", (total, counts[_key(node, loss)]), (made,), source=node.source)
    yield replace(node, args=_reduced(node.args, loss.reduction), outputs=outputs)
    yield replace(divide, inplace=((total, f"{divide.op.replace('div.', 'div_.')}"),))


def _counting(node: Node, loss: _Loss, made: Value) -> Iterator[Node]:
    """How many labels count, as a number of the loss's type."""
    assert loss.ignored is not None
    labels = node.args[1]
    assert isinstance(labels, Value)
    storage = Storage(f"{made.name}_counts", prod(map(int, labels.shape)), labels.storage.device, made.storage.kind)
    flags = Value(storage.name, storage, "bool", labels.shape, labels.stride)
    yield Node("aten.ne.Scalar", (labels, node.args[loss.ignored]), (flags,), source=node.source)
    count = _like(made, f"{made.name}_count")
    yield Node("aten.sum.default", (flags,), (count,), (("dtype", Atom("dtype", count.dtype)),), source=node.source)


def _backward(node: Node, loss: _Loss, count: Value | None) -> Iterator[Node]:
    """The gradient of a sum, given a share of what the mean was given."""
    given, scores = node.args[0], node.args[1]
    assert isinstance(given, Value)
    assert isinstance(scores, Value)
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
