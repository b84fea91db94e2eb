"""Rules of products of matrices and vectors."""

from __future__ import annotations

from collections.abc import Iterator

from lowtide.ir.graph import Node
from lowtide.ir.operators.axes.axis import Axis, Role
from lowtide.ir.operators.axes.builders import SUM, NodeLocation, Rule, axis, given


def einsum(text: str) -> Rule:
    """A product by its letters, "mk,kn->mn": each letter an axis, those that the result lacks are summed.

    An argument in brackets is added, "[mn],mk,kn->mn": it may be broadcast, and there is no axis over what is summed, as every part would
    add it.
    """
    given_text, _, made = text.partition("->")
    terms = given_text.split(",")

    def rule(node: Node) -> Iterator[Axis]:
        added = any(term.startswith("[") for term in terms)
        for letter in dict.fromkeys(letter for letter in given_text if letter.isalpha()):
            if letter in made:
                sliced: NodeLocation = {at: dim for at, term in enumerate(terms) if (dim := _place(node, at, term, letter)) is not None}
                yield from axis(node, sliced, {0: made.index(letter)})
            elif not added:
                yield from axis(node, {at: term.index(letter) for at, term in enumerate(terms) if letter in term}, {0: SUM})

    return rule


def _place(node: Node, at: int, term: str, letter: str) -> int | None:
    """The dimension of a term along which it has a letter, counted from the back; None where it lacks it."""
    letters = term.strip("[]")
    value = given(node, (at,))
    if value is None or letter not in letters:
        return None
    dim = letters.index(letter) - len(letters)
    return None if -dim > len(value.shape) or (term.startswith("[") and value.shape[dim] == 1) else dim


def matmul(node: Node) -> Iterator[Axis]:
    """[.., m, k] @ [.., k, n], batches broadcast; a vector on either side has no m, or no n."""
    one, two, made = given(node, (0,)), given(node, (1,)), node.outputs[0]
    if one is None or two is None or made is None:
        return
    rows, columns = len(one.shape) > 1, len(two.shape) > 1
    batch = len(made.shape) - rows - columns
    for dim in range(batch):
        from_back = dim - batch
        sliced: dict[int, int] = {}
        for at, value in ((0, one), (1, two)):
            if len(value.shape) - 2 >= -from_back and value.shape[from_back - 2] != 1:
                sliced[at] = from_back - 2
        yield from axis(node, sliced, {0: dim})
    if rows:
        yield from axis(node, {0: -2}, {0: batch})
    if columns:
        yield from axis(node, {1: -1}, {0: -1})
    yield from axis(node, {0: -1, 1: -2 if columns else -1}, {0: SUM})


def linear(node: Node) -> Iterator[Axis]:
    x, bias = given(node, (0,)), given(node, (2,))
    if x is None:
        return
    last = len(x.shape) - 1
    for dim in range(last):
        yield from axis(node, {0: dim}, {0: dim})
    made: dict[int, Role] = {0: last}
    yield from axis(node, {1: 0, 2: 0}, made)
    if bias is None:
        yield from axis(node, {0: last, 1: 1}, {0: SUM})


RULES: dict[str, Rule] = {
    "aten.mm": einsum("mk,kn->mn"),
    "aten.bmm": einsum("bmk,bkn->bmn"),
    "aten.addmm": einsum("[mn],mk,kn->mn"),
    "aten.baddbmm": einsum("[bmn],bmk,bkn->bmn"),
    "aten.mv": einsum("mk,k->m"),
    "aten.addmv": einsum("[m],mk,k->m"),
    "aten.dot": einsum("k,k->"),
    "aten.vdot": einsum("k,k->"),
    "aten.addr": einsum("[mn],m,n->mn"),
    "aten.matmul": matmul,
    "aten.linear": linear,
}
