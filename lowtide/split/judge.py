"""What a split takes, and how good a graph is: prices of nodes and loops, and the least time that a first guess finds within limits.

Before a split graph is chosen, none of its parts is measured. A node that is run in parts takes what rates say of a part, as many times as
there are parts, corrected by how right those rates are about the whole node; so small parts cost more than their share, as far as rates
know. A body is priced once for each size of a part, whatever graphs it is in.

Nor is the whole graph written for each size of a part: a body gives its nodes and its peak at any size.

The limits are the same for all graphs that are compared, in even steps from the peak of the program as it stands down to what is resident.
What its parent did best within a limit is a graph's first guess there, what it did best itself one step above is the second.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import product
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from lowtide.cost.bodies import inner_peak_bytes, workspaces_within
from lowtide.cost.device import Device
from lowtide.cost.memory import counted_storages, order_problem, simulate
from lowtide.ir.bodies import Loop, is_loop
from lowtide.ir.graph import Arg, Graph, Node, Storage, Value
from lowtide.ir.shapes.points import Rewriter, sizes_at, sizes_of
from lowtide.ir.sizes import Size
from lowtide.problems.order import Ints, OrderProblem
from lowtide.remat.cost import cost_of
from lowtide.remat.entries import EntryKind
from lowtide.remat.eviction import ScoreWeights, attempt
from lowtide.remat.problem import RematProblem
from lowtide.remat.pruning import prompt

Signature: TypeAlias = tuple[Hashable, ...]


class SizedBody:
    """A body without loops of its own. The nodes of two sizes come before one another alike, and tensors live alike."""

    def __init__(self, loop: Loop) -> None:
        assert isinstance(loop.extent, int)
        self._dimension = replace(loop.body.dimensions[0], most=loop.extent)
        self._body = replace(loop.body, dimensions=(self._dimension,))
        self._symbolic = tuple(dict.fromkeys(size for size in sizes_of(self._body) if not isinstance(size, int)))
        self._written: dict[int, tuple[dict[Size, Size], Rewriter]] = {}

    @cached_property
    def signatures(self) -> tuple[Signature, ...]:
        """By node all that its time depends on, but the size of a part: two that look alike take the same."""
        seen: dict[Value, Signature] = {}
        return tuple(tuple(_signature(node, seen)) for node in self._body.nodes)

    def node(self, place: int, size: int) -> Node:
        return self._at(size)[1].node(self._body.nodes[place])

    def peak_bytes(self, size: int) -> int:
        """The most that a part takes beside what it is given and where its results go."""
        sizes, _ = self._at(size)
        exact = np.array([each if isinstance(each, int) else sizes[each] for each in self._nbytes], np.int64)
        problem = replace(self._problem, tensor_bytes=exact)
        return simulate(problem, range(problem.node_count)).peak_bytes - problem.resident_bytes

    @cached_property
    def _nbytes(self) -> tuple[Size, ...]:
        return tuple(storage.nbytes for storage in counted_storages(self._body))

    @cached_property
    def _problem(self) -> OrderProblem:
        graph: Graph = self._at(self._dimension.most)[1].graph(self._body)
        return order_problem(graph)

    def _at(self, size: int) -> tuple[dict[Size, Size], Rewriter]:
        """The numbers that sizes are in such a part, and what writes nodes with them."""
        if size not in self._written:
            numbers = sizes_at(self._symbolic, self._body.dimensions, {self._dimension.name: size})
            sizes: dict[Size, Size] = dict(zip(self._symbolic, numbers, strict=True))
            self._written[size] = sizes, Rewriter(sizes)
        return self._written[size]


def _signature(node: Node, seen: dict[Value, Signature]) -> Iterator[Hashable]:
    yield node.op
    for arg in (*node.args, *node.kwargs):
        yield _signature_of(arg, seen)
    for value in node.outputs:
        yield None if value is None else _signature_of(value, seen)


def _signature_of(arg: Arg, seen: dict[Value, Signature]) -> Hashable:
    """An argument without its name; a number with its type, as 1 and 1.0 and True are equal."""
    if isinstance(arg, Value):
        if arg not in seen:
            seen[arg] = arg.dtype, arg.shape, arg.stride
        return seen[arg]
    if isinstance(arg, tuple):
        return tuple(_signature_of(each, seen) for each in arg)
    return type(arg), arg


_WHOLE = "_whole_v1"  # what a loop's body calls its place in a result


class Prices:
    """Microseconds and workspaces of a graph's nodes, and of loops made of them."""

    def __init__(self, graph: Graph, node_us: Sequence[float], workspace_bytes: Sequence[int], rates: Device) -> None:
        self._rates = rates
        self._us = {_name(node): us for node, us in zip(graph.nodes, node_us, strict=True)}
        self._workspaces = {_name(node): nbytes for node, nbytes in zip(graph.nodes, workspace_bytes, strict=True)}
        self._times = {_name(node): us / rated for node, us in zip(graph.nodes, node_us, strict=True) if (rated := rates.node_us(node))}
        self._bodies: dict[tuple[int, int], tuple[float, float]] = {}
        self._sized: dict[int, tuple[tuple[Node, ...], SizedBody | None]] = {}  # by the identity of a body's nodes; None where it has loops
        self._rated: dict[tuple[Signature, int], float] = {}  # what nodes take by rates, by their signatures and the size of a part
        self._wholes: dict[int, tuple[Sequence[Node], float]] = {}  # by identity

    def us(self, graph: Graph) -> list[float]:
        return [self._loop(node)[0] if is_loop(node) else self._of(node) for node in graph.nodes]

    def workspace_bytes(self, graph: Graph) -> list[int]:
        """By node, beside its arguments and results; of a loop what its largest part makes, without operators' own workspaces."""
        return [self._loop(node)[1] if is_loop(node) else self._workspaces.get(_name(node), 0) for node in graph.nodes]

    def extra_us(self, nodes: Sequence[Node], loop: Node) -> float:
        """What a loop takes longer than its nodes by themselves."""
        key = id(nodes)
        if key not in self._wholes:
            self._wholes[key] = nodes, sum(map(self._of, nodes))
        return self._loop(loop)[0] - self._wholes[key][1]

    def _of(self, node: Node) -> float:
        known = self._us.get(_name(node))
        return self._rates.node_us(node) if known is None else known

    def _loop(self, node: Node) -> tuple[float, int]:
        loop = Loop.of(node)
        parts = [(self._body(loop, size), count) for size, count in loop.sizes]
        return sum(us * count for (us, _), count in parts), int(max(nbytes for (_, nbytes), _ in parts))

    def _body(self, loop: Loop, size: int) -> tuple[float, float]:
        nodes = loop.body.nodes
        if id(nodes) not in self._sized:
            self._sized[id(nodes)] = nodes, None if any(map(is_loop, nodes)) else SizedBody(loop)
        if (id(nodes), size) not in self._bodies:
            sized = self._sized[id(nodes)][1]
            self._bodies[id(nodes), size] = self._nested(loop, size) if sized is None else self._plain(nodes, sized, size)
        return self._bodies[id(nodes), size]

    def _plain(self, nodes: Sequence[Node], body: SizedBody, size: int) -> tuple[float, float]:
        us = 0.0
        for place, (node, spec) in enumerate(zip(nodes, body.signatures, strict=True)):
            if (rated := self._rated.get((spec, size))) is None:
                rated = self._rated[spec, size] = self._rates.node_us(body.node(place, size))
            us += rated * self._time(node)
        return us, float(body.peak_bytes(size))

    def _nested(self, loop: Loop, size: int) -> tuple[float, float]:
        body = loop.at_any(size)
        us = sum(self._loop(node)[0] if is_loop(node) else self._rates.node_us(node) * self._time(node) for node in body.nodes)
        return us, float(inner_peak_bytes(body, workspaces_within(body.nodes)))

    def _time(self, node: Node) -> float:
        """How many times longer than rates say."""
        return self._times.get(_name(node).removesuffix(_WHOLE), 1.0)


def _name(node: Node) -> str:
    """Of what it makes first: nodes are written anew where what they come after is."""
    return node.results[0].name if node.results else node.op


_LEVELS = 16
_RULES = (ScoreWeights(1.0, 1.0, 0.4), ScoreWeights(1.0, 0.5, 1.0), ScoreWeights(1.6, 1.0, 0.4), ScoreWeights(0.5, 0.5, 0.4))
_STORES = ((0.05, 0.2), (0.14, 0.3))  # store_above, store_cap
_LOADS = (0.02, 1.2)  # load_weight, lead
_TRIED = 3  # rules at a limit


@dataclass(frozen=True, eq=False)
class JudgedGraph:
    """A graph, and what it takes within limits."""

    graph: Graph
    problem: RematProblem
    us: NDArray[np.float64]  # [limits] the least time; inf where nothing was found
    rules: tuple[ScoreWeights, ...]  # [limits] by which that was found
    sequences: dict[int, Ints]  # by limit

    def standing(self, limit: int) -> dict[Storage, int]:
        """What stands where a limit's sequence is highest, and its bytes."""
        base, sequence = self.problem.problem, self.sequences[limit]
        place = int(cost_of(self.problem, sequence).footprint_bytes.argmax())
        alive = _alive(self.problem, sequence, place)
        return {storage: int(base.tensor_bytes[index]) for index, storage in enumerate(counted_storages(self.graph)) if index in alive}


class Judge:
    """Compares graphs that compute the same on one machine."""

    def __init__(self, granule_bytes: int, links: Device | None) -> None:
        self._granule_bytes, self._links = granule_bytes, links
        self._limits: NDArray[np.int64] | None = None

    @property
    def limits(self) -> NDArray[np.int64]:
        """The highest first."""
        assert self._limits is not None, "a graph was judged"
        return self._limits

    def of(self, graph: Graph, prices: Prices, parent: JudgedGraph | None = None) -> JudgedGraph:
        """What a graph takes; the first one of all sets the limits."""
        known = order_problem(graph, prices.workspace_bytes(graph), round_to=self._granule_bytes)
        problem = RematProblem.of(graph, prices.us(graph), round_to=self._granule_bytes, swap=self._links, known=known)
        order = prompt(problem, problem.sequence_of(range(len(graph.nodes))))
        limits = self._limits_for(problem, order)
        us, rules, sequences = np.full(len(limits), np.inf), [_RULES[0]] * len(limits), dict[int, Ints]()
        for at, limit in enumerate(limits.tolist()):
            for turn, rule in enumerate(self._guesses(at, rules, parent)):
                if turn == 0 and (cost := cost_of(problem, order)).peak_bytes <= limit:
                    us[at], sequences[at] = cost.time_us, order
                    break
                evicted = attempt(problem, order, limit, rule).result
                if evicted is not None and (took := cost_of(problem, evicted.sequence).time_us) < us[at]:
                    us[at], rules[at], sequences[at] = took, rule, evicted.sequence
            if at and not np.isfinite(us[at - 1 : at + 1]).any():
                break
        return JudgedGraph(graph, problem, np.minimum.accumulate(us[::-1])[::-1], tuple(rules), sequences)

    def _limits_for(self, problem: RematProblem, order: Ints) -> NDArray[np.int64]:
        if self._limits is None:
            top, floor = cost_of(problem, order).peak_bytes, problem.problem.resident_bytes
            self._limits = np.array([top - (top - floor) * step // _LEVELS for step in range(_LEVELS)], np.int64)
        return self._limits

    def _guesses(self, at: int, rules: list[ScoreWeights], parent: JudgedGraph | None) -> list[ScoreWeights]:
        """Rules to try at a limit, the likeliest first."""
        likely = [*([parent.rules[at]] if parent is not None else []), *([rules[at - 1]] if at else [])]
        others = list(self._rules())
        turned = others[at % len(others) :] + others[: at % len(others)]
        return list(dict.fromkeys([*likely, *turned]))[:_TRIED]

    def _rules(self) -> Iterator[ScoreWeights]:
        if self._links is None:
            return iter(_RULES)
        weight, lead = _LOADS
        swapping = (
            replace(rule, store_above=above, store_cap=cap, load_weight=weight, lead=lead)
            for rule, (above, cap) in product(_RULES, _STORES)
        )
        return iter([*swapping, _RULES[0]])


def _alive(problem: RematProblem, sequence: Ints, place: int) -> set[int]:
    """The tensors of which a copy is there while an entry runs."""
    base, codes = problem.problem, problem.codes
    alive, anew = set[int](), set[int]()  # what is read from there on; of what a later entry makes another copy
    for at, entry in enumerate(sequence[place:].tolist()):
        kind, which = codes.read(entry)
        runs = kind is EntryKind.RUN
        copies = base.outputs_of.row(which) if runs else [which] if kind is EntryKind.LOAD else []
        alive.update(tensor for tensor in (base.reads.row(which) if runs else [which]) if tensor not in anew)
        (anew if at else alive).update(copies)
    kept = {tensor for entry in sequence[: place + 1].tolist() if entry < codes.nodes for tensor in base.outputs_of.row(entry)}
    return alive | {tensor for tensor in kept if base.kept[tensor]}
