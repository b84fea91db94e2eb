"""Order of harm: what a step that fails, or ends early, has changed by then; and what of a program is needed at all.

    takes   the nodes of a program in its own order, and those of them that it runs before its loss exists
    leaves  the same nodes with control edges

Until the loss exists, a node that the caller would notice (one that writes what the caller owns, or draws random numbers) keeps its place
among all others: what comes before it in the program does so in every order, and so does what comes after it. So a step that fails there
has written and drawn exactly what eager PyTorch would have. Operators that a batch may make fail (indices out of range, a matrix that is
singular) and functions of Python that raise for some numbers keep to their order, so that it is the same one that fails. Parameters and
optimizer state are written by the optimizer, and that comes after all of those nodes, and after all that the program checks between
(gradients that are not finite). Views and other arithmetic on numbers do nothing that could fail: they are free.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence, Set
from dataclasses import dataclass, replace

from lowtide.capture import calls
from lowtide.ir.graph import Kind, Node, Value
from lowtide.ir.operators.nodes import is_arithmetic, is_collective, is_random, is_view, row_of
from lowtide.ir.operators.row import STOP

_TRAINED = (Kind.PARAMETER, Kind.STATE)
_DIVIDING = {"py.truediv", "py.floordiv", "py.mod"}
_INDICES = {"int64", "int32", "int16", "int8", "uint8"}


def in_order_of_harm(nodes: Sequence[Node], before_loss: Set[Node]) -> tuple[Node, ...]:
    """The nodes with the control edges that keep harm in order; their number is linear in that of the nodes."""
    order = _Order()
    early = [node for node in nodes if node in before_loss]
    gate = next((node for node in reversed(early) if _runs(node)), None) if len(early) < len(nodes) else None
    return tuple(order.placed(node, node is gate) if node in before_loss else order.after_loss(node) for node in nodes)


class _Order:
    """The nodes as far as they are placed. What lies between two barriers is free."""

    def __init__(self) -> None:
        self.became: dict[Node, Node] = {}
        self.barrier: Node | None = None
        self.maker: dict[Value, Node] = {}  # of what was made since the barrier, by value
        self.fallible: Node | None = None  # the latest that data can make fail
        self.check: Node | None = None  # the latest of the program's own behind the loss
        self.open: dict[Node, None] = {}  # nodes since the barrier, itself among them, that none of the others comes after

    def placed(self, node: Node, gate: bool) -> Node:
        """A node that runs before the loss exists."""
        if not _runs(node):
            self._note(node, self._makers(node))
            return self._with(node, ())
        makers = self._makers(node)
        barrier = gate or bool(node.writes) or is_random(node)
        before = [each for each in self.open if each not in makers] if barrier else self._since(makers)
        if fallible := may_fail(node):
            before += [self.fallible] if self.fallible is not None and not barrier else []
        done = self._with(node, before)
        if barrier:
            self.maker.clear()
            self.open, self.barrier = {}, done
        for each in (*makers, *before):
            self.open.pop(each, None)
        self.open[done] = None
        self.fallible = done if fallible else self.fallible
        self.maker.update(dict.fromkeys(node.results, done))
        return done

    def _since(self, makers: list[Node]) -> list[Node]:
        """What puts a node after the barrier: nothing where it reads what was made since."""
        return [self.barrier] if self.barrier is not None and not makers else []

    def after_loss(self, node: Node) -> Node:
        """A node that may run later; the optimizer's writes have to."""
        harmful, checks = any(before.storage.kind in _TRAINED for before, _ in node.writes), not (node.results or node.writes)
        before = (self.barrier if harmful else None, self.check if harmful or checks else None)
        done = self._with(node, filter(None, before))
        self.check = done if checks else self.check
        return done

    def _makers(self, node: Node) -> list[Node]:
        """The nodes since the barrier whose results a node reads, also through views."""
        return list(dict.fromkeys(self.maker[value] for value in node.inputs if value in self.maker))

    def _note(self, view: Node, makers: Sequence[Node]) -> None:
        for value in view.results if makers else ():
            self.maker[value] = makers[0]

    def _with(self, node: Node, after: Iterable[Node]) -> Node:
        """The node with these control edges beside its own, whose ends may have become others."""
        wanted = tuple(dict.fromkeys((*(self.became.get(each, each) for each in node.after), *after)))
        if wanted == node.after:
            return node
        self.became[node] = done = replace(node, after=wanted)
        return done


def may_fail(node: Node) -> bool:
    """Whether data can make a node fail: indices beside what they point into, an assertion, a factorisation."""
    dtypes = {value.dtype for value in node.inputs}
    indexes = bool(dtypes & _INDICES) and bool(dtypes - _INDICES)
    return indexes or not node.results or row_of(node.op).factorises or _may_be_undefined(node)


def _runs(node: Node) -> bool:
    return not is_view(node) and (not is_arithmetic(node) or _may_be_undefined(node))


def _may_be_undefined(node: Node) -> bool:
    """Whether a node computes with numbers of the program's, and Python raises for some: `math.log(0.0)`, a quotient by zero."""
    divides = node.op in _DIVIDING and isinstance(node.args[1], Value)
    return bool(node.inputs) and (node.op.startswith("py.math_") or node.op == "py.pow" or divides)


def needed(nodes: Sequence[Node], outputs: Sequence[Value]) -> tuple[Node, ...]:
    """The nodes that some output, write, random draw or assertion needs, in their order."""
    wanted: set[Value] = set(outputs)
    before: set[Node] = set()  # by control edges
    keep: list[Node] = []
    for node in reversed(nodes):
        if node in before or _acts(node) or any(value in wanted for value in node.results):
            keep.append(node)
            before.update(node.after)
            wanted.update(node.inputs)
    return tuple(reversed(keep))


def _acts(node: Node) -> bool:
    """Whether a node does something beside making its outputs: writing, asserting, drawing from the generator."""
    return node.op == STOP or bool(node.writes) or not node.outputs or calls.node_is_random(node)


def behind(stop: Node | None, nodes: list[Node]) -> list[Node]:
    """The nodes, those that act after `stop` with an edge from it."""
    if stop is None:
        return nodes
    at = nodes.index(stop) + 1
    acts = [bool(node.writes) or is_random(node) or is_collective(node) or may_fail(node) for node in nodes[at:]]
    return nodes[:at] + [replace(node, after=(*node.after, stop)) if act else node for node, act in zip(nodes[at:], acts, strict=True)]


@dataclass
class NodeChain:
    """Nodes that keep their order, each behind the last one."""

    last: Node | None = None

    def next(self, node: Node) -> Node:
        self.last = node if self.last is None else replace(node, after=(*node.after, self.last))
        return self.last
