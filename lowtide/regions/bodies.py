"""A graph with clusters as regions that another compiler runs.

takes   a graph, its clusters, and how many bytes the compiled body of each takes while it runs; None where torch's operators are to run
leaves  the graph with a `fuse.region` in the place of each, or None where there is none
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from heapq import heapify, heappop, heappush

from lowtide.cpu.regions import body_of
from lowtide.ir.bodies import INDUCTOR
from lowtide.ir.edges import predecessors
from lowtide.ir.graph import Graph, Node, Storage, Value, arguments
from lowtide.ir.operators.names import REGION
from lowtide.regions.clusters import Cluster


@dataclass(frozen=True, eq=False)
class Compiled:
    """A cluster, what it is given, and its body."""

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
    waits: dict[Node | int, set[Node | int]] = {item: set() for item in place}
    for item, before in zip(items, predecessors(graph), strict=True):
        own = clusters[item].outside if isinstance(item, int) else ()
        waits[item].update(items[each] for each in before if items[each] != item and graph.nodes[each] not in own)
    later: dict[Node | int, list[Node | int]] = {item: [] for item in place}
    for item, before_it in waits.items():
        for each in before_it:
            later[each].append(item)
    at, order = {number: item for item, number in place.items()}, list[Node | int]()
    ready = [place[item] for item, before_it in waits.items() if not before_it]
    heapify(ready)
    while ready:
        item = at[heappop(ready)]
        order.append(item)
        for each in later[item]:
            waits[each].discard(item)
            if not waits[each]:
                heappush(ready, place[each])
    return order


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
            node, source=None, **arguments(node, new),
            outputs=tuple(None if value is None else new(value) for value in node.outputs),
            writes=tuple((new(before), new(after)) for before, after in node.writes),
        )
        for node in body.nodes
    )  # fmt: skip
    return Graph(inputs, nodes, tuple(map(new, body.outputs)))
