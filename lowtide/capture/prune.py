"""Leaving out what a program computes and nobody reads."""

from __future__ import annotations

from collections.abc import Sequence

from lowtide.capture import operators
from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.names import STOP


def needed(nodes: Sequence[Node], outputs: Sequence[Value]) -> tuple[Node, ...]:
    """The nodes that some output, write, random draw or assertion needs, in their order."""
    wanted: set[Value] = set(outputs)
    held: set[Node] = set()  # by control edges
    keep: list[Node] = []
    for node in reversed(nodes):
        if node in held or _acts(node) or any(value in wanted for value in node.results):
            keep.append(node)
            held.update(node.after)
            wanted.update(node.inputs)
    return tuple(reversed(keep))


def _acts(node: Node) -> bool:
    """Whether a node does something beside making its outputs: writing, asserting, drawing from the generator."""
    return node.op == STOP or bool(node.writes) or not node.outputs or operators.node_is_random(node)
