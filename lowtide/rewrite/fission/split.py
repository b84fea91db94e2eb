"""A set of nodes into a loop over parts of one dimension that runs through it (F-Trans: MAGIS, section 4.2).

    takes   a graph; a `Split`: nodes, and along which of its axes each is cut
    leaves  the graph with a node of `fission.loop` in the place of the set, see `ir.loops`; its parts compute what the set does, but that
            sums over the dimension are taken in another order

The paper's constraints: the set is connected; it is convex, so that a loop can take its place; and nothing in it is computed more than
once, so that every node makes something that is cut, or that all parts put together. Beyond the paper, whatever the set writes has to be
cut as well, everywhere in the set alike, since a part must find what the caller had and not what other parts have left; nothing in it draws
random numbers, decides anything or goes to the host.

Views are free. Those of what is shared are taken in each part, and those that others read are taken again outside, of the whole result.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from lowtide.errors import CheckError
from lowtide.ir.edges import predecessors
from lowtide.ir.graph import Graph, Node, Storage, Value
from lowtide.ir.loops import Into
from lowtide.ir.operators.axes.axis import Combine
from lowtide.ir.operators.names import LOOP
from lowtide.ir.operators.nodes import is_view
from lowtide.rewrite.base import Rewritten, following
from lowtide.rewrite.fission.legal import check_set
from lowtide.rewrite.fission.parts import Parts
from lowtide.rewrite.fission.roles import MERGES, Roles, Split, refuse


def split(graph: Graph, wanted: Split, parts: int) -> Rewritten:
    """The graph with a loop of so many parts, of which the last may be smaller; fewer where there are fewer units.

    Raises CheckError saying what is in the way, for a set that cannot be split so.
    """
    inside = set(wanted.nodes)
    wanted = _named(graph, wanted)
    first, last = _span(graph, inside)
    behind = _behind(graph, inside, first)
    roles = Roles.of(wanted)
    check_set(wanted, roles)
    views = _views_for_others(graph, inside)
    loop, *ends = _loop(graph, wanted, roles, parts, views)
    early = [node for index, node in enumerate(graph.nodes[: last + 1]) if node not in inside and index not in behind]
    late = [node for index, node in enumerate(graph.nodes) if node in views or index in behind or (index > last and node not in inside)]
    forward: dict[Node, tuple[Node, ...]] = dict.fromkeys(wanted.nodes, (loop, *ends))
    nodes = [*early, loop, *ends]
    for node in late:
        new = following(node, forward) if node not in inside else replace(node, after=())
        if new is not node:
            forward[node] = (new,) if node not in inside else (loop, new)
        nodes.append(new)
    return Rewritten(replace(graph, nodes=tuple(nodes)), forward)


def _named(graph: Graph, wanted: Split) -> Split:
    """The split with a name for its parts that no dimension around has."""
    name, taken = wanted.part_name if wanted.part_name.isidentifier() else "part", {each.name for each in graph.dimensions}
    while name in taken:
        name = f"{name}_"
    return replace(wanted, part_name=name)


def _span(graph: Graph, inside: set[Node]) -> tuple[int, int]:
    """The places of the set's first and last node."""
    places = [index for index, node in enumerate(graph.nodes) if node in inside]
    if not places or len(places) < len(inside):
        raise CheckError("fission: expected nodes of this graph, at least one")
    return places[0], places[-1]


def _behind(graph: Graph, inside: set[Node], first: int) -> set[int]:
    """The places of other nodes that come after any of the set. Raises CheckError where one of the set comes after such a node."""
    before, found = predecessors(graph), set[int]()
    for index in range(first, len(graph.nodes)):
        node, waits = graph.nodes[index], any(each in found for each in before[index])
        if node in inside and waits:
            refuse(node, "a convex set, got one that a path leaves and comes back to")
        if node not in inside and (waits or any(graph.nodes[each] in inside for each in before[index])):
            found.add(index)
    return found


def _views_for_others(graph: Graph, inside: set[Node]) -> set[Node]:
    """The views of the set that others read, and those that they are views of."""
    read = {value for node in graph.nodes if node not in inside for value in _reads(node)} | set(graph.outputs)
    found: set[Node] = set()
    for node in reversed(graph.nodes):
        if node in inside and is_view(node) and any(value in read for value in node.results):
            found.add(node)
            read |= set(node.inputs)
    return found


def _loop(graph: Graph, wanted: Split, roles: Roles, parts: int, views: set[Node]) -> Iterator[Node]:
    """The node in the place of the set, and those that end its means."""
    made = {value for node in wanted.nodes for value in node.results}
    arguments = list(dict.fromkeys(value for node in wanted.nodes for value in _reads(node) if value not in made))
    others = [node for node in graph.nodes if node not in roles.nodes or node in views]
    asked = {value for node in others for value in _reads(node)} | set(graph.outputs) | _divisors(wanted, roles)
    results = [value for node in wanted.nodes if not is_view(node) for value in node.outputs if value is not None and value in asked]
    writes, ends = _writes(wanted.nodes), [_end(value, wanted, roles) for value in results]
    part = -(-wanted.extent // max(1, min(parts, wanted.extent)))
    body = Parts.of(wanted, roles, part).body(arguments, results, writes)
    into: tuple[Into, ...] = tuple(MERGES[roles.merged[value].combine] if value in roles.merged else roles.dims[value] for value in results)
    after = dict.fromkeys(other for node in wanted.nodes for other in node.after if other not in roles.nodes)
    yield Node(
        LOOP,
        tuple(arguments),
        tuple(value if end is None else end.inputs[0] for value, end in zip(results, ends, strict=True)),
        (("along", tuple(roles.dims.get(value) for value in arguments)), ("into", into), ("extent", wanted.extent), ("part", part)),
        writes=writes,
        after=tuple(after),
        body=body,
        source=next((node.source for node in wanted.nodes if node.source is not None), None),
    )
    yield from (end for end in ends if end is not None)


def _divisors(wanted: Split, roles: Roles) -> set[Value]:
    """The results by which others are divided in the end."""
    return {
        node.results[role.over] for node in wanted.nodes for value in node.results
        if (role := roles.merged.get(value)) is not None and role.over is not None
    }  # fmt: skip


def _end(value: Value, wanted: Split, roles: Roles) -> Node | None:
    """What makes a mean of a weighted sum."""
    role = roles.merged.get(value)
    if role is None or (role.combine is not Combine.MEAN and role.over is None):
        return None
    whole = replace(value, name=f"{value.name}_sum", storage=replace(value.storage, name=f"{value.storage.name}_sum"))
    if role.over is None:
        return Node("aten.div.Scalar", (whole, wanted.extent), (value,), inplace=((whole, "aten.div_.Scalar"),))
    maker = next(node for node in wanted.nodes if value in node.results)
    return Node("aten.div.Tensor", (whole, maker.results[role.over]), (value,), inplace=((whole, "aten.div_.Tensor"),))


def _writes(nodes: Sequence[Node]) -> tuple[tuple[Value, Value], ...]:
    """What a loop writes: of each storage what the first write finds and the last one leaves."""
    ends: dict[Storage, tuple[Value, Value]] = {}
    for node in nodes:
        for read, left in node.writes:
            ends[read.storage] = (ends[read.storage][0] if read.storage in ends else read, left)
    return tuple(ends.values())


def _reads(node: Node) -> Iterator[Value]:
    yield from node.inputs
    yield from (before for before, _ in node.writes)
