"""The rules, a row each, and a graph rewritten by them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple, TypeAlias

from lowtide.ir.graph import Graph, Node
from lowtide.rewrite.algebra.exact import (
    dropout_as_bits,
    gradients_of_scores,
    indices_in_fewer_bytes,
    masks_as_bits,
    places_in_windows,
    rectified_as_bits,
    threshold_before_pooling,
)
from lowtide.rewrite.algebra.rounding import (
    elu_from_result,
    folded_into_convolutions,
    folded_into_products,
    gradient_without_input,
    layer_norm_from_result,
    products_added,
)
from lowtide.rewrite.algebra.uses import Match, Rule, Uses
from lowtide.rewrite.base import Rewritten, replace_nodes

RULES = (
    Rule("dropout's masks as bits", dropout_as_bits),
    Rule("gradients let through before max-pooling's are spread", threshold_before_pooling),
    Rule("max-pooling's indices as places in windows", places_in_windows),
    Rule("rectifiers' results as bits", rectified_as_bits),
    Rule("masks as bits", masks_as_bits),
    Rule("gradients of a cross entropy's scores in one go", gradients_of_scores),
    Rule("indices and labels in fewer bytes", indices_in_fewer_bytes),
    Rule("gradients of ELU from results", elu_from_result, exact=False),
    Rule("gradients of layer norms without a weight from results", layer_norm_from_result, exact=False),
    Rule("gradients of what convolutions read without that", gradient_without_input, exact=False),
    Rule("products added as they are made", products_added, exact=False),
    Rule("batch norms folded into convolutions", folded_into_convolutions, exact=False),
    Rule("batch norms folded into linear layers", folded_into_products, exact=False),
)


Wanted: TypeAlias = Callable[[Rule, Match], bool]


class Applied(NamedTuple):
    """One rule at one place."""

    rule: Rule
    place: Match


@dataclass(frozen=True)
class Algebra(Rewritten):
    """A graph rewritten by rules, and where they fitted."""

    applied: tuple[Applied, ...]


def rewrite(graph: Graph, rules: Sequence[Rule] = RULES, wanted: Wanted = lambda rule, place: True) -> Algebra:
    """Every rule in turn, at all places that are wanted; no node is rewritten by two places of one rule."""
    applied: list[Applied] = []
    forward: dict[Node, tuple[Node, ...]] = {}
    for rule in rules:
        places = list(_apart(place for place in rule.matches(Uses(graph)) if wanted(rule, place)))
        done = replace_nodes(graph, {node: new for place in places for node, new in place.instead.items()})
        applied += [Applied(rule, place) for place in places]
        forward = {node: tuple(last for each in new for last in done.forward.get(each, (each,))) for node, new in forward.items()}
        forward |= {node: new for node, new in done.forward.items() if node not in forward}
        graph = done.graph
    return Algebra(graph, forward, tuple(applied))


def _apart(places: Iterable[Match]) -> Iterator[Match]:
    """Those that touch no node which one before them touches."""
    touched: set[Node] = set()
    for place in places:
        if touched.isdisjoint(place.instead):
            touched.update(place.instead)
            yield place
