"""Graphs rewritten by algebra: which are candidates, at what cost in time, and what a plan says of them.

Rules replace operators by others, which take time of their own: less where they move fewer bytes, more where they have to find again what
was left out. So a graph has up to two rewritten ones beside it: one with every rule wherever it fits, and one with as many places as take
no longer together than what they replace. Where nothing may cost time, a graph that takes longer than the captured one is no candidate.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from math import inf
from typing import NamedTuple, TypeAlias

import numpy as np

from lowtide.ir.graph import Graph, Kind, Node, Storage
from lowtide.ir.sizes import Size
from lowtide.plan.contents import Contents
from lowtide.plan.cost_report import RuleReport
from lowtide.plan.promises import lives
from lowtide.rewrite import exact, rounding
from lowtide.rewrite.alignment import is_product, products_padded
from lowtide.rewrite.base import Match, Rewritten, Rule, Uses, replace_nodes

RULES = (
    Rule("dropout's masks as bits", exact.dropout_as_bits),
    Rule("gradients let through before max-pooling's are spread", exact.threshold_before_pooling),
    Rule("max-pooling's indices as places in windows", exact.places_in_windows),
    Rule("rectifiers' results as bits", exact.rectified_as_bits),
    Rule("masks as bits", exact.masks_as_bits),
    Rule("gradients of a cross entropy's scores in one go", exact.gradients_of_scores),
    Rule("indices and labels in fewer bytes", exact.indices_in_fewer_bytes),
    Rule("gradients of ELU from results", rounding.elu_from_result, exact=False),
    Rule("gradients of layer norms without a weight from results", rounding.layer_norm_from_result, exact=False),
    Rule("gradients of what convolutions read without that", rounding.gradient_without_input, exact=False),
    Rule("products added as they are made", rounding.products_added, exact=False),
    Rule("batch norms folded into convolutions", rounding.folded_into_convolutions, exact=False),
    Rule("batch norms folded into linear layers", rounding.folded_into_products, exact=False),
    (ALIGNMENT := Rule("products padded to rows that tensor cores read", products_padded, exact=False)),
)


Wanted: TypeAlias = Callable[[Rule, Match], bool]


class Applied(NamedTuple):
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


_Key: TypeAlias = "tuple[str, str]"  # a rule, and the storage that was held where it fitted
TimesOf: TypeAlias = Callable[[Sequence[Node], Sequence[Node]], Sequence[float]]  # microseconds of nodes, among those of their graph


@dataclass(frozen=True)
class AppliedRule:
    """One rule at one place, as a plan tells it."""

    rule: str
    storage: Storage
    now: Storage | None  # what is held in its place
    beside: tuple[Storage, ...]  # what was held with it
    until: frozenset[str]  # what the nodes make, by name, for which it was held
    cost_us: float

    @property
    def key(self) -> _Key:
        """What tells it from others, at other points of a graph's dimensions, too."""
        return self.rule, self.storage.name

    def at(self, number: Callable[[Size], int]) -> AppliedRule:
        """The same at a point, where sizes are these numbers."""

        def there(storage: Storage) -> Storage:
            return replace(storage, nbytes=number(storage.nbytes))

        now = None if self.now is None else there(self.now)
        return replace(self, storage=there(self.storage), now=now, beside=tuple(map(there, self.beside)))

    @property
    def saved_bytes(self) -> int:
        saved = sum(each.nbytes for each in (self.storage, *self.beside)) - (self.now.nbytes if self.now is not None else 0)
        assert isinstance(saved, int), "rules rewrite graphs of numbers"
        return saved


@dataclass(frozen=True, eq=False)
class Rewriting:
    """A graph rewritten by rules, with what they did."""

    graph: Graph
    applied_rules: tuple[AppliedRule, ...]
    exact: bool

    @property
    def is_padded(self) -> bool:
        return any(each.rule == ALIGNMENT.name for each in self.applied_rules)

    @property
    def costs_time(self) -> bool:
        """Whether it takes longer than the graph that was rewritten."""
        return sum(applied_rule.cost_us for applied_rule in self.applied_rules) > 0


def rewritings(graph: Graph, times_of: TimesOf, *, exact: bool) -> Iterator[Rewriting]:
    """The graph rewritten wherever a rule fits; then where that takes no longer. `exact`: only by rules that are.

    Padding holds more for a while, and spares time: so the last of these comes once more with its products padded.
    """
    last = Rewriting(graph, (), exact=True)
    for rules in (_rules(True),) if exact else (_rules(True), _rules(False)):
        whole = rewrite(graph, rules)
        if not whole.applied or all(rule.exact for rule, _ in whole.applied) != rules[-1].exact:
            continue
        cost_us = _costs(graph, whole, times_of)
        yield (last := _of(whole, cost_us))
        paid = _paid(whole, cost_us)
        if paid and len(paid) < len(cost_us):
            yield (last := _of(_rewritten_at(graph, paid, rules), cost_us))
    if not exact and (spared := _alignments(last.graph, times_of)):
        yield rewritten_with(graph, {each.key: each.cost_us for each in last.applied_rules} | spared)


def _alignments(graph: Graph, times_of: TimesOf) -> dict[_Key, float]:
    """Where padding spares time, and what it costs there, which is less than nothing."""
    whole = rewrite(graph, (ALIGNMENT,))
    return {key: us for key, us in _costs(graph, whole, times_of).items() if us < 0} if whole.applied else {}


def aligned(graph: Graph, times_of: TimesOf) -> Graph:
    """The graph with its products padded where that spares time; the same one where it spares none."""
    spared = _alignments(graph, times_of)
    return _rewritten_at(graph, spared, (ALIGNMENT,)).graph if spared else graph


def aligned_as(graph: Graph, other: Graph) -> Graph:
    """The graph with those products padded that are padded in another one, which was made of such a graph."""
    padded = {_product_key(node) for node in other.nodes if is_product(node)}
    return rewrite(graph, (ALIGNMENT,), lambda _, place: padded.issuperset(map(_product_key, filter(is_product, place.added)))).graph


def _product_key(node: Node) -> tuple[object, ...]:
    return node.op, node.results[0].name, tuple(value.shape for value in node.inputs)


def over_dimensions(graph: Graph, at_point: Rewriting) -> Rewriting | None:
    """A graph over dimensions as it was rewritten at a point of them; None where what was done there does not hold for all of them.

    Nor where products are padded: which ones have to be, and by how much, is another matter at each point.
    """
    if at_point.is_padded:
        return None
    rewriting = rewritten_with(graph, {each.key: each.cost_us for each in at_point.applied_rules})
    return rewriting if len(rewriting.applied_rules) == len(at_point.applied_rules) else None


def rewritten_with(graph: Graph, cost_us: Mapping[_Key, float]) -> Rewriting:
    """The graph rewritten by these rules at these places, by the storages that were held there, with what each costs."""
    return _of(_rewritten_at(graph, cost_us), cost_us)


def cost_of_applied(applied_rules: Sequence[AppliedRule], elsewhere: Iterable[Rewriting]) -> float:
    """What the same rules cost where a graph was rewritten at another point, in microseconds; without end where one was not there."""
    cost_us = {each.key: each.cost_us for rewriting in elsewhere for each in rewriting.applied_rules}
    return sum(cost_us.get(each.key, inf) for each in applied_rules)


def rewritten_as(graph: Graph, reports: Sequence[RuleReport]) -> Rewriting:
    """The graph rewritten at the places that a plan tells of."""
    return _of(_rewritten_at(graph, {(report.rule, name) for report in reports for name in report.storages}), {})


def rule_reports(applied_rules: Sequence[AppliedRule], plan: Contents) -> tuple[RuleReport, ...]:
    """What rules did for a plan of a graph that they rewrote."""
    by_rule: defaultdict[str, list[AppliedRule]] = defaultdict(list)
    for applied_rule in applied_rules:
        by_rule[applied_rule.rule].append(applied_rule)
    spared = _spared(applied_rules, plan) if applied_rules else {}
    return tuple(
        RuleReport(
            rule=rule,
            storages=tuple(applied_rule.storage.name for applied_rule in group),
            held_bytes=sum(applied_rule.saved_bytes for applied_rule in group),
            peak_bytes=sum(applied_rule.saved_bytes for applied_rule in group if spared[applied_rule]),
            cost_us=sum(applied_rule.cost_us for applied_rule in group),
        )
        for rule, group in by_rule.items()
    )


def _rules(exact: bool) -> tuple[Rule, ...]:
    """Those that are exact, or all by which less is held, exact ones first."""
    return tuple(rule for rule in RULES if rule.exact or not (exact or rule is ALIGNMENT))


def _key(rule: Rule, place: Match) -> _Key:
    return rule.name, place.storage.name


def _rewritten_at(graph: Graph, keys: Collection[_Key], rules: Sequence[Rule] = RULES) -> Algebra:
    return rewrite(graph, rules, lambda rule, place: _key(rule, place) in keys)


def _costs(graph: Graph, whole: Algebra, times_of: TimesOf) -> Mapping[_Key, float]:
    nodes = list(dict.fromkeys(node for _, place in whole.applied for node in (*place.removed, *place.added)))
    us = dict(zip(nodes, times_of(nodes, (*graph.nodes, *nodes)), strict=True))
    return {
        _key(rule, place): sum(us[node] for node in place.added) - sum(us[node] for node in place.removed) for rule, place in whole.applied
    }


def _paid(whole: Algebra, cost_us: Mapping[_Key, float]) -> set[_Key]:
    """The places that take less time, and of the others those that this pays for: first what takes least for a byte."""
    saved = {_key(*applied): _applied_rule(applied, 0.0).saved_bytes for applied in whole.applied}
    keys: set[_Key] = set()
    total_us = 0.0
    for key in sorted(cost_us, key=lambda each: (max(0.0, cost_us[each]) / max(1, saved[each]), cost_us[each])):
        if total_us + cost_us[key] <= 0:
            keys.add(key)
            total_us += cost_us[key]
    return keys


def _of(done: Algebra, cost_us: Mapping[_Key, float]) -> Rewriting:
    applied_rules = tuple(_applied_rule(applied, cost_us.get(_key(*applied), 0.0)) for applied in done.applied)
    return Rewriting(done.graph, applied_rules, all(rule.exact for rule, _ in done.applied))


def _applied_rule(applied: Applied, cost_us: float) -> AppliedRule:
    rule, place = applied
    late = (value.name for node in place.added for value in node.results if value.storage.kind is not Kind.ACTIVATION)
    return AppliedRule(rule.name, place.storage, place.now, place.beside, frozenset(late), cost_us)


def _spared(applied_rules: Sequence[AppliedRule], plan: Contents) -> dict[AppliedRule, bool]:
    """Whether what was held would be there at the step that would then be the peak, and is not."""
    lives_of_storages = lives(plan)
    ends = {storage.name: (start, end) for storage, (_, start, end) in lives_of_storages.items()}
    made_at = {value.name: step for step, index in enumerate(plan.order) for value in plan.graph.nodes[index].results}
    spans = {applied_rule: _missing(applied_rule, ends, made_at) for applied_rule in applied_rules}
    change = np.zeros(len(plan.order) + 1, np.int64)
    for nbytes, start, end in (*lives_of_storages.values(), *((applied_rule.saved_bytes, *span) for applied_rule, span in spans.items())):
        change[start] += nbytes
        change[end] -= nbytes
    footprints = change.cumsum()[:-1] + np.array([plan.workspace_bytes[index] for index in plan.order], np.int64)
    peak = int(footprints.argmax())
    return {applied_rule: start <= peak < end for applied_rule, (start, end) in spans.items()}


def _missing(applied_rule: AppliedRule, spans: Mapping[str, tuple[int, int]], made_at: Mapping[str, int]) -> tuple[int, int]:
    """The steps `[start, end)` over which it would be held. What is never made would be made just before what it was held for."""
    late = [made_at[name] for name in applied_rule.until if name in made_at]
    if applied_rule.storage.name in spans:
        start = spans[applied_rule.storage.name][1]
    elif applied_rule.now is not None and applied_rule.now.name in spans:
        start = spans[applied_rule.now.name][0]
    else:
        start = min(late, default=0)
    return start, max(start, *(step + 1 for step in late), 0)
