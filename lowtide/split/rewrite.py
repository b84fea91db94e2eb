"""A set of nodes into a loop over parts of one dimension that runs through it (F-Trans: MAGIS, section 4.2).

    takes   a graph; a `Split`: nodes, and along which of its axes each is cut
    leaves  the graph with a node of `fission.loop` in the place of the set, see `ir.bodies`; its parts compute what the set does, but that
            sums over the dimension are taken in another order

The paper's constraints: the set is connected; it is convex, so that a loop can take its place; and nothing in it is computed more than
once, so that every node makes something that is cut, or that all parts put together. Beyond the paper, whatever the set writes has to be
cut as well, everywhere in the set alike, since a part must find what the caller had and not what other parts have left; nothing in it draws
random numbers, decides anything or goes to the host.

Views are free. Those of what is shared are taken in each part, and those that others read are taken again outside, of the whole result.

A loop may leave its first result in one of its arguments: a part of it goes where the part lay that it was made of.

    y = fission.loop(x, w, along=(0, None), into=(0,), ...)  inplace(x, fission.loop)
        def body(x, w, y): each part reads x[start:end] for the last time, then writes y[start:end], which may be the same memory

An argument may be taken where it is cut as the result is, lies just as that does, and no node of the body reads a part of it once the
result is written there; the node that writes may read it if that works element by element. Whether it dies at the loop, others decide.

Regions of one graph are split once and their bodies put in order once, however many graphs they are in. So a graph for some splits is put
together from loops that are known, and what one costs is known by its body and the size of a part. Of the paper's fission tree (section
4.3) and its mutations (5.1) there is only this: sets are split together where they lie apart.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from graphlib import CycleError
from typing import TypeAlias

from lowtide.cost.bodies import workspaces_within
from lowtide.cost.memory import order_problem, simulate
from lowtide.errors import CheckError
from lowtide.ir.bodies import Into, Loop
from lowtide.ir.edges import in_turn, leading_to, predecessors
from lowtide.ir.graph import Graph, Node, Storage, Value, free_name
from lowtide.ir.operators.axes import Combine, is_innermost, merges_apart
from lowtide.ir.operators.nodes import is_view
from lowtide.ir.operators.row import LOOP
from lowtide.rewrite.base import Rewritten, following
from lowtide.schedule import Best, schedule
from lowtide.split.dimensions import AlikeParts, ComponentTable, DimensionGraph
from lowtide.split.parts import MERGES, Parts, Roles, Split, check_set, refuse
from lowtide.split.sets import Regions, SplitSet


def takes(node: Node) -> tuple[tuple[Value, str], ...]:
    """What a loop may leave its first result in, as `Node.inplace` has it. Depends on the order of the body."""
    loop = Loop.of(node)
    result, place, into = next(loop.results, (None, None, None))
    if result is None or place is None or not isinstance(into, int):
        return ()
    return tuple(
        (value, LOOP)
        for value, part, dim in loop.cut
        if dim == into and alike(value, result) and _is_alone(value, node) and _is_read_before(loop.body, part, place)
    )


def takers_first(results: Sequence[Value], arguments: Sequence[Value], dims: Mapping[Value, int]) -> list[Value]:
    """Results in an order: first the largest that may lie where an argument lies, as far as both are cut alike; of those the last."""
    given = [value for value in arguments if value in dims]
    able = [each for each in results if any(dims[value] == dims.get(each) and alike(value, each) for value in given)]
    first = max(reversed(able), key=lambda each: each.storage.nbytes if isinstance(each.storage.nbytes, int) else 0, default=None)
    return list(results) if first is None else [first, *(each for each in results if each is not first)]


def alike(value: Value, result: Value) -> bool:
    """Whether a value lies as a result does, on a storage of the program's own that holds nothing else."""
    here, there = value.storage, result.storage
    same = (value.dtype, value.shape, value.stride, value.offset) == (result.dtype, result.shape, result.stride, result.offset)
    return same and (here.nbytes, here.device) == (there.nbytes, there.device) and not here.kind.caller_owned


def _is_alone(value: Value, node: Node) -> bool:
    """Whether the loop is given nothing else on that storage."""
    return sum(other.storage is value.storage for other in node.inputs) == 1


def _is_read_before(body: Graph, part: Value, place: Value) -> bool:
    """Whether what is read of a part of an argument is so before the result is written, or by what may write it there."""
    written = False
    for node in body.nodes:
        writes = any(before.storage is place.storage for before, _ in node.writes)
        read = [value for value in node.inputs if value.storage is part.storage]
        if read and (written or (writes and not _works_in(node, read))):
            return False
        written = written or writes
    return written


def _works_in(node: Node, read: Sequence[Value]) -> bool:
    """Whether a node may write where all of this lies that it reads."""
    return all(any(value is taken for taken, _ in node.inplace) for value in read)


Predecessors: TypeAlias = "Sequence[Sequence[int]]"  # by place in a graph, the places of the nodes that must come before


@dataclass(frozen=True, eq=False)
class SetLoop:
    """A set as a loop: what takes its place in a graph."""

    nodes: tuple[Node, ...]  # the set, in program order
    loop: Node
    ends: tuple[Node, ...]  # what makes means of weighted sums, behind the loop
    views: frozenset[Node]  # of the set, those that others read: they are taken again, of the whole result

    def with_loop(self, loop: Node) -> SetLoop:
        """The same set as another loop, which is given and makes the same."""
        return replace(self, loop=loop)


def looped(graph: Graph, wanted: Split, parts: int, before: Predecessors | None = None) -> SetLoop:
    """A set of a graph as a loop of so many parts. `before` are the graph's predecessors, if the caller has them.

    Raises CheckError saying what is in the way, for a set that cannot be split so.
    """
    inside = set(wanted.nodes)
    wanted = _named(graph, wanted)
    _check_convex(graph, inside, before or predecessors(graph))
    roles = Roles.of(wanted)
    check_set(wanted, roles)
    views = _views_for_others(graph, inside)
    loop, *ends = _loop(graph, wanted, roles, parts, views)
    return SetLoop(wanted.nodes, loop, tuple(ends), frozenset(views))


def with_loops(graph: Graph, loops: Sequence[SetLoop], before: Predecessors | None = None) -> Rewritten:
    """The graph with loops in the places of their sets, which lie apart. `before` as for `looped`.

    A loop stands where the last node of its set did, or later; nothing else moves further than it has to. Raises CheckError where two of
    them wait for one another.
    """
    owner = {node: which for which, each in enumerate(loops) for node in each.nodes}
    if len(owner) < sum(len(each.nodes) for each in loops):
        raise CheckError("fission: expected sets that lie apart, got some that have nodes in common")
    forward: dict[Node, tuple[Node, ...]] = {node: (each.loop, *each.ends) for each in loops for node in each.nodes}
    forward |= {view: (each.loop, replace(view, after=())) for each in loops for view in each.views}
    nodes: list[Node] = []
    for which, place in _in_turn(graph, loops, owner, before or predecessors(graph)):
        if place < 0:
            nodes += _put(loops[which], forward)
        elif which >= 0:
            nodes.append(forward[graph.nodes[place]][-1])
        else:
            node = graph.nodes[place]
            new = following(node, forward)
            if new is not node:
                forward[node] = (new,)
            nodes.append(new)
    return Rewritten(replace(graph, nodes=tuple(nodes)), forward)


def _put(each: SetLoop, forward: dict[Node, tuple[Node, ...]]) -> tuple[Node, ...]:
    """The nodes in the place of a set, behind what others became."""
    loop = following(each.loop, forward)
    if loop is not each.loop:
        forward |= {node: tuple(loop if new is each.loop else new for new in forward[node]) for node in each.nodes}
    return loop, *each.ends


def _in_turn(graph: Graph, loops: Sequence[SetLoop], owner: dict[Node, int], preds: Predecessors) -> Iterator[tuple[int, int]]:
    """Loops as (number, -1), views of theirs for others as (number, place), and other nodes as (-1, place), in an order that is right."""
    count = len(graph.nodes)
    views = {node for each in loops for node in each.views}
    own = [owner.get(node, -1) for node in graph.nodes]  # by place the loop; a view for others is an item beside it
    item = [place if which < 0 or graph.nodes[place] in views else count + which for place, which in enumerate(own)]
    turn = [*range(count), *(max(place for place, which in enumerate(own) if which == number) for number in range(len(loops)))]
    waits: list[set[int]] = [set() for _ in turn]
    for place, before in enumerate(preds):
        for other in before:
            if own[place] >= 0 and own[other] != own[place]:
                waits[count + own[place]].add(item[other])
            if item[place] == place and item[other] != item[place]:
                waits[place].add(item[other])
        if own[place] >= 0 and item[place] == place:
            waits[place].add(count + own[place])
    there = [*(place for place in range(count) if item[place] == place), *range(count, len(turn))]
    try:
        yield from ((own[each], each) if each < count else (each - count, -1) for each in in_turn({at: waits[at] for at in there}, turn))
    except CycleError:
        raise CheckError("fission: expected sets that come one after another, got some that wait for one another") from None


def _named(graph: Graph, wanted: Split) -> Split:
    """The split with a name for its parts that no dimension around has."""
    name = wanted.part_name if wanted.part_name.isidentifier() else "part"
    return replace(wanted, part_name=free_name(name, {each.name for each in graph.dimensions}))


def _check_convex(graph: Graph, inside: set[Node], before: Predecessors) -> None:
    """Raises CheckError where one of the set comes after a node outside that comes after one of the set, or a node is not of this graph."""
    places = [index for index, node in enumerate(graph.nodes) if node in inside]
    if not places or len(places) < len(inside):
        raise CheckError("fission: expected nodes of this graph, at least one")
    behind = set[int]()
    for index in range(places[0], places[-1] + 1):
        node, waits = graph.nodes[index], any(each in behind for each in before[index])
        if node in inside and waits:
            refuse(node, "a convex set, got one that a path leaves and comes back to")
        if node not in inside and (waits or any(graph.nodes[each] in inside for each in before[index])):
            behind.add(index)


def _views_for_others(graph: Graph, inside: set[Node]) -> set[Node]:
    """The views of the set that others read, and those that they are views of."""
    read = {value for node in graph.nodes if node not in inside for value in _reads(node)} | set(graph.outputs)
    return {*leading_to(graph.nodes, read, lambda node, is_read: is_read and node in inside and is_view(node))}


def _loop(graph: Graph, wanted: Split, roles: Roles, parts: int, views: set[Node]) -> Iterator[Node]:
    """The node in the place of the set, and those that end its means."""
    results_of_set = {value for node in wanted.nodes for value in node.results}
    arguments = list(dict.fromkeys(value for node in wanted.nodes for value in _reads(node) if value not in results_of_set))
    others = [node for node in graph.nodes if node not in roles.nodes or node in views]
    wanted_values = {value for node in others for value in _reads(node)} | set(graph.outputs) | _divisors(wanted, roles)
    results = [
        value for node in wanted.nodes if not is_view(node) for value in node.outputs if value is not None and value in wanted_values
    ]
    results = takers_first(results, arguments, roles.dims)
    _check_borders(wanted, roles, arguments, results)
    writes, ends = _writes(wanted.nodes), [_end(value, wanted, roles) for value in results]
    part = -(-wanted.extent // max(1, min(parts, wanted.extent)))
    body = Parts.of(wanted, roles, part).body(arguments, results, writes)
    into: tuple[Into, ...] = tuple(MERGES[roles.merged[value].combine] if value in roles.merged else roles.dims[value] for value in results)
    after = dict.fromkeys(other for node in wanted.nodes for other in node.after if other not in roles.nodes)
    loop = Node(
        LOOP,
        tuple(arguments),
        tuple(value if end is None else end.inputs[0] for value, end in zip(results, ends, strict=True)),
        (("along", tuple(roles.dims.get(value) for value in arguments)), ("into", into), ("extent", wanted.extent), ("part", part)),
        writes=writes,
        after=tuple(after),
        body=body,
        source=next((node.source for node in wanted.nodes if node.source is not None), None),
    )
    yield replace(loop, inplace=takes(loop))
    yield from (end for end in ends if end is not None)


def _check_borders(wanted: Split, roles: Roles, arguments: Sequence[Value], results: Sequence[Value]) -> None:
    """Raises CheckError where a value of the border is cut along what is innermost in a dimension: no slice of it is that."""
    storages = {value.storage for value in arguments}
    for node in wanted.nodes:
        if merges_apart(node, roles.dims, storages):
            refuse(node, "a view whose slices lie dense, got one that merges what lies apart there")
    merged = next((value for value in (*arguments, *results) if is_innermost(roles.dims.get(value, 0))), None)
    if merged is not None:
        reader = next(node for node in wanted.nodes if merged in node.inputs or merged in node.results)
        refuse(reader, f"the set to begin and end where what {merged.name} was merged of is apart")


def _divisors(wanted: Split, roles: Roles) -> set[Value]:
    """The results by which others are divided in the end."""
    return {
        node.results[role.over]
        for node in wanted.nodes
        for value in node.results
        if (role := roles.merged.get(value)) is not None and role.over is not None
    }


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


_ORDERED_AT = 8  # parts for whose size a body is ordered


class Loops:
    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.regions = Regions(DimensionGraph.of(graph))
        self._known: dict[tuple[int, int], SetLoop | None] = {}

    def graph_of(self, parts: Mapping[SplitSet, int]) -> Graph:
        """The graph in which these sets run in so many parts. Raises CheckError where that cannot be, as where one touches another."""
        largest_first = sorted(parts, key=lambda region: (-len(region.axes), region.bits, region.component))
        split = [self.divided(region, parts[region]) for region in largest_first]
        return with_loops(self.graph, split, self.regions.before).graph if split else self.graph

    def divided(self, region: SplitSet, parts: int) -> SetLoop:
        """A region as a loop of so many parts. Raises CheckError where it cannot be one."""
        known = self.looped(region)
        if known is None:
            raise CheckError(f"fission: expected a set that can run in parts, got one of {len(region.axes)} nodes that cannot")
        return known.with_loop(divided(known.loop, parts))

    def looped(self, region: SplitSet) -> SetLoop | None:
        """A region as a loop of some parts; None where it cannot be one."""
        key = region.component, region.bits
        if key not in self._known:
            axes = {self.graph.nodes[place]: axis for place, axis in region.axes.items()}
            name = self._name(region)
            try:
                rewritten = looped(self.graph, Split(axes, name), min(_ORDERED_AT, region.units), self.regions.before)
                self._known[key] = rewritten.with_loop(with_ordered_body(rewritten.loop))
            except CheckError:
                self._known[key] = None
        return self._known[key]

    def _name(self, region: SplitSet) -> str:
        """What people call what a region is cut along: "batch", and "tokens" where it is cut between those, too."""
        line = self._lines.get(region.component)
        if line is None:
            return "part"
        name = line.name.split(" ")[0]
        return "tokens" if name == "batch" and isinstance(line.least, int) and region.units > line.least else name

    @cached_property
    def _lines(self) -> dict[int, AlikeParts]:
        """By part of the dimension graph, how it is told."""
        lines = ComponentTable.of(self.regions.dimensions).lines
        return {component: line for line in lines for component in line.components}


def divided(node: Node, parts: int) -> Node:
    """A loop cut into so many parts, of which the last may be smaller."""
    loop = Loop.of(node)
    assert isinstance(loop.extent, int)
    part = -(-loop.extent // min(parts, loop.extent))
    dimension = replace(loop.body.dimensions[0], most=part)
    return replace(node, kwargs=tuple((dict(node.kwargs) | {"part": part}).items()), body=replace(loop.body, dimensions=(dimension,)))


def with_ordered_body(node: Node) -> Node:
    """A loop with the nodes of its body in an order of low peak."""
    loop = Loop.of(node)
    body = loop.at(loop.part)
    problem = order_problem(body, workspaces_within(body.nodes))
    order = min((schedule(problem, Best()).order, tuple(range(len(body.nodes)))), key=lambda each: simulate(problem, each).peak_bytes)
    ordered = replace(node, body=replace(loop.body, nodes=tuple(loop.body.nodes[index] for index in order)))
    return replace(ordered, inplace=takes(ordered))
