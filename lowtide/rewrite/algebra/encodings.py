"""What is held between forward and backward pass in another form, and made again for each of those that read it there."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from lowtide.ir.graph import Arg, Node, Storage, Value
from lowtide.ir.operators.nodes import is_view
from lowtide.ir.shapes.polynomial import normal
from lowtide.ir.sizes import ITEM_BYTES
from lowtide.rewrite.algebra.rule import Match
from lowtide.rewrite.algebra.uses import Uses, count_of, is_dense


def readers_of_packed(uses: Uses, value: Value) -> list[Node]:
    """The nodes of the backward pass that read a value which the forward pass makes; none where it cannot be held in another form."""
    if not uses.is_forward(value) or not is_dense(value) or value.storage.nbytes != normal(ITEM_BYTES[value.dtype] * count_of(value)):
        return []
    readers = uses.read_by_backward(value.storage)
    seen = {each for node in readers for each in node.inputs if each.storage is value.storage}
    return readers if not any(node.writes for node in readers) and all(_looks(uses, value, each) is not None for each in seen) else []


def held_as(uses: Uses, value: Value, packed: Node | Value, unpacked: Callable[[Value], Node], readers: Sequence[Node]) -> Match:
    """A value that `readers` get from what `packed` makes of it, which is held, or from one that is held anyway.

    `unpacked` gives the node that makes a value like it again, which it is given. What only these looked through is gone.
    """
    instead: dict[Node, tuple[Node, ...]] = dict.fromkeys(_unseen(uses, value, readers), ())
    now: Storage | None = None
    if isinstance(packed, Node):
        maker = uses.makers[value]
        instead[maker], now = (maker, packed), packed.results[0].storage
    for place, node in enumerate(readers):
        again = uses.fresh_like(value, f"{value.name}_again{place}", value.dtype)
        instead[node] = (replace(unpacked(again), source=node.source), *_reading(uses, node, value, again))
    return Match(instead, value.storage, now)


def _reading(uses: Uses, node: Node, value: Value, again: Value) -> Iterator[Node]:
    """A node that reads a value made again, and before it what it looks at that through."""
    swapped: dict[Value, Value] = {}
    for seen in (each for each in node.inputs if each.storage is value.storage):
        before, after = value, again
        for look in _looks(uses, value, seen) or ():
            made = look.results[0]
            new = replace(made, name=uses.name(f"{made.name}_again"), storage=again.storage)
            yield replace(_with(look, {before: after}), outputs=(new,), after=())
            before, after = made, new
        swapped[seen] = after
    yield _with(node, swapped)


def _looks(uses: Uses, value: Value, seen: Value) -> list[Node] | None:
    """The views that lead from a value to another one on its storage; None where they do not begin there."""
    found: list[Node] = []
    while seen is not value:
        node = uses.makers.get(seen)
        if node is None or not is_view(node) or len(node.inputs) != 1 or len(node.outputs) != 1:
            return None
        found.insert(0, node)
        seen = node.inputs[0]
    return found


def _unseen(uses: Uses, value: Value, readers: Collection[Node]) -> list[Node]:
    """The views that nothing but these and one another reads."""
    gone = set(readers)
    for view in reversed(uses.views[value.storage]):
        if all(user in gone for made in view.results for user in uses.users[made]):
            gone.add(view)
    return [view for view in uses.views[value.storage] if view in gone]


def _with(node: Node, swapped: dict[Value, Value]) -> Node:
    """A node that reads other values in the place of some."""

    def arg(given: Arg) -> Arg:
        return tuple(map(arg, given)) if isinstance(given, tuple) else swapped.get(given, given) if isinstance(given, Value) else given

    kwargs = tuple((name, arg(given)) for name, given in node.kwargs)
    inplace = tuple((swapped.get(value, value), form) for value, form in node.inplace)
    return replace(node, args=tuple(map(arg, node.args)), kwargs=kwargs, inplace=inplace)
