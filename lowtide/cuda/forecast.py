"""What a planned step will ask PyTorch's allocator for, before it has run: enough to serve its first run from an arena.

    takes   a plan
    leaves  the requests for its storages in their order, and for operators' workspaces one block each

Operators ask for their workspaces in pieces that no plan knows; a block as large as all of them together is there while one runs.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from lowtide.ir.graph import Storage, Value
from lowtide.ir.operators.table import row_of
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
    rows = [(start, 1, int(each.nbytes), -1 if each in kept else end) for each, (start, end) in lifetimes.items()]
    spaces: list[tuple[int, int, int]] = []
    for step, index in enumerate(plan.order):
        node, nbytes = plan.graph.nodes[index], plan.workspace_bytes[index]
        for at in row_of(node.op).scratch_like:  # of which the workspace has been measured as well
            scratch = node.args[at]
            assert isinstance(scratch, Value), "else it has no bytes"
            rows.append((step, 0, int(scratch.storage.nbytes), step + 1))
            nbytes -= -(-int(scratch.storage.nbytes) // plan.granule_bytes) * plan.granule_bytes
        if nbytes > 0:
            spaces.append((nbytes, step, step + 1))
    rows.sort(key=lambda row: row[:2])  # stable: of one node in the order of its results
    requests = _recorded([(nbytes, start, end) for start, _, nbytes, end in rows])
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
