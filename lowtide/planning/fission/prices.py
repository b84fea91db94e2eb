"""What nodes take, and what loops would: whole nodes as they are known, those in bodies by a machine's rates.

Before a split graph is chosen, none of its parts is measured. A node that is run in parts takes what rates say of a part, as many times as
there are parts, corrected by how right those rates are about the whole node; so small parts cost more than their share, as far as rates
know. A body is priced once for each size of a part, whatever graphs it is in.
"""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.cost.bodies import inner_peak_bytes, workspaces_within
from lowtide.cost.device import Device
from lowtide.ir.graph import Graph, Node
from lowtide.ir.loops import Loop, is_loop

_LARGE, _KNOWN = 64, (2, 8, 64)  # nodes of a body that is priced in few sizes, and into how many parts those are
_WHOLE = "_whole_v1"  # what a loop's body calls its place in a result


class Prices:
    """Microseconds and workspaces of a graph's nodes, and of loops made of them."""

    def __init__(self, graph: Graph, node_us: Sequence[float], workspace_bytes: Sequence[int], rates: Device) -> None:
        self._rates = rates
        self._us = {_name(node): us for node, us in zip(graph.nodes, node_us, strict=True)}
        self._workspaces = {_name(node): nbytes for node, nbytes in zip(graph.nodes, workspace_bytes, strict=True)}
        self._times = {_name(node): us / rated for node, us in zip(graph.nodes, node_us, strict=True) if (rated := rates.node_us(node))}
        self._bodies: dict[tuple[int, int], tuple[float, float]] = {}
        self._priced: list[tuple[Node, ...]] = []  # whose identities are keys
        self._wholes: dict[int, tuple[Sequence[Node], float]] = {}  # by identity

    def us(self, graph: Graph) -> list[float]:
        """By node."""
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
        """Time and workspace of all parts."""
        loop = Loop.of(node)
        parts = [(self._part(loop, size), count) for size, count in loop.sizes]
        return sum(us * count for (us, _), count in parts), int(max(nbytes for (_, nbytes), _ in parts))

    def _part(self, loop: Loop, size: int) -> tuple[float, float]:
        """What a part of some size takes: of a large body in between of what parts take that are known."""
        assert isinstance(loop.extent, int)
        if len(loop.body.nodes) < _LARGE:
            return self._body(loop, size)
        known = sorted({-(-loop.extent // parts) for parts in _KNOWN} | {1})
        above = next((each for each in known if each >= size), known[-1])
        below = max((each for each in known if each <= size), default=known[0])
        (low_us, low), (high_us, high) = self._body(loop, below), self._body(loop, above)
        share = (size - below) / (above - below) if above > below else 0.0
        return low_us + share * (high_us - low_us), low + share * (high - low)

    def _body(self, loop: Loop, size: int) -> tuple[float, float]:
        key = id(loop.body.nodes), size
        if key not in self._bodies:
            body = loop.at_any(size)
            us = sum(self._loop(node)[0] if is_loop(node) else self._rates.node_us(node) * self._time(node) for node in body.nodes)
            self._bodies[key] = us, float(inner_peak_bytes(body, workspaces_within(body.nodes)))
            self._priced.append(loop.body.nodes)
        return self._bodies[key]

    def _time(self, node: Node) -> float:
        """How many times longer than rates say."""
        return self._times.get(_name(node).removesuffix(_WHOLE), 1.0)


def _name(node: Node) -> str:
    """Of what it makes first: nodes are written anew where what they come after is."""
    return node.results[0].name if node.results else node.op
