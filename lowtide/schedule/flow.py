"""Project selection (Picard 1976): the workhorse of valleys and of lower bounds.

Some vertices cost bytes and others gain bytes, and a vertex can be chosen only with all that it requires. The best choice is a minimum cut:
flow goes from gains, along "requires" without limit, to costs (Dinic 1970), and what gain is left over leads to is chosen. Live
memory is submodular over downsets, so the cheapest downset among many is such a choice: a node costs what it opens, and a
tensor gains its bytes once all that touches it has run.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.base.kernels import kernel


@kernel
def select(ptr: Any, ids: Any, cost: Any, gain: Any, max_phases: Any) -> Any:
    """The most that can flow from gains to costs, and the [vertices] mask of the smallest best choice, nothing where phases ran out.

    Vertex i requires those in `ids[ptr[i]:ptr[i + 1]]`. The best choice is worth the sum of gains less the flow. `cost` and `gain` are
    used up.
    """
    size, total = len(ptr) - 1, np.int64(0)
    back_ptr, tails, arcs = _transposed(ptr, ids)
    flow, level, queue = np.zeros(len(ids), np.int64), np.empty(size, np.int32), np.empty(size, np.int32)
    path, via = np.empty(size + 1, np.int32), np.empty(size + 1, np.int32)  # vertices of a walk; the arc to each, ~arc where backwards
    for _ in range(max_phases):
        if not _levels(ptr, ids, back_ptr, tails, arcs, flow, cost, gain, level, queue):
            return total, level >= 0
        forward, backward = ptr[:-1].copy(), back_ptr[:-1].copy()
        for source in range(size):
            while gain[source] > 0 and level[source] == 0:
                path[0], depth = source, 0
                while depth >= 0 and (cost[path[depth]] == 0 or depth == 0):
                    at, moved = path[depth], False
                    while forward[at] < ptr[at + 1] and not moved:
                        arc = forward[at]
                        moved = level[ids[arc]] == level[at] + 1
                        if moved:
                            path[depth + 1], via[depth + 1] = ids[arc], arc
                        else:
                            forward[at] += 1
                    while backward[at] < back_ptr[at + 1] and not moved:
                        entry = backward[at]
                        moved = flow[arcs[entry]] > 0 and level[tails[entry]] == level[at] + 1
                        if moved:
                            path[depth + 1], via[depth + 1] = tails[entry], ~arcs[entry]
                        else:
                            backward[at] += 1
                    if moved:
                        depth += 1
                    else:
                        level[at], depth = -1, depth - 1  # leads nowhere in this phase
                if depth < 0:
                    break
                pushed = min(gain[source], cost[path[depth]])
                for position in range(1, depth + 1):
                    if via[position] < 0:
                        pushed = min(pushed, flow[~via[position]])
                for position in range(1, depth + 1):
                    if via[position] < 0:
                        flow[~via[position]] -= pushed
                    else:
                        flow[via[position]] += pushed
                gain[source] -= pushed
                cost[path[depth]] -= pushed
                total += pushed
    return total, np.zeros(size, np.bool_)


@kernel(inner=True)
def _transposed(ptr: Any, ids: Any) -> tuple[NDArray[np.int32], NDArray[np.int32], NDArray[np.int32]]:
    """By head: where its arcs start, their tails, and their positions in `ids`."""
    size = len(ptr) - 1
    back_ptr = np.zeros(size + 1, np.int32)
    for head in ids:
        back_ptr[head + 1] += 1
    for at in range(size):
        back_ptr[at + 1] += back_ptr[at]
    fill, tails, arcs = back_ptr[:-1].copy(), np.empty(len(ids), np.int32), np.empty(len(ids), np.int32)
    for tail in range(size):
        for arc in range(ptr[tail], ptr[tail + 1]):
            position = fill[ids[arc]]
            tails[position], arcs[position], fill[ids[arc]] = tail, arc, position + 1
    return back_ptr, tails, arcs


@kernel(inner=True)
def _levels(ptr: Any, ids: Any, back_ptr: Any, tails: Any, arcs: Any, flow: Any, cost: Any, gain: Any, level: Any, queue: Any) -> bool:
    """Distances from what still has gain to give, -1 where nothing leads; whether any of it reaches a cost not yet paid."""
    level[:] = -1
    head, tail, target = 0, 0, -1
    for at in range(len(level)):
        if gain[at] > 0:
            level[at], queue[tail], tail = 0, at, tail + 1
    while head < tail:
        at, head = queue[head], head + 1
        if cost[at] > 0 and target < 0:
            target = level[at]
        if target >= 0 and level[at] >= target:
            continue  # longer paths wait for a later phase
        for arc in range(ptr[at], ptr[at + 1]):
            if level[ids[arc]] < 0:
                level[ids[arc]], queue[tail], tail = level[at] + 1, ids[arc], tail + 1
        for entry in range(back_ptr[at], back_ptr[at + 1]):
            if flow[arcs[entry]] > 0 and level[tails[entry]] < 0:
                level[tails[entry]], queue[tail], tail = level[at] + 1, tails[entry], tail + 1
    return target >= 0
