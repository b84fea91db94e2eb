"""The order of collectives: each comes after the one that began before it, as they have to meet in one order on all ranks."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lowtide.ir.graph import Node
from lowtide.ir.operators.collectives.nodes import begins_collective

CALLED_BY_LAYERS = frozenset({"c10d"})  # the operators of torch.distributed's own functions
REFUSED = (
    "speaks with other processes through a handle, which a graph cannot hold: the gradients' means and the buffers' broadcast are part of "
    "a step, other calls of torch.distributed (as in SyncBatchNorm) are not"
)


@dataclass
class CollectiveChain:
    """The collectives of a recording."""

    last: Node | None = None

    def fork(self) -> CollectiveChain:
        """The same, to be continued by itself."""
        return CollectiveChain(self.last)

    def next(self, node: Node) -> Node:
        """The node to be recorded; one that begins a collective, behind the last one."""
        if not begins_collective(node):
            return node
        if self.last is not None:
            node = replace(node, after=(*node.after, self.last))
        self.last = node
        return node
