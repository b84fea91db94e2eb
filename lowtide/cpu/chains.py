"""Chains: an operator with the simple ones behind it that its kernel does on the way, before a result is stored (AGO, section III).

A chain goes on while its result has one reader, and that is element-wise, a norm with given statistics, or sees it in another way.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from lowtide.cpu import expressions
from lowtide.cpu.expressions import name_of
from lowtide.cpu.known import is_given_norm, is_known
from lowtide.cpu.layout import VIEWS, Layout, seen
from lowtide.cpu.recipes import Norm
from lowtide.errors import of_kind
from lowtide.ir.graph import Graph, Node, Value

_MOST = 24  # operators of a chain: more keep too much in registers


@dataclass(frozen=True)
class Link:
    """One operator of a chain: what it is given by the chain, and where that lies as it sees it."""

    node: Node
    value: Value
    layout: Layout


@dataclass(frozen=True)
class OperatorChain:
    """What a kernel does beside its own operator, and the value that it leaves."""

    links: tuple[Link, ...]
    last: Value
    layout: Layout  # of the last value, if the first one lies as was assumed

    @property
    def nodes(self) -> tuple[Node, ...]:
        return tuple(link.node for link in self.links)


@dataclass(frozen=True)
class BodyUses:
    """Who reads what, in a body."""

    readers: Mapping[Value, Sequence[Node]]
    kept: Collection[Value]  # results of the body
    fixed: Collection[Value]  # constants

    @classmethod
    def of(cls, body: Graph, fixed: Collection[Value]) -> BodyUses:
        readers: dict[Value, list[Node]] = {}
        for node in body.nodes:
            for value in node.inputs:
                readers.setdefault(value, []).append(node)
        return cls(readers, frozenset(body.outputs), fixed)

    def only_reader(self, value: Value) -> Node | None:
        """The one node that reads a value, if there is but one."""
        readers = self.readers.get(value, ())
        return readers[0] if len(readers) == 1 and value not in self.kept else None

    def chain(self, value: Value, layout: Layout, taken: Collection[Node] = ()) -> OperatorChain:
        """What can be done to a value on its way to `layout`, by nodes that are not `taken` for another."""
        links: list[Link] = []
        while len(links) < _MOST and (node := self.only_reader(value)) is not None:
            result = next((each for each in node.outputs if each is not None), None)
            if result is None or node in taken or not is_known(node, self.fixed):
                break
            if name_of(node) in VIEWS:
                layouts = seen(node, layout) if sum(each is not None for each in node.outputs) == 1 == len(node.outputs) else None
                if layouts is None or not _is_whole(layouts[0], layout):
                    break
                links.append(Link(node, value, layout))
                value, layout = result, layouts[0]
            elif (is_given_norm(node) or expressions.is_known(node)) and result.shape == value.shape and name_of(node) != "clone":
                links.append(Link(node, value, layout))
                value = result
            else:
                break
        while links and name_of(links[-1].node) in VIEWS:  # a view at the end is one of the result
            value, layout = links[-1].value, links[-1].layout
            links.pop()
        return OperatorChain(tuple(links), value, layout)


def norm_of(node: Node) -> Norm:
    if name_of(node) == "_native_batch_norm_legit_no_training":
        _, gamma, beta, mean, var, _, eps = node.args
    else:
        _, gamma, beta, mean, var, _, _, eps, *_ = node.args
    mean = of_kind(Value, mean)
    var = of_kind(Value, var)
    eps = of_kind(float, eps)
    return Norm(gamma if isinstance(gamma, Value) else None, beta if isinstance(beta, Value) else None, mean, var, eps)


def _is_whole(layout: Layout, before: Layout) -> bool:
    """Whether a view has all elements of what is seen, each once."""
    return _count(layout) == _count(before) and 0 not in [step for size, step in zip(layout.shape, layout.stride, strict=True) if size != 1]


def _count(layout: Layout) -> int:
    count = 1
    for size in layout.shape:
        count *= size
    return count
