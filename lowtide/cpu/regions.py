"""What is generated: nodes whose operator, arguments and types a kernel exists for, and a graph in which these are regions.

    takes   a graph, and what describes a body: how many bytes its arena and its constants take
    leaves  the graph with a `fuse.region` in the place of each group of known nodes, or None where nothing is generated

All other nodes are torch's. Groups are convex: a node's number grows by one wherever a path passes from generated nodes to torch's or back,
so that no path leaves a group and comes back. What follows from parameters and constants alone is in the bodies of those regions that read
it, and prepared once.

Results that nobody reads, such as a norm's saved statistics, are none: then kernels need not make them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from lowtide.cpu import expressions
from lowtide.cpu.expressions import name_of
from lowtide.cpu.layout import VIEWS
from lowtide.ir.edges import leading_to, predecessors
from lowtide.ir.graph import Graph, Kind, Node, Storage, Value, arguments
from lowtide.ir.operators.nodes import is_arithmetic, is_random, is_transfer, row_of
from lowtide.ir.operators.row import REGION, Fusion
from lowtide.ir.sizes import ITEM_BYTES, reach

NORMS = ("native_batch_norm", "_native_batch_norm_legit_no_training", "cudnn_batch_norm")
_MOST_DIMENSIONS = 6
_MOST_KEYS = 2**14  # of a softmax: a few rows of them lie on a thread's stack
ATTENTION = "_scaled_dot_product_flash_attention_for_cpu"


def is_given_norm(node: Node) -> bool:
    """Whether this is a batch norm whose statistics are given."""
    if name_of(node) not in NORMS or node.writes or any(value is not None for value in node.outputs[1:]):
        return False
    training = node.args[5] if name_of(node) != "_native_batch_norm_legit_no_training" else False
    return training is False and all(isinstance(arg, Value) for arg in node.args[3:5])


def is_known(node: Node, fixed: Collection[Value]) -> bool:
    """Whether a kernel is generated for a node, where `fixed` values are constants."""
    name = name_of(node)
    results = [value for value in node.outputs if value is not None]
    if not name or not results or node.writes or node.body is not None or node.after:
        return False
    if not all(is_plain(value) for value in (*results, *node.inputs)):
        return False
    if name == "as_strided" and not _is_same(node.inputs[0], results[0]):
        return False
    if name in VIEWS or name == "cat":
        return True
    if name in ("clone", "contiguous") or expressions.is_known(node):
        return all(value.shape == results[0].shape or value.dtype == "float32" for value in node.inputs)
    return name in _KNOWN and _KNOWN[name](node, fixed)


def is_plain(value: Value) -> bool:
    """Whether kernels can read and make a tensor like this."""
    sizes = (*value.shape, *value.stride)
    plain = value.dtype == "float32" and value.storage.device == "cpu" and all(isinstance(size, int) for size in sizes)
    return plain and 0 not in value.shape and 0 < len(value.shape) <= _MOST_DIMENSIONS


def _is_same(value: Value, result: Value) -> bool:
    """Whether a view sees a tensor just as it is; strides along extents of 1 mean nothing."""
    if value.shape != result.shape or value.offset != result.offset:
        return False
    return all(size == 1 or mine == its for size, mine, its in zip(value.shape, value.stride, result.stride, strict=True))


# Over what a mean goes, by the number of dimensions: pixels of an image, places of [batch, places, channels] or [batch, y, x, channels].
AVERAGED = ((4, [2, 3]), (3, [1]), (4, [1, 2]))


def _convolution(node: Node, fixed: Collection[Value]) -> bool:
    a, weight, bias, _, _, _, transposed, *_ = node.args
    if not isinstance(a, Value) or not isinstance(weight, Value) or transposed or node.kwargs:
        return False
    return len(a.shape) == 4 and weight in fixed and (bias is None or bias in fixed)


def _product(node: Node, fixed: Collection[Value]) -> bool:
    weight, bias = node.args[-1], node.args[0] if name_of(node) == "addmm" else None
    if node.kwargs or not isinstance(weight, Value) or weight not in fixed:
        return False
    return bias is None or (bias in fixed and isinstance(bias, Value) and bias.shape == weight.shape[1:])


def _mean(node: Node, fixed: Collection[Value]) -> bool:
    a, dims = node.args[0], node.args[1] if len(node.args) > 1 else None
    if not isinstance(a, Value) or not isinstance(dims, tuple) or node.kwargs:
        return False
    rank = len(a.shape)
    return (rank, sorted(dim % rank for dim in dims if isinstance(dim, int))) in AVERAGED


def _layer_norm(node: Node, fixed: Collection[Value]) -> bool:
    a, shape, gamma, beta, _ = node.args
    given = all(each is None or each in fixed for each in (gamma, beta))
    alone = not any(value is not None for value in node.outputs[1:])
    return isinstance(a, Value) and isinstance(shape, tuple) and len(shape) == 1 and given and alone


def _batch_norm(node: Node, fixed: Collection[Value]) -> bool:
    return is_given_norm(node) and all(value in fixed for value in node.inputs[1:]) and node.inputs[0] not in fixed


def _pool(node: Node, fixed: Collection[Value]) -> bool:
    a = node.args[0]
    return isinstance(a, Value) and len(a.shape) == 4 and not any(value is not None for value in node.outputs[1:]) and not node.kwargs


def _average(node: Node, fixed: Collection[Value]) -> bool:
    """Not where a window that goes beyond the padding (`ceil_mode`) counts places: it counts only some of them."""
    args = [*node.args, *[None] * 7][:7]
    return _pool(node, fixed) and (args[4] is not True or args[5] is False or isinstance(args[6], int))


def _global_pool(node: Node, fixed: Collection[Value]) -> bool:
    return _pool(node, fixed) and node.args[1] == (1, 1)


def _batched(node: Node, fixed: Collection[Value]) -> bool:
    return not node.kwargs and all(isinstance(arg, Value) for arg in node.args)


def _softmax(node: Node, fixed: Collection[Value]) -> bool:
    a, dim = node.args[:2]
    if not isinstance(a, Value) or not isinstance(dim, int) or node.kwargs or any(node.args[2:]):
        return False
    return dim % len(a.shape) == len(a.shape) - 1 and int(a.shape[-1]) <= _MOST_KEYS


def _attention(node: Node, fixed: Collection[Value]) -> bool:
    """Without dropout, without the logarithms that only a gradient reads."""
    args, options = [*node.args, 0.0, False][:5], dict(node.kwargs)
    mask, alone = options.get("attn_mask"), not any(value is not None for value in node.outputs[1:])
    if not set(options) <= {"attn_mask", "scale", "is_causal"} or args[3] != 0.0 or not alone:
        return False
    tensors = [*args[:3], *(() if mask is None else (mask,))]
    if not all(isinstance(each, Value) and len(each.shape) in (2, 4) for each in tensors):
        return False
    query, key, value = (each for each in args[:3] if isinstance(each, Value))
    return query.shape[1] == key.shape[1] == value.shape[1] and int(key.shape[2]) <= _MOST_KEYS


_KNOWN: dict[str, Callable[[Node, Collection[Value]], bool]] = {
    "convolution": _convolution, "addmm": _product, "mm": _product, "mean": _mean, "native_layer_norm": _layer_norm,
    **dict.fromkeys(NORMS, _batch_norm), "max_pool2d_with_indices": _pool, "avg_pool2d": _average, "bmm": _batched, "_softmax": _softmax,
    "_safe_softmax": _softmax, ATTENTION: _attention, "_adaptive_avg_pool2d": _global_pool,
}  # fmt: skip


def following(body: Graph, given: Collection[Value]) -> set[Value]:
    """These values, and all that follow from them alone."""
    values = set(given)
    for node in body.nodes:
        if all(value in values for value in node.inputs):
            values.update(node.results)
    return values


def pruned(graph: Graph) -> Graph:
    """The graph without results that nobody reads; a node that nobody reads anything of stays as it is."""
    read = {value for node in graph.nodes for value in node.inputs} | set(graph.outputs)
    new: dict[Node, Node] = {}
    for node in graph.nodes:
        outputs = tuple(value if value in read else None for value in node.outputs)
        wanted = node if outputs == node.outputs or not any(outputs) else replace(node, outputs=outputs)
        if any(before in new for before in wanted.after):
            wanted = replace(wanted, after=tuple(new.get(before, before) for before in wanted.after))
        if wanted is not node:
            new[node] = wanted
    return replace(graph, nodes=tuple(new.get(node, node) for node in graph.nodes))


_CONSTANT = (Kind.PARAMETER, Kind.BUFFER, Kind.CONSTANT)


class BodyDescription(NamedTuple):
    arena_bytes: int
    packed_bytes: int
    joined: tuple[int, ...]  # the numbers of its blocks


# Of a body and its fixed inputs; None where torch's operators are to run.
Describing = Callable[[Graph, tuple[int, ...]], BodyDescription | None]


def with_regions(graph: Graph, described: Describing) -> Graph | None:
    if graph.dimensions or any(node.body is not None or node.writes or is_transfer(node) for node in graph.nodes):
        return None
    graph = pruned(graph)
    fixed = fixed_values(graph)
    groups = [group for group in _groups(graph, fixed) if any(row_of(node.op).fusion is Fusion.COMPLEX for node in group)]
    whole = graph
    for group in reversed(groups):  # what comes before a group stays as it is
        graph = _replaced(graph, group, fixed, described)
    return None if graph is whole else _without_unread(graph)


def fixed_values(graph: Graph) -> set[Value]:
    """What follows from parameters, buffers and constants alone, none of which the graph writes.

    Operators that refuse some data, as lookups do, keep their order in a graph. What is fixed is computed when constants are prepared.
    """
    written = {before.storage for node in graph.nodes for before, _ in node.writes}
    fixed = {value for value in graph.inputs if value.storage.kind in _CONSTANT and value.storage not in written}
    for node in graph.nodes:
        plain = node.op.startswith(("aten.", "lowtide.")) and not (node.writes or is_random(node) or is_arithmetic(node))
        if plain and all(value in fixed for value in node.inputs) and not any(value.dtype == "scalar" for value in node.results):
            fixed.update(node.results)
    return fixed


def _groups(graph: Graph, fixed: Collection[Value]) -> list[list[Node]]:
    number: list[int] = []
    mine: list[bool | None] = []  # generated; None for what is fixed
    for node, before in zip(graph.nodes, predecessors(graph), strict=True):
        if node.results and all(value in fixed for value in node.results):
            mine.append(None)
            number.append(0)
            continue
        generated = is_known(node, fixed) and any(value not in fixed for value in node.inputs)
        number.append(max((number[at] + (mine[at] is not generated) for at in before if mine[at] is not None), default=0))
        mine.append(generated)
    groups: dict[int, list[Node]] = {}
    for node, at, is_mine in zip(graph.nodes, number, mine, strict=True):
        if is_mine:
            groups.setdefault(at, []).append(node)
    return [groups[at] for at in sorted(groups)]


def _replaced(graph: Graph, group: Sequence[Node], fixed: Collection[Value], described: Describing) -> Graph:
    """The graph with one group as a region, which stands where the last of the group stood, and what reads it further down.

    The same graph where the group's body is not to be generated.
    """
    inside = set(group)
    needed = inside | _constants(graph, inside, fixed)
    members = [node for node in graph.nodes if node in needed]
    results_of_members = {value for node in members for value in node.results}
    given = list(dict.fromkeys(value for node in members for value in node.inputs if value not in results_of_members))
    kept = set(graph.outputs) | {value for node in graph.nodes if node not in inside for value in node.inputs}
    results = [value for node in group for value in node.results if value in kept]
    if any(value.offset for node in graph.nodes if node not in inside and _places(node) for value in node.inputs if value in results):
        return graph
    body, places = body_of(members, given, results), tuple(at for at, value in enumerate(given) if value in fixed)
    size = described(body, places)
    if size is None:
        return graph
    names = {value.storage.name for value in (*graph.inputs, *(each for node in graph.nodes for each in node.results))}
    new = {value: _own(value, names) for value in results}
    sizes = (("arena_bytes", size.arena_bytes), ("packed_bytes", size.packed_bytes))
    region = Node(
        REGION,
        tuple(given),
        tuple(new[value] for value in results),
        (("fixed", places), *sizes, ("joined", size.joined)),
        body=body,
        source=group[-1].source,
    )
    nodes = _placed([node for node in graph.nodes if node not in inside], inside, region, new)
    return replace(graph, nodes=tuple(nodes), outputs=tuple(new.get(value, value) for value in graph.outputs))


def _constants(graph: Graph, inside: Collection[Node], fixed: Collection[Value]) -> set[Node]:
    """The nodes that make the constants which a group reads."""
    wanted = {value for node in inside for value in node.inputs if value in fixed}
    return {*leading_to(graph.nodes, wanted, lambda node, is_read: is_read and all(value in fixed for value in node.results))}


def _placed(others: Sequence[Node], inside: Collection[Node], region: Node, new: dict[Value, Value]) -> Iterator[Node]:
    """Nodes in an order that is right: first what need not wait for the region, then the region, then what reads it, or comes after it."""
    later: set[Value] = set()
    late: set[Node] = set()
    for node in others:
        if any(value in new or value in later for value in node.inputs) or any(before in late or before in inside for before in node.after):
            late.add(node)
            later.update(node.results)
    yield from (node for node in others if node not in late)
    yield region
    forward = dict.fromkeys(inside, region)
    for node in (node for node in others if node in late):
        after = tuple(dict.fromkeys(forward.get(before, before) for before in node.after))
        seen = _seen(_with(node, new), node, new)
        forward[node] = seen if after == node.after else replace(seen, after=after)
        yield forward[node]


def _places(node: Node) -> bool:
    """Whether an operator is given where in a storage its result lies, which is another place in a region's own."""
    return node.op.startswith("aten.as_strided")


def _seen(copy: Node, node: Node, new: dict[Value, Value]) -> Node:
    """A node of torch's that reads other values, with results on their storages where it only sees those in another way."""
    at = {value.storage: value for value in node.inputs if value in new}
    for value in node.results:
        if value.storage in at:
            base = at[value.storage]
            new[value] = replace(value, storage=new[base].storage, offset=value.offset - base.offset + new[base].offset, version=0)
    return replace(copy, outputs=tuple(None if each is None else new.get(each, each) for each in copy.outputs))


def _own(value: Value, names: set[str]) -> Value:
    """A result of a region: like a value, on a storage of its own."""
    name = value.name if value.storage.name == value.name or value.name not in names else f"{value.name}_out"
    storage = Storage(name, reach(value.shape, value.stride) * ITEM_BYTES[value.dtype], value.storage.device, value.storage.kind)
    return replace(value, storage=storage, offset=0, version=0)


def body_of(members: Sequence[Node], given: Sequence[Value], results: Sequence[Value]) -> Graph:
    storages: dict[Storage, Storage] = {}
    mine: dict[Value, Value] = {}

    def take(value: Value, kind: Kind) -> None:
        storage = storages.setdefault(value.storage, replace(value.storage, kind=kind))
        mine[value] = replace(value, storage=storage)

    for value in given:
        take(value, Kind.SCALAR if value.storage.kind is Kind.SCALAR else Kind.ARGUMENT)
    nodes = []
    for node in members:
        for value in node.results:
            take(value, Kind.ACTIVATION)
        outputs = tuple(None if each is None else mine[each] for each in node.outputs)
        writes = tuple((mine[before], mine[after]) for before, after in node.writes)
        nodes.append(replace(_with(node, mine), outputs=outputs, writes=writes, inplace=(), after=()))
    return Graph(tuple(mine[value] for value in given), tuple(nodes), tuple(mine[value] for value in results))


def _with(node: Node, new: dict[Value, Value]) -> Node:
    if not any(value in new for value in node.inputs):
        return node
    inplace = tuple((new.get(value, value), op) for value, op in node.inplace)
    return replace(node, inplace=inplace, **arguments(node, lambda value: new.get(value, value)))


def _without_unread(graph: Graph) -> Graph:
    """The graph without constants that only regions read."""

    def stays(node: Node, is_read: bool) -> bool:
        return is_read or bool(node.writes) or not node.results or node.op == REGION or not node.op.startswith("aten.")

    return replace(graph, nodes=tuple(_after_these(leading_to(graph.nodes, graph.outputs, stays))))


def _after_these(nodes: Sequence[Node]) -> Iterator[Node]:
    new: dict[Node, Node] = {}
    for node in nodes:
        after = tuple(new[before] for before in node.after if before in new)
        new[node] = node if after == node.after else replace(node, after=after)
        yield new[node]
