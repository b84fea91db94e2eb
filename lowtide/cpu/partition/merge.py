"""AGO's Algorithm 1 as a kernel: nodes are merged one at a time, and the topological stages kept up to date.

The stage of a cluster is the length of the longest path to it from a root. Two adjacent clusters whose stages differ by one have no path
between them but their edge, as a third cluster on such a path would have a stage in between: merging them makes no cycle (Theorem 1).
That holds for one merge. After it stages change, by one at most, so they are computed anew: first raised, as what follows the upstream
cluster now follows all that the downstream one needs, then lowered to the longest path again.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lowtide.base.kernels import kernel

_NONE = -1


@kernel
def merge(before: Any, after: Any, weights: Any, complex_counts: Any, groups: Any, joins: Any, most_weight: Any, most_complex: Any) -> Any:
    """The cluster of each node, as one of its nodes.

    `before[e]` must come before `after[e]`, and is the smaller number; a node of a negative group is merged with nothing, others only
    within theirs. The heaviest candidate takes its lightest neighbour whose stage differs by one while their sum stays below
    `most_weight`, then the next heaviest does. What has been merged is the heaviest of all again, so that one pass over the nodes by
    falling weight is Algorithm 1. Where some nodes `join`, only what has complex operators takes, and only such nodes, downstream.
    """
    count, only_epilogues = len(weights), joins.any()
    cluster, weight, inside = np.arange(count), weights.copy(), complex_counts.copy()
    following, leading = _lists(before, count), _lists(after, count)
    stage, queue, queued = np.zeros(count, np.int64), np.empty(count, np.int64), np.zeros(count, np.bool_)
    for node in range(count):  # what comes before has a smaller number
        stage[node] = _longest(node, cluster, before, leading, stage)
    for node in np.argsort(-weights, kind="mergesort"):
        if cluster[node] != node or groups[node] < 0 or (only_epilogues and inside[node] == 0):
            continue
        while True:
            best = _NONE
            for downstream in (True, False):
                if only_epilogues and not downstream:
                    continue
                ends, lists = (after, following) if downstream else (before, leading)
                edge = _pruned(node, cluster, ends, lists)
                while edge != _NONE:
                    other = _find(cluster, ends[edge])
                    near = abs(stage[other] - stage[node]) == 1 and groups[other] == groups[node]
                    fits = near and weight[other] + weight[node] < most_weight and inside[other] + inside[node] <= most_complex
                    if fits and (joins[other] or not only_epilogues) and (best == _NONE or _lighter(other, best, weight)):
                        best = other
                    edge = lists[2][edge]
            if best == _NONE:
                break
            cluster[best] = node
            weight[node] += weight[best]
            inside[node] += inside[best]
            _join(node, best, following)
            _join(node, best, leading)
            _restage(node, cluster, before, after, following, leading, stage, queue, queued)
    for node in range(count):
        cluster[node] = _find(cluster, node)
    return cluster


@kernel(inner=True)
def _lighter(one: Any, other: Any, weight: Any) -> Any:
    """Whether a neighbour goes before another: by weight, then by position."""
    return weight[one] < weight[other] or (weight[one] == weight[other] and one < other)


@kernel(inner=True)
def _lists(ends: Any, count: Any) -> Any:
    """By node, the edges that have it at this end, as lists: first, last, next."""
    first, last, following = np.full(count, _NONE), np.full(count, _NONE), np.full(len(ends), _NONE)
    for edge in range(len(ends)):
        node = ends[edge]
        if first[node] == _NONE:
            first[node] = edge
        else:
            following[last[node]] = edge
        last[node] = edge
    return first, last, following


@kernel(inner=True)
def _find(cluster: Any, node: Any) -> Any:
    """The cluster of a node; paths are halved on the way."""
    while cluster[node] != node:
        cluster[node] = cluster[cluster[node]]
        node = cluster[node]
    return node


@kernel(inner=True)
def _join(node: Any, other: Any, lists: Any) -> None:
    first, last, following = lists
    if first[other] == _NONE:
        return
    if first[node] == _NONE:
        first[node] = first[other]
    else:
        following[last[node]] = first[other]
    last[node] = last[other]


@kernel(inner=True)
def _pruned(node: Any, cluster: Any, ends: Any, lists: Any) -> Any:
    """The first edge of a node's list, once those that lie within its cluster have been taken out: each is passed once."""
    first, last, following = lists
    edge, kept = first[node], _NONE
    while edge != _NONE:
        if _find(cluster, ends[edge]) == node:
            if kept == _NONE:
                first[node] = following[edge]
            else:
                following[kept] = following[edge]
        else:
            kept = edge
        edge = following[edge]
    last[node] = kept
    return first[node]


@kernel(inner=True)
def _restage(node: Any, cluster: Any, before: Any, after: Any, following: Any, leading: Any, stage: Any, queue: Any, queued: Any) -> None:
    stage[node] = _longest(node, cluster, before, leading, stage)
    _raise(node, cluster, before, after, following, stage, queue, queued)
    _lower(node, cluster, before, after, following, leading, stage, queue, queued)


@kernel(inner=True)
def _longest(node: Any, cluster: Any, before: Any, leading: Any, stage: Any) -> Any:
    """One more than the greatest stage before a cluster."""
    found, edge = 0, _pruned(node, cluster, before, leading)
    while edge != _NONE:
        found = max(found, stage[_find(cluster, before[edge])] + 1)
        edge = leading[2][edge]
    return found


@kernel(inner=True)
def _raise(root: Any, cluster: Any, before: Any, after: Any, following: Any, stage: Any, queue: Any, queued: Any) -> None:
    """Raise what comes after a cluster until each stage is beyond those before it."""
    head, length = 0, 1
    queue[0] = root
    while length:
        node = queue[head]
        head, length = (head + 1) % len(queue), length - 1
        queued[node] = False
        edge = _pruned(node, cluster, after, following)
        while edge != _NONE:
            other = _find(cluster, after[edge])
            if stage[other] <= stage[node]:
                stage[other] = stage[node] + 1
                if not queued[other]:
                    queue[(head + length) % len(queue)], queued[other], length = other, True, length + 1
            edge = following[2][edge]


@kernel(inner=True)
def _lower(root: Any, cluster: Any, before: Any, after: Any, following: Any, leading: Any, stage: Any, queue: Any, queued: Any) -> None:
    """Lower what comes after a cluster to the longest path, as far as that changes anything."""
    head, length = 0, 1
    queue[0] = root
    while length:
        node = queue[head]
        head, length = (head + 1) % len(queue), length - 1
        queued[node] = False
        edge = _pruned(node, cluster, after, following)
        while edge != _NONE:
            other = _find(cluster, after[edge])
            longest = _longest(other, cluster, before, leading, stage)
            if longest < stage[other]:
                stage[other] = longest
                if not queued[other]:
                    queue[(head + length) % len(queue)], queued[other], length = other, True, length + 1
            edge = following[2][edge]
