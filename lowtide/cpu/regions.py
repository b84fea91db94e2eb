"""Which nodes are generated, and a graph in which these are regions.

    takes   a graph, and what describes a body: how many bytes its arena and its constants take
    leaves  the graph with a `fuse.region` in the place of each group of known nodes, or None where nothing is generated

Groups are convex: a node's number grows by one wherever a path passes from generated nodes to torch's or back, so that no path leaves a
group and comes back. What follows from parameters and constants alone is in the bodies of those regions that read it, and prepared once.

Results that nobody reads, such as a norm's saved statistics, are none: then kernels need not make them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from lowtide.cpu.known import is_known
from lowtide.ir.edges import predecessors
from lowtide.ir.graph import Graph, Kind, Node, Storage, Value, arguments
from lowtide.ir.operators.nodes import is_arithmetic, is_random, is_transfer
from lowtide.ir.operators.row import REGION, Fusion
from lowtide.ir.operators.table import row_of
from lowtide.ir.sizes import ITEM_BYTES, reach


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
    """What is told of a body."""

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
    nodes: set[Node] = set()
    for node in reversed(graph.nodes):
        if node.results and all(value in fixed for value in node.results) and any(value in wanted for value in node.results):
            nodes.add(node)
            wanted.update(node.inputs)
    return nodes


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
    read = set(graph.outputs)
    nodes: list[Node] = []
    for node in reversed(graph.nodes):
        if (
            node.writes
            or not node.results
            or node.op == REGION
            or any(value in read for value in node.results)
            or not node.op.startswith("aten.")
        ):
            nodes.append(node)
            read.update(node.inputs)
    return replace(graph, nodes=tuple(_after_these(nodes[::-1])))


def _after_these(nodes: Sequence[Node]) -> Iterator[Node]:
    new: dict[Node, Node] = {}
    for node in nodes:
        after = tuple(new[before] for before in node.after if before in new)
        new[node] = node if after == node.after else replace(node, after=after)
        yield new[node]
