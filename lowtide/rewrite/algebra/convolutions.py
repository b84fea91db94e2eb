"""Gradients of what convolutions read, which autograd asks for with that at hand, though only its sizes matter."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lowtide.ir.graph import Arg, Node, Value
from lowtide.rewrite.algebra.rule import Match
from lowtide.rewrite.algebra.uses import Uses, is_row_by_row

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
        x = next(iter(instead)).args[1]
        assert isinstance(x, Value)
        yield Match(instead, x.storage)


def _without_input(node: Node) -> Node | None:
    gradient, x, weight, _, *geometry, transposed, _, groups, mask = node.args
    read = [value for value in (gradient, x, weight) if isinstance(value, Value)]
    if mask != (True, False, False) or node.kwargs or not all(map(is_row_by_row, (*read, *node.results))):
        return None
    if len(read) < 3 or len({each.dtype for each in read}) > 1 or not all(_is_by_dimension(each, read[1]) for each in geometry):
        return None
    added = (0,) * (len(read[1].shape) - 2) if transposed else _added(read, geometry)
    if added is None:
        return None
    args = (gradient, weight, None, *geometry, not transposed, added, groups)
    return replace(node, op=_FORWARD, args=args, outputs=node.outputs[:1], inplace=())


def _is_by_dimension(sizes: Arg, x: Value) -> bool:
    return isinstance(sizes, tuple) and len(sizes) == len(x.shape) - 2


def _added(read: Sequence[Value], geometry: Sequence[Arg]) -> tuple[int, ...] | None:
    """By dimension, how much longer what the convolution read is than what the transposed one makes; None where that is no number."""
    gradient, x, weight = (value.shape[2:] for value in read)
    found = []
    for sizes in zip(x, gradient, weight, *(each for each in geometry if isinstance(each, tuple)), strict=True):
        numbers = [each for each in sizes if isinstance(each, int)]
        if len(numbers) < len(sizes):
            return None
        there, here, kernel, step, pad, apart = numbers
        found.append(there - ((here - 1) * step - 2 * pad + apart * (kernel - 1) + 1))
    return tuple(found)
