"""What a planned step will ask PyTorch's allocator for, before it has run: enough to serve its first run from an arena.

    takes   a plan
    leaves  the requests for its storages in their order, and for operators' workspaces one block each

Operators ask for their workspaces in pieces that no plan knows; a block as large as all of them together is there while one runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowtide.ir.graph import Storage
from lowtide.plan.contents import Contents
from lowtide.plan.promises import lives
from lowtide.runtime.arena.allocator import Recorded


def expected(plan: Contents) -> tuple[Recorded, Recorded]:
    """Requests, in steps of the plan; and blocks for workspaces, of which none is a request by itself."""
    owner = _owners(plan)
    spans = {storage: span for storage, span in lives(plan).items() if span[0] and span[1] < span[2]}
    given = {value.storage for value in plan.graph.inputs}
    kept = {owner.get(value.storage, value.storage) for value in plan.graph.outputs}
    lifetimes = {storage: [start, end] for storage, (_, start, end) in spans.items() if storage not in owner and storage not in given}
    for storage, (_, _, end) in spans.items():
        if (first := owner.get(storage)) in lifetimes:
            lifetimes[first][1] = max(lifetimes[first][1], end)
    order = sorted(lifetimes, key=lambda storage: lifetimes[storage][0])  # stable: of one node in the order of its results
    requests = _recorded([(int(each.nbytes), lifetimes[each][0], -1 if each in kept else lifetimes[each][1]) for each in order])
    spaces = [(plan.workspace_bytes[node], step, step + 1) for step, node in enumerate(plan.order) if plan.workspace_bytes[node]]
    return requests, _recorded(spaces)


def _owners(plan: Contents) -> dict[Storage, Storage]:
    """Of each storage that takes over another's memory the one that was asked for."""
    owner: dict[Storage, Storage] = {}
    for index in plan.order:
        node, reuse = plan.graph.nodes[index], plan.reuses[index]
        if reuse >= 0 and node.outputs and node.outputs[0] is not None:
            taken = node.inplace[reuse][0].storage
            owner[node.outputs[0].storage] = owner.get(taken, taken)
    return owner


def _recorded(rows: Sequence[tuple[int, int, int]]) -> Recorded:
    sizes, born, died = np.array(rows, np.int64).reshape(-1, 3).T
    return Recorded(sizes, born, died)
