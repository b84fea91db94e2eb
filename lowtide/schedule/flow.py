"""Maximum flow and minimum cut (Dinic 1970): the workhorse of valleys and of lower bounds.

A minimum cut finds the cheapest downset among many, since live memory is submodular over downsets.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

UNLIMITED = 1 << 61  # capacity of an arc that no minimum cut crosses; sums of two fit into an int64


@njit(cache=True)
def min_cut(vertices: Any, tail: Any, head: Any, capacity: Any, source: Any, sink: Any) -> Any:
    """The value of a minimum cut and the [vertices] mask of its smallest source side; arc a goes `tail[a]` -> `head[a]`."""
    arcs = len(tail)
    ptr, slot = _adjacency(vertices, tail, head)
    residual = np.zeros(2 * arcs, np.int64)  # arc a, and at arcs + a its reverse
    residual[:arcs] = capacity
    level, entry = np.empty(vertices, np.int32), np.empty(vertices, np.int32)
    queue, path = np.empty(vertices, np.int32), np.empty(vertices, np.int32)
    value = np.int64(0)
    while _reach(ptr, slot, tail, head, residual, source, sink, level, queue):
        entry[:] = ptr[:-1]
        value += _blocking_flow(ptr, slot, tail, head, residual, source, sink, level, entry, path)
    return value, level >= 0


@njit(cache=True)
def _adjacency(vertices: Any, tail: Any, head: Any) -> Any:
    """Rows of residual arcs by vertex."""
    arcs = len(tail)
    ptr = np.zeros(vertices + 1, np.int32)
    for arc in range(arcs):
        ptr[tail[arc] + 1] += 1
        ptr[head[arc] + 1] += 1
    for vertex in range(vertices):
        ptr[vertex + 1] += ptr[vertex]
    fill, slot = ptr[:-1].copy(), np.empty(2 * arcs, np.int32)
    for arc in range(arcs):
        slot[fill[tail[arc]]] = arc
        fill[tail[arc]] += 1
        slot[fill[head[arc]]] = arcs + arc
        fill[head[arc]] += 1
    return ptr, slot


@njit(cache=True)
def _reach(ptr: Any, slot: Any, tail: Any, head: Any, residual: Any, source: Any, sink: Any, level: Any, queue: Any) -> Any:
    """Breadth first from the source over residual arcs; whether the sink is reached. `level` is -1 where nothing comes."""
    level[:] = -1
    level[source], queue[0], first, last = 0, source, 0, 1
    while first < last:
        vertex = queue[first]
        first += 1
        for place in range(ptr[vertex], ptr[vertex + 1]):
            arc = slot[place]
            other = head[arc] if arc < len(head) else tail[arc - len(head)]
            if residual[arc] > 0 and level[other] < 0:
                level[other] = level[vertex] + 1
                queue[last] = other
                last += 1
                if other == sink:
                    return True
    return False


@njit(cache=True)
def _blocking_flow(
    ptr: Any, slot: Any, tail: Any, head: Any, residual: Any, source: Any, sink: Any, level: Any, entry: Any, path: Any
) -> Any:  # fmt: skip
    """Pushes flow along shortest paths until each has a full arc; depth first, without recursion."""
    arcs, total, depth, vertex = len(head), np.int64(0), 0, source
    while True:
        if vertex == sink:
            push = residual[path[0]]
            for step in range(1, depth):
                push = min(push, residual[path[step]])
            total += push
            cut = depth
            for step in range(depth):
                arc = path[step]
                residual[arc] -= push
                residual[arc + arcs if arc < arcs else arc - arcs] += push
                if residual[arc] == 0 and cut == depth:
                    cut = step
            depth = cut
            full = path[cut]
            vertex = tail[full] if full < arcs else head[full - arcs]
            continue
        advanced = False
        while entry[vertex] < ptr[vertex + 1]:
            arc = slot[entry[vertex]]
            other = head[arc] if arc < arcs else tail[arc - arcs]
            if residual[arc] > 0 and level[other] == level[vertex] + 1:
                path[depth] = arc
                depth += 1
                vertex = other
                advanced = True
                break
            entry[vertex] += 1
        if advanced:
            continue
        if depth == 0:
            return total
        level[vertex] = -1  # a dead end
        depth -= 1
        arc = path[depth]
        vertex = tail[arc] if arc < arcs else head[arc - arcs]
        entry[vertex] += 1
