"""What the body of a loop makes for itself at its highest, counted anew; shares no code with the cost model.

A part's nodes run in program order. A storage lives from the node that makes it to the last that uses it; a node that may work in the
memory of inputs does so in the first that dies there. What operators need for themselves is not known here: a workspace is this at least.
"""

from __future__ import annotations

from lowtide.base.narrow import of_kind
from lowtide.ir.graph import Graph, Node, Storage
from lowtide.ir.loops import Loop, is_loop


def body_bytes(node: Node, granule_bytes: int) -> int:
    """The least that running a loop takes beside its arguments and results, in its largest part; 0 for any other node."""
    if not is_loop(node):
        return 0
    loop = Loop.of(node)
    return max((peak_bytes(loop.at(size), granule_bytes) for size, _ in loop.sizes), default=0)


def peak_bytes(body: Graph, granule_bytes: int) -> int:
    """What the nodes of a body at some size make for themselves at their highest."""
    last: dict[Storage, int] = {}
    for step, node in enumerate(body.nodes):
        last |= dict.fromkeys((value.storage for value in (*node.inputs, *node.results)), step)
    given = {value.storage for value in body.inputs}
    live: dict[Storage, int] = {}
    peak = 0
    for step, node in enumerate(body.nodes):
        made = [value.storage for value in node.results if value.storage not in given and value.storage not in live]
        taken = next((value.storage for value, _ in node.inplace if _can_take(value.storage, made, live, last, step)), None)
        if taken is not None:
            del live[taken]
        live |= {storage: _rounded(storage, granule_bytes) for storage in made}
        peak = max(peak, sum(live.values()) + body_bytes(node, granule_bytes))
        live = {storage: nbytes for storage, nbytes in live.items() if last[storage] > step}
    return peak


def _can_take(storage: Storage, made: list[Storage], live: dict[Storage, int], last: dict[Storage, int], step: int) -> bool:
    return bool(made) and storage in live and last[storage] == step and storage.nbytes == made[0].nbytes


def _rounded(storage: Storage, granule_bytes: int) -> int:
    return -(-of_kind(int, storage.nbytes) // granule_bytes) * granule_bytes
