"""What collectives need beside what they are given and make, by the library that carries them out.

On a CPU that is gloo: a reduced part is cut out of the sum of all, a block that is held from the begin to the wait, and counted at either.
On a GPU nccl works in what it is given.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.collectives.nodes import begins_collective, is_collective
from lowtide.ir.operators.collectives.rows import SCATTER
from lowtide.ir.operators.shapes import bytes_of


def collective_bytes(nodes: Sequence[Node]) -> Mapping[Node, int]:
    """The workspaces of those of these nodes that begin or end a collective."""
    begun: dict[Value, int] = {}
    found: dict[Node, int] = {}
    for node in nodes:
        if begins_collective(node):
            found[node] = _of_gloo(node)
            begun |= dict.fromkeys(node.results, found[node])
        elif is_collective(node):
            found[node] = max((begun.get(value, 0) for value in node.inputs), default=0)
    return found


def _of_gloo(node: Node) -> int:
    on_cpu = all(value.storage.device == "cpu" for value in node.results)
    return bytes_of(node.inputs) if on_cpu and node.op == SCATTER else 0
