"""Which nodes of a step are one kernel: connected simple operators between complex ones.

    takes   a graph
    leaves  clusters, in each the nodes in program order; with each as one node the graph has no cycles

A node's number, counted from the end, is how often a path to the end passes between simple operators and others, or from one simple
operator to another by a hazard or control edge alone. Simple operators of one number that data connect are a component: a path that leaves
one passes on to smaller numbers, and never comes back. Counted from the end, a weight's decay is beside the rest of its update, and the sum
that is a bias's gradient beside that of the bias, not where their arguments come from. What is too long for one kernel is cut in program
order.

Views at the end of a cluster stay outside: what a cluster makes lies on storages of its own. A view that is read on both sides is on both.

And the graph in which these clusters are regions that another compiler runs.

takes   a graph, its clusters, and how many bytes the compiled body of each takes while it runs; None where torch's operators are to run
leaves  the graph with a `fuse.region` in the place of each, or None where there is none
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

from lowtide.cpu.regions import body_of
from lowtide.ir.bodies import INDUCTOR
from lowtide.ir.edges import connected, in_turn, predecessors
from lowtide.ir.graph import Graph, Node, Storage, Value, arguments
from lowtide.ir.operators.nodes import functional_base, is_random, is_view, row_of, writes_in_place
from lowtide.ir.operators.row import REGION

_MOST_NODES = 64  # of a cluster
_FEWEST = 2  # that compute
_LEAST_ELEMENTS = 1024  # of the largest tensor: of what is smaller a call takes longer than the work
_NORM = "aten.native_batch_norm"


@dataclass(frozen=True, eq=False)
class Cluster:
    nodes: tuple[Node, ...]  # that it computes, in program order
    outside: frozenset[Node]  # those of them, views, that are outside, too
    results: tuple[Value, ...]  # that others read


def clusters(graph: Graph) -> list[Cluster]:
    """All that are worth a kernel; of a graph over dimensions none."""
    if graph.dimensions:
        return []
    readers = _readers(graph)
    pieces = (piece for group in components(graph) for piece in _pieces(group))
    return [cluster for piece in pieces if (cluster := _cluster_of(piece, readers, graph)) is not None and _is_worthwhile(cluster)]


def is_simple(node: Node) -> bool:
    """Whether a node can be among those of a cluster."""
    if not row_of(node.op).fusible or node.body is not None or is_random(node) or not (node.results or node.writes):
        return False
    values = [*node.inputs, *node.results]
    if any(value.dtype == "scalar" for value in values) and not row_of(node.op).scaled:
        return False
    tensors = [value for value in values if value.dtype != "scalar"]
    return all(map(_is_plain, tensors)) and len({value.storage.device for value in tensors}) == 1 and _writes_plainly(node)


def _is_plain(value: Value) -> bool:
    sizes = (*value.shape, *value.stride, value.offset)
    return all(isinstance(size, int) for size in sizes) and 0 not in value.shape and not value.dtype.startswith(("complex", "float8"))


def _writes_plainly(node: Node) -> bool:
    """Whether a node writes its first argument in place, or a norm's statistics, or nothing."""
    if not node.writes or functional_base(node.op) == _NORM:
        return True
    return writes_in_place(node.op) and len(node.writes) == 1 and node.writes[0][0] is node.args[0]


def components(graph: Graph) -> list[list[Node]]:
    """Connected simple nodes of one number and device, in program order."""
    simple, before = [is_simple(node) for node in graph.nodes], predecessors(graph)
    maker = {value: index for index, node in enumerate(graph.nodes) for value in node.results}
    data = [{maker[value] for value in node.inputs if value in maker} for node in graph.nodes]
    number = [0] * len(graph.nodes)
    for later in range(len(graph.nodes) - 1, -1, -1):
        for each in before[later]:
            passes = each not in data[later] if simple[each] and simple[later] else simple[each] or simple[later]
            number[each] = max(number[each], number[later] + passes)

    def together(each: int, later: int) -> bool:
        same = simple[each] and simple[later] and number[each] == number[later]
        return same and _device(graph.nodes[each]) == _device(graph.nodes[later])

    joined = ((each, later) for later, given in enumerate(data) for each in given if together(each, later))
    groups: dict[int, list[Node]] = {}
    for index, component in enumerate(connected(len(graph.nodes), joined)):
        if simple[index]:
            groups.setdefault(component, []).append(graph.nodes[index])
    return list(groups.values())


def _device(node: Node) -> str:
    return next(value.storage.device for value in (*node.results, *node.inputs) if value.dtype != "scalar")


def _pieces(group: Sequence[Node]) -> Iterator[list[Node]]:
    """A component in program order, cut where it is too long: later pieces read what earlier ones make, never the other way round."""
    count = -(-len(group) // _MOST_NODES)
    size = -(-len(group) // count)
    yield from (list(group[start : start + size]) for start in range(0, len(group), size))


def _readers(graph: Graph) -> dict[Value, list[Node]]:
    readers: dict[Value, list[Node]] = {}
    for node in graph.nodes:
        for value in (*node.inputs, *(before for before, _ in node.writes)):
            readers.setdefault(value, []).append(node)
    return readers


def _cluster_of(piece: Sequence[Node], readers: dict[Value, list[Node]], graph: Graph) -> Cluster | None:
    """The cluster of these nodes; None where something is written that is seen in several ways, or of which a version between is read."""
    inside, kept, outside = set(piece), set(graph.outputs), set[Node]()

    def is_read(value: Value) -> bool:
        return value in kept or any(node not in inside or node in outside for node in readers.get(value, ()))

    for node in reversed(piece):
        if is_view(node) and any(map(is_read, node.results)):
            outside.add(node)
    nodes = _needed(piece, outside, readers)
    results = tuple(value for node in nodes if node not in outside for value in node.outputs if value is not None and is_read(value))
    return Cluster(tuple(nodes), frozenset(outside), results) if _writes_allow_fusion(nodes, is_read) else None


def _needed(nodes: Sequence[Node], outside: Collection[Node], readers: dict[Value, list[Node]]) -> list[Node]:
    """Without views that are outside and that nothing inside needs."""
    members, needed = set(nodes), list[Node]()
    for node in reversed(nodes):
        if node in outside and not any(reader in members for value in node.results for reader in readers.get(value, ())):
            members.discard(node)
        else:
            needed.append(node)
    return needed[::-1]


def _writes_allow_fusion(nodes: Sequence[Node], is_read: Callable[[Value], bool]) -> bool:
    """Whether each storage that is written is seen in one way, and left as its last version alone."""
    results = {value for node in nodes for value in node.results}
    written = {before.storage for node in nodes for before, _ in node.writes}
    seen = {value for node in nodes for value in node.inputs if value.storage in written and value not in results}
    last = {after.storage: after for node in nodes for _, after in node.writes}
    between = [after for node in nodes for _, after in node.writes if last[after.storage] is not after]
    views = [value for value in results if value.storage in written and value not in {after for node in nodes for _, after in node.writes}]
    return len({value.storage for value in seen}) == len(seen) and not views and not any(map(is_read, between))


def _is_worthwhile(cluster: Cluster) -> bool:
    computing = [node for node in cluster.nodes if not is_view(node)]
    largest = max((prod(int(size) for size in value.shape) for node in computing for value in (*node.inputs, *node.results)), default=0)
    return len(computing) >= _FEWEST and largest >= _LEAST_ELEMENTS


@dataclass(frozen=True, eq=False)
class Compiled:
    cluster: Cluster
    given: tuple[Value, ...]
    body: Graph

    @classmethod
    def of(cls, cluster: Cluster) -> Compiled:
        results = {value for node in cluster.nodes for value in node.results}
        read = (value for node in cluster.nodes for value in (*node.inputs, *(before for before, _ in node.writes)))
        given = tuple(dict.fromkeys(value for value in read if value not in results))
        return cls(cluster, given, body_of(cluster.nodes, given, cluster.results))

    def region(self, workspace_bytes: int) -> Node:
        """The node in the cluster's place, without its control edges."""
        first: dict[Storage, Value] = {}
        last: dict[Storage, Value] = {}
        for before, after in (pair for node in self.cluster.nodes for pair in node.writes):
            first.setdefault(before.storage, before)
            last[after.storage] = after
        options = (("fixed", ()), ("arena_bytes", workspace_bytes), ("packed_bytes", 0), ("by", INDUCTOR))
        writes = tuple((value, last[storage]) for storage, value in first.items())
        source = self.cluster.nodes[-1].source
        return Node(REGION, self.given, self.cluster.results, options, writes=writes, body=self.body, source=source)


def with_compiled(graph: Graph, chosen: Sequence[tuple[Compiled, int]]) -> Graph | None:
    """The graph with these as regions, each with the bytes that it takes while it runs."""
    if not chosen:
        return None
    group = {node: at for at, (each, _) in enumerate(chosen) for node in each.cluster.nodes if node not in each.cluster.outside}
    new: dict[Node | int, Node] = {}
    for item in _in_order(graph, group, [each.cluster for each, _ in chosen]):
        before = [group.get(node, node) for member in _members(item, chosen, group) for node in member.after]
        after = tuple(dict.fromkeys(new[each] for each in before if each != item))
        region = chosen[item][0].region(chosen[item][1]) if isinstance(item, int) else item
        new[item] = region if after == region.after else replace(region, after=after)
    return replace(graph, nodes=tuple(new.values()))


def _members(item: Node | int, chosen: Sequence[tuple[Compiled, int]], group: dict[Node, int]) -> list[Node]:
    return [node for node in chosen[item][0].cluster.nodes if node in group] if isinstance(item, int) else [item]


def _in_order(graph: Graph, group: dict[Node, int], clusters: Sequence[Cluster]) -> list[Node | int]:
    """Nodes and numbers of groups in an order that is right, near to the graph's. For a view that it has, too, a group does not wait."""
    items: list[Node | int] = [group.get(node, node) for node in graph.nodes]
    place = {item: at for at, item in enumerate(items)}
    waits: dict[int, set[int]] = {at: set() for at in place.values()}
    for item, before in zip(items, predecessors(graph), strict=True):
        own = clusters[item].outside if isinstance(item, int) else ()
        waits[place[item]].update(place[items[each]] for each in before if items[each] != item and graph.nodes[each] not in own)
    return [items[at] for at in in_turn(waits, range(len(items)))]


def numbered(body: Graph) -> Graph:
    """The same with numbers as names, so that bodies that compute the same are written alike."""
    storages: dict[Storage, Storage] = {}
    values: dict[Value, Value] = {}

    def new(value: Value) -> Value:
        if value not in values:
            storage = storages.setdefault(value.storage, replace(value.storage, name=f"s{len(storages)}"))
            values[value] = replace(value, name=f"v{len(values)}", storage=storage)
        return values[value]

    inputs = tuple(map(new, body.inputs))
    nodes = tuple(
        replace(
            node,
            source=None,
            **arguments(node, new),
            outputs=tuple(None if value is None else new(value) for value in node.outputs),
            writes=tuple((new(before), new(after)) for before, after in node.writes),
        )
        for node in body.nodes
    )
    return Graph(inputs, nodes, tuple(map(new, body.outputs)))
