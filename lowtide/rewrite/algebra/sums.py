"""Products that are added to something, as one operator that adds while it multiplies.

The gradient of what several products read is the sum of a product for each: of the input of query, key and value, or of both halves of a
gated layer. An operator that adds its product to what lies there needs no memory for the product, and no pass over both to add them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.forms import ADDED
from lowtide.rewrite.algebra.rule import Match
from lowtide.rewrite.algebra.uses import Uses, count_of, is_row_by_row

_ADD = "aten.add.Tensor"


def products_added(uses: Uses) -> Iterator[Match]:
    """add(mm(a, b), c) -> addmm(c, a, b), in the memory of c where that is free; so of bmm, and through views."""
    for node in uses.nodes_of(_ADD):
        values = [value for value in node.args if isinstance(value, Value)]
        if node.kwargs or node.writes or len(node.args) != 2 or len(values) != 2:
            continue
        products = [each for each in values if _is_product(uses, each, node)]
        if products:
            product = max(products, key=lambda each: uses.place[uses.makers_of[each.storage]])  # the other is there sooner
            other = values[0] if product is values[1] else values[1]
            maker = uses.makers_of[product.storage]
            gone = dict.fromkeys((maker, *uses.views[product.storage]), ())
            yield Match({**gone, node: tuple(_added(uses, maker, node, other))}, product.storage)


def _is_product(uses: Uses, value: Value, node: Node) -> bool:
    """Whether a value is a whole product that is made to be added here, to something that lies as it does."""
    maker, result = uses.makers_of.get(value.storage), node.outputs[0]
    if maker is None or maker.op not in ADDED or maker.kwargs or result is None or value.storage in uses.kept:
        return False
    if [uses.readers[value.storage], sum(given.storage is value.storage for given in node.inputs)] != [[node], 1]:
        return False
    if uses.written_between(maker, node):
        return False
    values = [given for given in (*node.args, *maker.results, result) if isinstance(given, Value)]
    if not all(is_row_by_row(given) and given.dtype == value.dtype for given in values):
        return False
    return len({given.shape for given in (*node.inputs, result)}) == 1 and count_of(value) == count_of(maker.results[0])


def _added(uses: Uses, maker: Node, node: Node, other: Value) -> Iterator[Node]:
    """The nodes in the place of the sum: what it is added to seen as the product lies, the product, the sum seen as it was."""
    made, result = maker.results[0], node.results[0]
    if made.shape == result.shape:
        yield _multiplied(maker, node, other, result)
        return
    seen = replace(other, name=uses.name(f"{other.name}_seen"), shape=made.shape, stride=made.stride)
    flat = replace(result, name=uses.name(f"{result.name}_flat"), shape=made.shape, stride=made.stride)
    yield Node("aten.view.default", (other, made.shape), (seen,), source=node.source)
    yield _multiplied(maker, node, seen, flat)
    yield Node("aten.view.default", (flat, result.shape), (result,), source=node.source)


def _multiplied(maker: Node, node: Node, onto: Value, result: Value) -> Node:
    op, after = ADDED[maker.op], tuple(dict.fromkeys((*maker.after, *node.after)))
    inplace = ((onto, op.replace(".default", "_.default")),)
    return replace(node, op=op, args=(onto, *maker.args), outputs=(result,), inplace=inplace, after=after)
