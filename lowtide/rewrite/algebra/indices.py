"""Labels and indices in fewer bytes between forward and backward pass.

torch holds them as int64. What they can be is known from the operator that makes them (the place of a greatest element is less than the
extent that was searched), from a number of fewer bytes that they were converted from, or from an operator of the forward pass that
refuses all others: a lookup refuses indices beyond its table. The smallest type that holds all these numbers is held in their place.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lowtide.ir.graph import Atom, Kind, Node, Value
from lowtide.ir.operators.integers import CONVERTS, HOLDS, Bounds, made_within, refused_beyond
from lowtide.ir.sizes import ITEM_BYTES
from lowtide.rewrite.algebra.packed import held_as, readers_of_packed
from lowtide.rewrite.algebra.rule import Match
from lowtide.rewrite.algebra.uses import Uses, is_backward

_INTO = ("uint8", "int8", "int16", "int32")


def indices_in_fewer_bytes(uses: Uses) -> Iterator[Match]:
    """f(g, i) in the backward pass -> f(g, to_int64(to_uint8(i))), where every number of i is one of uint8; so of other types."""
    for value in [each for each in uses.makers if each.dtype == "int64"]:
        readers = readers_of_packed(uses, value)
        match = _place(uses, value, readers) if readers else None
        if match is not None:
            yield match


def _place(uses: Uses, value: Value, readers: list[Node]) -> Match | None:
    maker = uses.makers[value]
    if maker.op == CONVERTS and (given := _batch(uses, maker)) is not None:
        return held_as(uses, value, given, lambda again: replace(maker, outputs=(again,), after=()), readers)
    bounds = _bounds(uses, value)
    dtype = None if bounds is None else _smallest(bounds)
    if dtype is None:
        return None
    small = uses.fresh_like(value, f"{value.name}_{dtype}", dtype)
    return held_as(uses, value, _converted(value, small), lambda again: _converted(small, again), readers)


def _batch(uses: Uses, maker: Node) -> Value | None:
    """What a node converts, if it is of the batch, smaller, and nothing writes it."""
    given = maker.args[0]
    if not isinstance(given, Value) or given.storage.kind is not Kind.INPUT or ITEM_BYTES[given.dtype] >= ITEM_BYTES["int64"]:
        return None
    return None if any(before.storage is given.storage for node in uses.graph.nodes for before, _ in node.writes) else given


def _converted(given: Value, made: Value) -> Node:
    return Node(CONVERTS, (given,), (made,), (("dtype", Atom("dtype", made.dtype)),))


def _smallest(bounds: Bounds) -> str | None:
    return next((dtype for dtype in _INTO if HOLDS[dtype][0] <= bounds[0] and bounds[1] <= HOLDS[dtype][1]), None)


def _bounds(uses: Uses, value: Value) -> Bounds | None:
    """Between what every number of a value lies, by the narrowest that is known; None where nothing is."""
    early = [node for node in uses.readers[value.storage] if not is_backward(node)]
    found = [made_within(uses.makers[value], value), *(refused_beyond(node, value) for node in early)]
    return min((each for each in found if each is not None), key=lambda each: each[1] - each[0], default=None)
