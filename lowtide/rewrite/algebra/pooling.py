"""Max-pooling: what it leaves for the backward pass in fewer bytes, and what stands before it not at all.

The gradient of a rectifier lets through where its result was above 0. Where that went into max-pooling, the backward pass spreads gradients
over the greatest elements of windows alone, and those are what max-pooling gave. So gradients are let through or not before they are
spread, by the result of the pooling, which is smaller and mostly held for the operator after it anyway. Where windows overlap, an element
gets the sum of what was let through for each, which is all or none.

The pooling's gradient knows elements by int64 indices, and is given the pooling's input for its shape alone. The place in the window is
enough, and needs a byte or two.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lowtide.ir.graph import Arg, Atom, Node, Value
from lowtide.rewrite.algebra.rule import Match
from lowtide.rewrite.algebra.uses import Uses, is_row_by_row, layout

_POOL, _BACKWARD = "aten.max_pool2d_with_indices.default", "aten.max_pool2d_with_indices_backward.default"
_THRESHOLD = "aten.threshold_backward.default"
_OWN = "lowtide.max_pool2d_backward.default"
_HOLDS = (("uint8", 2**8), ("int16", 2**15), ("int32", 2**31))


def threshold_before_pooling(uses: Uses) -> Iterator[Match]:
    """threshold_backward(pool_backward(g, x, i), x, 0) -> pool_backward(threshold_backward(g, pool(x), 0), x, i)."""
    for threshold in uses.nodes_of(_THRESHOLD):
        backward = uses.maker(threshold.args[0], _BACKWARD)
        if backward is None or threshold.args[1] is not backward.args[1] or len(uses.readers[_made(backward).storage]) != 1:
            continue
        pool, gradient, x = uses.maker(backward.args[7], _POOL), backward.args[0], backward.args[1]
        if pool is None or pool.args[0] is not x or _same(pool, backward) is None or not isinstance(gradient, Value):
            continue
        pooled, made, spread = pool.outputs[0], _made(threshold), _made(backward)
        if pooled is None or layout(pooled) != layout(gradient) or layout(made) != layout(spread) or _made(backward) in uses.graph.outputs:
            continue
        let_through = uses.fresh(made, f"{made.name}_pooled", made.dtype, pooled.shape)
        if layout(let_through) != layout(gradient):
            continue
        early = replace(
            threshold, args=(gradient, pooled, *threshold.args[2:]), outputs=(let_through,), inplace=_taking(threshold, gradient)
        )
        late = replace(backward, args=(let_through, *backward.args[1:]), outputs=(made,))
        assert isinstance(x, Value)
        yield Match({backward: (), threshold: (early, late)}, x.storage, x.storage)  # it is read for its shape, still


def places_in_windows(uses: Uses) -> Iterator[Match]:
    """pool_backward(g, x, i) -> lowtide.max_pool2d_backward(g, pool_places(i)), which needs no x."""
    for backward in uses.nodes_of(_BACKWARD):
        gradient, x, indices = backward.args[0], backward.args[1], backward.args[7]
        pool = uses.maker(indices, _POOL)
        window = None if pool is None or pool.args[0] is not x else _same(pool, backward)
        if window is None or not isinstance(indices, Value) or not isinstance(x, Value) or not isinstance(gradient, Value):
            continue
        if len(uses.readers[indices.storage]) != 1 or not uses.is_forward(indices):
            continue
        if not all(map(is_row_by_row, (gradient, x, indices, _made(backward)))):
            continue
        dtype = _dtype(uses, x, window)
        if dtype is not None:
            places = uses.fresh(indices, f"{indices.name}_places", dtype, indices.shape)
            args = (indices, x.shape[-2:], window[1], window[2], Atom("dtype", dtype))
            packed = Node("lowtide.pool_places.default", args, (places,), source=backward.source)
            again = replace(backward, op=_OWN, args=(gradient, places, x.shape[-2:], *window), inplace=())
            beside = (x.storage,) if uses.is_forward(x) and uses.read_by_backward(x.storage) == [backward] else ()
            instead = {uses.makers[indices]: (uses.makers[indices], packed), backward: (again,)}
            yield Match(instead, indices.storage, places.storage, beside)


def _dtype(uses: Uses, x: Value, window: tuple[Arg, ...]) -> str | None:
    """The smallest that holds every place in a window; None where none of 4 bytes does."""
    kernel, _, _, dilation, _ = window
    assert isinstance(kernel, tuple)
    assert isinstance(dilation, tuple)
    reach = uses.at_most(dilation[0] * (kernel[0] - 1) * x.shape[-1] + dilation[1] * (kernel[1] - 1))
    return next((name for name, count in _HOLDS if reach < count), None)


def _made(node: Node) -> Value:
    made = node.outputs[0]
    assert made is not None, "nothing else reads it"
    return made


def _same(pool: Node, backward: Node) -> tuple[Arg, ...] | None:
    """Window, step, padding, dilation and rounding that both mean, with two numbers each; None where they mean others."""
    defaults: tuple[Arg, ...] = (None, (), 0, 1, False)
    mine = (*pool.args[1:], *defaults[len(pool.args) - 1 :])
    forward, given = _written_out(mine), _written_out(backward.args[2:7])
    return given if forward == given else None


def _written_out(window: tuple[Arg, ...]) -> tuple[Arg, ...]:
    kernel, stride, padding, dilation, ceil_mode = window
    return (_two(kernel), _two(stride or kernel), _two(padding), _two(dilation), bool(ceil_mode))


def _two(number: Arg) -> tuple[Arg, ...]:
    numbers = number if isinstance(number, tuple) else (number,)
    return numbers * 2 if len(numbers) == 1 else numbers


def _taking(threshold: Node, gradient: Value) -> tuple[tuple[Value, str], ...]:
    """The gradient's memory may be taken, as that of the spread one might have been."""
    return tuple((gradient, form) for value, form in threshold.inplace if value is threshold.args[0])
