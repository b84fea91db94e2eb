"""What simple operators of the forward pass compute again in the backward pass, where that lets what they made die before.

    takes   a graph
    leaves  a graph of the same numbers up to rounding, of which less is held from the forward to the backward pass

Within a kernel that reads its arguments anyway, to compute again is nearly free. So what is held is chosen by bytes. Of all sets of
storages from which simple operators make what the backward pass reads, the smallest is a minimum cut, as in the partitioner of functorch
(He and Yu, Transcending runtime-memory tradeoffs in checkpointing by being fusion aware, MLSys 2023). To make a storage again costs a share
of its bytes, so that where two choices hold about as much the one with less to compute is taken.

On a CPU one thread takes longer to compute what is no sum or product (an exponential, tanh) than to read it: there is a second choice in
which nothing of that kind runs again.

Operators that draw or write are never repeated. What a norm made is computed from its argument and its statistics, which are held.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from lowtide.ir.edges import leading_to
from lowtide.ir.graph import Arg, Atom, Graph, Kind, Node, Storage, Value, with_values
from lowtide.ir.operators.nodes import functional_base, is_view
from lowtide.problems.order import Rows
from lowtide.regions.clusters import components, is_simple
from lowtide.rewrite.base import Forward, Rewritten, Uses, is_dense, replace_nodes
from lowtide.schedule.cuts import select

_LAYER_NORM, _BATCH_NORM = "aten.native_layer_norm.default", "aten.native_batch_norm.default"
_LEAST_BYTES = 4096  # of what it is worth to make again
_SHARE = 16  # making a storage again costs this part of its bytes
_NEAR = 64  # nodes of the program: operators that are no further apart share what was made again for them
_PHASES = 1000
_SLOW_NAMES = (  # they take a CPU more than twenty operations for an element
    "_log_softmax _softmax acos acosh asin asinh atan atan2 atanh celu cos cosh digamma elu erf erfc erfinv exp exp2 expm1 gelu glu "
    "lgamma log log10 log1p log2 log_sigmoid_forward logaddexp logit logsumexp mish selu sigmoid silu sin sinh softplus tan tanh"
)
_SLOW = frozenset(_SLOW_NAMES.split())
_QUICK_POWERS = (2, 3, 4, -1, -2, 0.5, -0.5)
_AGAIN = "_in_backward"  # within the names of what is made again
_EXACT_TO_FLOAT = frozenset({"float32", "bfloat16", "float16"})  # with float32 they compute in float32


def leaner_graphs(graph: Graph, *, on_gpu: bool) -> list[Graph]:
    """The graphs in which the backward pass makes something again, each once: what holds least first, then what takes a CPU no longer."""
    graphs: dict[frozenset[str], Graph] = {}
    for quickly in (False,) if on_gpu else (False, True):
        leaner = recomputed(graph, quickly=quickly).graph
        again = frozenset(value.name for node in leaner.nodes for value in node.results if _AGAIN in value.name)
        if again:
            graphs.setdefault(again, leaner)
    return list(graphs.values())


def recomputed(graph: Graph, *, quickly: bool = False) -> Rewritten:
    """The graph in which the backward pass makes again what is not worth holding; itself where that is nothing.

    quickly: nothing is made again that takes a CPU longer to compute than to read.
    """
    if graph.dimensions:
        return Rewritten(graph, {})
    uses = Uses(graph)
    recomputations = {storage: each for storage, each in _recomputations(uses).items() if not quickly or each.is_quick}
    chosen = _chosen(uses, recomputations)
    if not chosen:
        return Rewritten(graph, {})
    done = replace_nodes(graph, _Again(uses, {each: recomputations[each] for each in chosen}).instead())
    dropped = frozenset(chosen)  # of whose storages views go that nothing reads any more

    def stays(node: Node, is_read: bool) -> bool:
        return is_read or not is_view(node) or node.results[0].storage not in dropped

    nodes = leading_to(done.graph.nodes, done.graph.outputs, stays)
    return Rewritten(replace(done.graph, nodes=tuple(nodes)), done.forward)


def _is_later(node: Node) -> bool:
    """Whether a node is of the backward pass, or of the update; a norm that writes its statistics is not."""
    return any(value.storage.kind not in (Kind.ACTIVATION, Kind.BUFFER) for value in node.results)


def as_recomputed(graph: Graph, other: Graph) -> Graph:
    """The graph, in which the backward pass makes again what it does where it does so in another one that was made of such a graph."""
    within = (node for each in other.nodes for node in (each, *(each.body.nodes if each.body is not None else ())))
    again = [node for node in within if any(_AGAIN in value.name for value in node.outputs if value is not None)]
    return recomputed(graph, quickly=not any(map(_is_slow, again))).graph if again else graph


def _is_slow(node: Node) -> bool:
    base = functional_base(node.op).removeprefix("aten.")
    return base in _SLOW or (base == "pow" and node.args[1] not in _QUICK_POWERS)


@dataclass(frozen=True, eq=False)
class Recomputation:
    """How one storage of the forward pass is made again."""

    whole: Value  # all of it, as its maker left it
    given: tuple[Value, ...]
    write: Callable[[Uses, Mapping[Value, Value]], list[Node]]  # the nodes; what is given may be something made again. The last makes it
    is_quick: bool = True


def _recomputations(uses: Uses) -> dict[Storage, Recomputation]:
    """For each storage that simple operators make and the backward pass may read, how."""
    backward = [place for place, node in enumerate(uses.graph.nodes) if any(value.storage.kind is Kind.GRADIENT for value in node.results)]
    last = uses.graph.nodes[backward[-1]] if backward else None
    recomputations: dict[Storage, Recomputation] = {}
    for storage, node in uses.makers_of.items():
        if last is None or storage.kind is not Kind.ACTIVATION or storage in uses.kept or is_view(node) or _is_later(node):
            continue
        values = [value for value in node.outputs if value is not None and value.storage is storage]
        recomputation = _recomputation(node, values[0]) if len(values) == 1 and int(storage.nbytes) >= _LEAST_BYTES else None
        if recomputation is not None and not uses.written_between(node, last):
            recomputations[storage] = recomputation
    return recomputations


def _recomputation(node: Node, whole: Value) -> Recomputation | None:
    if node.op in (_LAYER_NORM, _BATCH_NORM):
        return _of_norm(node) if whole is node.outputs[0] else None
    if not is_simple(node) or node.writes or node.after or len(node.results) > 1 or any(value.dtype == "scalar" for value in node.inputs):
        return None

    def write(uses: Uses, now: Mapping[Value, Value]) -> list[Node]:
        return [_with(node, now, {whole: _again(uses, whole)})]

    return Recomputation(whole, node.inputs, write, is_quick=not _is_slow(node))


def _of_norm(node: Node) -> Recomputation | None:
    """(x - mean) * rstd * weight + bias, from the statistics that the norm gave."""
    x, weight, bias = node.args[0], *(node.args[2:4] if node.op == _LAYER_NORM else node.args[1:3])
    result, mean, rstd = node.outputs
    if not isinstance(x, Value) or not isinstance(result, Value) or not isinstance(mean, Value) or not isinstance(rstd, Value):
        return None
    given = [x, mean, rstd, *(each for each in (weight, bias) if isinstance(each, Value))]
    if not (is_dense(x) and result.stride == x.stride and result.shape == x.shape and mean.dtype == rstd.dtype == "float32"):
        return None
    if any(each.dtype not in _EXACT_TO_FLOAT for each in given) or 0 in mean.shape:
        return None
    by_channel = node.op == _BATCH_NORM

    def write(uses: Uses, now: Mapping[Value, Value]) -> list[Node]:
        nodes: list[Node] = []
        value = now.get(x, x)
        for op, arg in (("sub", mean), ("mul", rstd), ("mul", weight), ("add", bias)):
            if not isinstance(arg, Value):
                continue
            arg = now.get(arg, arg)
            if by_channel:
                nodes.append(_by_channel(uses, arg, len(x.shape)))
                arg = nodes[-1].results[0]
            new = uses.fresh_like(result, f"{result.name}{_AGAIN}_{op}", "float32")
            nodes.append(Node(f"aten.{op}.Tensor", (value, arg), (new,), source=node.source))
            value = new
        if value.dtype != result.dtype:
            to = (("dtype", Atom("dtype", result.dtype)),)
            nodes.append(Node("aten._to_copy.default", (value,), (_again(uses, result),), kwargs=to, source=node.source))
        return nodes

    return Recomputation(result, tuple(given), write)


def _by_channel(uses: Uses, value: Value, dimensions: int) -> Node:
    shape = (*value.shape, *(1 for _ in range(dimensions - 2)))
    seen = replace(value, name=uses.name(f"{value.name}{_AGAIN}_by_channel"), shape=shape, stride=(*value.stride, *(1 for _ in shape[1:])))
    return Node("aten.view.default", (value, shape), (seen,))


def _again(uses: Uses, value: Value) -> Value:
    name = uses.name(f"{value.name}{_AGAIN}")
    return replace(value, name=name, storage=replace(value.storage, name=name))


def _with(node: Node, now: Mapping[Value, Value], replaced: Mapping[Value, Value] | None = None) -> Node:
    """A node that reads other values in the place of some. One that makes others, of which it makes no more, works nowhere in place."""

    def new(value: Value) -> Value:
        return now.get(value, value)

    kwargs = tuple((name, with_values(arg, new)) for name, arg in node.kwargs)
    inplace = tuple((new(value), form) for value, form in node.inplace)
    outputs = node.outputs if replaced is None else tuple(None if each is None else replaced.get(each) for each in node.outputs)
    args: tuple[Arg, ...] = tuple(with_values(arg, new) for arg in node.args)
    return replace(node, args=args, kwargs=kwargs, inplace=() if replaced is not None else inplace, outputs=outputs)


def _chosen(uses: Uses, recomputations: Mapping[Storage, Recomputation]) -> list[Storage]:
    """The storages that are made again, in program order: a choice of what to drop, which requires what that is made of, which costs.

    Vertices are storages that are there in the backward pass, at the cost of their bytes where nobody reads them there as it is, and
    storages that are dropped, which gains their bytes.
    """
    storages = [each for each in uses.makers_of if each.kind is Kind.ACTIVATION and each not in uses.kept]
    place = {storage: at for at, storage in enumerate(storages)}
    read = [any(map(_is_later, uses.readers.get(each, ()))) for each in storages]
    cost = [0 if is_read else int(each.nbytes) for each, is_read in zip(storages, read, strict=True)]
    gain, required = [0] * len(storages), [list[int]() for _ in storages]
    dropped = list[Storage]()
    for storage, recomputation in recomputations.items():
        dropped.append(storage)
        cost.append(0)
        gain.append(int(storage.nbytes) - int(storage.nbytes) // _SHARE)
        given = {place[value.storage] for value in recomputation.given if value.storage in place}
        required.append(sorted(given | {place[storage]}))
    _, best = select(*Rows.of(required), np.array(cost, np.int64), np.array(gain, np.int64), _PHASES)
    return [storage for storage, is_dropped in zip(dropped, best[len(storages) :], strict=True) if is_dropped]


@dataclass(frozen=True, eq=False)
class _Again:
    """The nodes that make storages again, before those that read them."""

    uses: Uses
    recomputations: Mapping[Storage, Recomputation]
    copies: dict[tuple[object, Value], Value] = field(default_factory=dict)  # by who shares it

    def instead(self) -> Forward:
        """In the place of each reader: what makes again what it reads, unless another that shares it has that, and the reader."""
        instead: dict[Node, tuple[Node, ...]] = {}
        for node, shares in self._readers():
            nodes: list[Node] = []
            now = {value: self._remade(value, shares, nodes) for value in node.inputs if value.storage in self.recomputations}
            instead[node] = (*nodes, _with(node, now))
        return instead

    def _readers(self) -> Iterator[tuple[Node, object]]:
        """The readers in the backward pass, in program order, each with the group that shares what was made again."""
        group = {node: at for at, nodes in enumerate(components(self.uses.graph)) for node in nodes}
        last, count = -_NEAR, 0
        for place, node in enumerate(self.uses.graph.nodes):
            if is_view(node) or not _is_later(node) or not any(value.storage in self.recomputations for value in node.inputs):
                continue
            if node in group:
                yield node, group[node]
                continue
            count += place - last > _NEAR
            last = place
            yield node, ("others", count)

    def _remade(self, value: Value, shares: object, nodes: list[Node]) -> Value:
        if value.storage not in self.recomputations:
            return value
        if (shares, value) not in self.copies:
            recomputation = self.recomputations[value.storage]
            is_whole = value is recomputation.whole
            copy = self._computed(recomputation, shares, nodes) if is_whole else self._seen(value, shares, nodes)
            self.copies[shares, value] = copy
        return self.copies[shares, value]

    def _computed(self, recomputation: Recomputation, shares: object, nodes: list[Node]) -> Value:
        now = {value: self._remade(value, shares, nodes) for value in recomputation.given}
        nodes += recomputation.write(self.uses, now)
        return nodes[-1].results[0]

    def _seen(self, value: Value, shares: object, nodes: list[Node]) -> Value:
        """What a view shows of what was made again."""
        view = self.uses.makers[value]
        before = next(each for each in view.inputs if each.storage is value.storage)
        under = self._remade(before, shares, nodes)
        seen = replace(value, name=self.uses.name(f"{value.name}{_AGAIN}"), storage=under.storage)
        nodes.append(replace(_with(view, {before: under}, {value: seen}), after=()))
        return seen
