"""Edges: which nodes must come before which, found from the values alone; which numbers belong together, and an order for what waits.

    data     a node comes after the node that makes a value it reads (one that writes a value reads it)
    hazard   a node that reads version k of a storage comes after the writer of k and before the writer of k + 1; writers in turn
    control  a node comes after every node in its `after`

Any order of the nodes that keeps to these edges computes the same. Outputs of the graph make no edge.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from graphlib import TopologicalSorter
from heapq import heapify, heappop, heappush
from typing import TypeAlias

from lowtide.errors import CheckError
from lowtide.ir.graph import Graph, Node, Storage, Value

_Version: TypeAlias = "tuple[Storage, int]"


def predecessors(graph: Graph) -> tuple[tuple[int, ...], ...]:
    """For each node index the sorted, distinct indices of the nodes that must come before it; in time linear in nodes and reads.

    Raises CheckError naming the node: a value that no node makes and that is no input, a value or version made twice, or a control
    edge to a node that the graph lacks.
    """
    reads = [_reads(node) for node in graph.nodes]
    before = _data_and_control(graph, reads)
    for earlier, later in _hazards(graph, reads):
        before[later].add(earlier)
    for index, nodes in enumerate(before):
        nodes.discard(index)  # a writer reads the version that it ends
    return tuple(tuple(sorted(nodes)) for nodes in before)


def _data_and_control(graph: Graph, reads: list[tuple[Value, ...]]) -> list[set[int]]:
    """By node, the makers of what it reads and the nodes of its control edges."""
    makers = _makers(graph)
    index_of = {node: index for index, node in enumerate(graph.nodes)}
    before: list[set[int]] = []
    for index, node in enumerate(graph.nodes):
        predecessors = set()
        for value in reads[index]:
            if value not in makers:
                expectation = "expected an input of the graph or a result of a node"
                raise CheckError(f"{_name(index, node)} reads {value.name}: {expectation}, got a value that is neither")
            predecessors.add(makers[value])
        for other in node.after:
            if other not in index_of:
                raise CheckError(f"{_name(index, node)} comes after {other.op}: expected a node of this graph, got one outside of it")
            predecessors.add(index_of[other])
        predecessors.discard(_INPUT)
        before.append(predecessors)
    return before


def _hazards(graph: Graph, reads: list[tuple[Value, ...]]) -> list[tuple[int, int]]:
    """Pairs (earlier, later) around every write."""
    writers = _writers(graph)
    written = {storage for storage, _ in writers}
    readers: defaultdict[_Version, list[int]] = defaultdict(list)
    for index, values in enumerate(reads):
        for value in values:
            if value.storage in written:
                readers[value.storage, value.version].append(index)
    edges: list[tuple[int, int]] = []
    for (storage, version), (writer, before) in writers.items():
        edges += [(writer, reader) for reader in readers[storage, version]]
        edges += [(reader, writer) for reader in readers[storage, before]]
        if (storage, before) in writers:
            edges.append((writers[storage, before][0], writer))
    return edges


_INPUT = -1  # the maker of what is there from the start


def _makers(graph: Graph) -> dict[Value, int]:
    makers = dict.fromkeys(graph.inputs, _INPUT)
    for index, node in enumerate(graph.nodes):
        for value in node.results:
            if value in makers:
                raise CheckError(f"{_name(index, node)} makes {value.name}: expected a new value, got an input or one made already")
            makers[value] = index
    return makers


def _writers(graph: Graph) -> dict[_Version, tuple[int, int]]:
    """The node that makes each version of each storage that is written, and the version that it ends, which need not be the one before."""
    writers: dict[_Version, tuple[int, int]] = {}
    for index, node in enumerate(graph.nodes):
        for before, after in node.writes:
            version = (after.storage, after.version)
            if version in writers:
                statement = f"makes version {after.version} of {after.storage.name}"
                raise CheckError(
                    f"{_name(index, node)} {statement}: expected the next version, got one that node {writers[version][0]} makes"
                )
            writers[version] = (index, before.version)
    return writers


def _reads(node: Node) -> tuple[Value, ...]:
    """The values that a node needs to be there: its inputs and what it writes over."""
    return node.inputs if not node.writes else (*node.inputs, *(before for before, _ in node.writes))


def leading_to(
    nodes: Sequence[Node], wanted: Iterable[Value], takes: Callable[[Node, bool], bool] = lambda node, is_read: is_read
) -> list[Node]:
    """The nodes that lead to these values, in their order. `takes` decides on each, and is told whether what it makes is read."""
    read, taken = set(wanted), list[Node]()
    for node in reversed(nodes):
        if takes(node, any(value in read for value in node.results)):
            read.update(node.inputs)
            taken.append(node)
    return taken[::-1]


def _name(index: int, node: Node) -> str:
    where = f" at {node.source.file}:{node.source.line}" if node.source is not None else ""
    return f"node {index} ({node.op}){where}"


def connected(count: int, joined: Iterable[Sequence[int]]) -> list[int]:
    """For each number below `count` the component that it is in, from 0 as they are met; numbers that are joined are in one."""
    leader = list(range(count))

    def find(number: int) -> int:
        while leader[number] != number:
            leader[number] = leader[leader[number]]
            number = leader[number]
        return number

    for numbers in joined:
        leaders = set(map(find, numbers))
        for each in leaders:
            leader[each] = min(leaders)
    names: dict[int, int] = {}
    return [names.setdefault(find(number), len(names)) for number in range(count)]


def in_turn(waits: Mapping[int, Iterable[int]], turn: Mapping[int, int] | Sequence[int]) -> Iterator[int]:
    """Items behind those that they wait for, otherwise by their turns. Raises graphlib.CycleError where they wait for one another."""
    sorter = TopologicalSorter(waits)
    sorter.prepare()
    ready = [(turn[item], item) for item in sorter.get_ready()]
    heapify(ready)
    while ready:
        item = heappop(ready)[1]
        yield item
        sorter.done(item)
        for other in sorter.get_ready():
            heappush(ready, (turn[other], other))
