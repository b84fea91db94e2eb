"""Victims: to make room, of all that is resident, what costs least to restore is evicted first.

Costs are found lazily: a candidate starts with a bound from below, and is priced, by a walk over what it misses, when it comes first.

A heap of candidates: the one of least score is at its head, of equals the one that came first.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lowtide.base.kernels import kernel
from lowtide.remat.entries import DROP, STORE, code_of
from lowtide.remat.state import CHOSEN, DROPPED, NOTHING, STORED, WEIGHED, emit, forget, free, has_buffer, next_use, pin


@kernel(inner=True, borrows=True)
def heapify(heap: Any, count: Any, scores: Any) -> None:
    for position in range(count):
        heap[position] = position
    for at in range(count // 2 - 1, -1, -1):
        sift_down(heap, at, count, scores)


@kernel(inner=True, borrows=True)
def sift_down(heap: Any, at: Any, count: Any, scores: Any) -> None:
    """Put one back to where it belongs whose score has grown."""
    moved = heap[at]
    while 2 * at + 1 < count:
        child = 2 * at + 1
        if child + 1 < count and _before(heap[child + 1], heap[child], scores):
            child += 1
        if not _before(heap[child], moved, scores):
            break
        heap[at] = heap[child]
        at = child
    heap[at] = moved


@kernel(inner=True, borrows=True)
def _before(one: Any, other: Any, scores: Any) -> bool:
    return bool(scores[one] < scores[other] or (scores[one] == scores[other] and one < other))


_DEAD, _REMAKE, _DROP, _SWAP, _UNKNOWN = 0, 1, 2, 3, 4  # how a tensor is evicted
_LATE = 1e30  # what was loaded ahead is evicted last


@kernel(inner=True, borrows=True)
def has_room(need: Any, now: Any) -> bool:
    """Whether so many bytes fit beneath the limit."""
    return bool(now[0].level + need <= now[0].limit_bytes)


@kernel(inner=True, borrows=True)
def make_room(need: Any, step: Any, again: Any, before: Any, state: Any) -> bool:
    """Evict tensors until `need` bytes fit beneath the limit; none that is read before step `before`. False where that cannot be.

    False as well where choosing has taken too long: tensors then come and go without end.
    """
    if has_room(need, state.now):
        return True
    if state.now[0].visits > state.now[0].most_visits:
        return False
    now, tensors, nodes, scores, heap = state.now, state.tensors, state.nodes, state.scores, state.heap
    count = _candidates(step, again, before, state)
    heapify(heap, count, scores)
    while not has_room(need, now):
        if count == 0 or scores[heap[0]] == np.inf:
            return False
        position = heap[0]
        tensor = tensors[position].candidate
        if tensors[position].method == _UNKNOWN:
            later = next_use(tensor, step, again, tensors, state.uses)
            cost, restoring = _price(tensor, later, now, tensors, nodes, state.ids, state.pool)
            tensors[position].method = restoring
            scores[position] = _score(cost, tensor, later - step, state) if restoring != _DEAD else np.inf
        elif tensors[position].method in (_DROP, _SWAP) and not _may_copy(tensor, now, tensors, state.pool):
            tensors[position].method = _UNKNOWN  # another one has taken the last buffer meanwhile
        else:
            later = next_use(tensor, step, again, tensors, state.uses)
            if not _evict(tensor, tensors[position].method, later, state):
                return False
            count -= 1
            heap[0] = heap[count]
        sift_down(heap, 0, count, scores)
    return True


@kernel(inner=True, borrows=True)
def _candidates(step: Any, again: Any, before: Any, state: Any) -> int:
    """All that may be evicted, with a bound from below of their scores; how many."""
    now, tensors, nodes, uses, scores, roles = state.now, state.tensors, state.nodes, state.uses, state.scores, state.roles
    count = 0
    now[0].visits += now[0].members
    for position in range(now[0].members):
        tensor = tensors[position].member
        each = tensors[tensor]
        if each.lock > 0 or (each.kept and not each.offloaded) or each.bytes == 0:
            continue
        later = next_use(tensor, step, again, tensors, uses)
        if later < 0:
            scores[count], tensors[count].candidate, tensors[count].method = -1.0, tensor, _DEAD
            count += 1
        elif later > before:
            cost = _at_least(tensor, later, now, tensors, nodes, state.pool)
            if cost < np.inf:
                scores[count] = _score(cost, tensor, later - step, state)
                tensors[count].candidate, tensors[count].method = tensor, _UNKNOWN
                roles[tensor] = max(roles[tensor], WEIGHED)
                count += 1
    return count


@kernel(inner=True, borrows=True)
def _score(cost: Any, tensor: Any, distance: Any, state: Any) -> float:
    """The least is evicted first; what was loaded ahead of its reader, last."""
    powered = cost if state.now[0].cost_power == 1.0 else cost ** state.now[0].cost_power
    score = powered / (state.by_bytes[tensor] * state.by_steps[distance])
    return float(score + _LATE if state.tensors[tensor].fresh else score)


@kernel(inner=True, borrows=True)
def _at_least(tensor: Any, later: Any, now: Any, tensors: Any, nodes: Any, pool: Any) -> float:
    """A bound from below of what it costs to evict and restore a tensor: no walk; inf where there is no way."""
    each = tensors[tensor]
    cost = nodes[each.producer].cost_us if each.producer >= 0 and nodes[each.producer].until > later else np.inf
    if each.storable and (each.host != NOTHING or now[0].store_above < np.inf) and _may_copy(tensor, now, tensors, pool):
        return float(min(cost, now[0].load_weight * each.load_us))
    return float(cost)


@kernel(inner=True, borrows=True)
def _may_copy(tensor: Any, now: Any, tensors: Any, pool: Any) -> bool:
    """Whether the host has room for a copy that is needed."""
    return bool(tensors[tensor].host == DROPPED or has_buffer(tensor, now, tensors, pool))


@kernel(inner=True, borrows=True)
def _price(tensor: Any, later: Any, now: Any, tensors: Any, nodes: Any, ids: Any, pool: Any) -> tuple[float, int]:
    """What it costs to evict and restore a tensor, and in which way; `_DEAD` where there is none."""
    cost, restoring = 0.0, _DEAD
    each = tensors[tensor]
    if each.producer >= 0:
        remake = remake_us(each.producer, later, now, tensors, nodes, ids)
        if remake >= 0:
            cost, restoring = remake, _REMAKE
    if not each.storable or not _may_copy(tensor, now, tensors, pool):
        return cost, restoring
    load = now[0].load_weight * each.load_us
    if each.host != NOTHING:
        drop = max(each.stored_us - now[0].clock, 0.0) + load
        if restoring == _DEAD or drop <= cost:
            cost, restoring = drop, _DROP
    elif now[0].store_above < np.inf:
        swap = max(now[0].to_host - now[0].clock, 0.0) + each.store_us + load
        if restoring == _DEAD or swap < cost:
            cost, restoring = swap, _SWAP
    return cost, restoring


@kernel(inner=True, borrows=True)
def _evict(tensor: Any, restoring: Any, later: Any, state: Any) -> bool:
    """Evict a tensor that is wanted at a later step; False where the sequence has become too long."""
    now, tensors, nodes, out = state.now, state.tensors, state.nodes, state.out
    if restoring == _SWAP and not store(tensor, now, tensors, nodes, out):
        return False
    if restoring in (_DROP, _SWAP):
        each = tensors[tensor]
        now[0].clock = max(now[0].clock, each.stored_us)
        if each.host != DROPPED:
            out[each.store_at].needed = True
            pin(tensor, now, tensors, state.pool)
        _is_away(tensor, later, now, tensors)
        if not emit(code_of(DROP, tensor, len(nodes) - 1), now, out):
            return False
    if restoring != _DEAD:
        state.roles[tensor] = CHOSEN
    free(tensor, now, tensors)
    return True


@kernel(inner=True, borrows=True)
def _is_away(tensor: Any, later: Any, now: Any, tensors: Any) -> None:
    """A tensor is dropped until a later step: it takes its place among the loads that are to come, those wanted first last.

    What was loaded ahead of that step before and had to go again is not: else it might come and go without end.
    """
    if not forget(tensor, now, tensors) and tensors[tensor].back == later:
        return
    at = now[0].away
    while at > 0 and tensors[tensors[at - 1].away].back < later:
        tensors[at].away = tensors[at - 1].away
        at -= 1
    tensors[at].away, tensors[tensor].back = tensor, later
    now[0].away += 1
    now[0].away_us += tensors[tensor].load_us


@kernel(inner=True, borrows=True)
def store(tensor: Any, now: Any, tensors: Any, nodes: Any, out: Any) -> bool:
    """Begin to copy a tensor to the host. The entry stays in the sequence only if the copy is needed."""
    each, position = tensors[tensor], now[0].count
    if not emit(code_of(STORE, tensor, len(nodes) - 1), now, out):
        return False
    out[position].needed = False
    each.store_at = position
    now[0].to_host = max(now[0].to_host, now[0].clock, each.arrived_us) + each.store_us
    each.stored_us = now[0].to_host
    each.host = STORED
    return True


@kernel(inner=True, borrows=True)
def remake_us(maker: Any, when: Any, now: Any, tensors: Any, nodes: Any, ids: Any) -> float:
    """What it costs to run a node again with all that it misses now; -1 where something could not be run at step `when`."""
    total, top = 0.0, 0
    now[0].stamp += 1
    stamp = now[0].stamp
    nodes[0].stack = maker
    nodes[maker].seen = stamp
    while top >= 0:
        node = nodes[nodes[top].stack]
        top -= 1
        now[0].visits += 1
        if node.until <= when:
            return -1.0
        total += node.cost_us
        for entry in range(node.read, node.read_end):
            tensor = tensors[ids[entry]]
            if tensor.resident:
                continue
            if tensor.host == DROPPED:
                total += now[0].load_weight * tensor.load_us
                continue
            if tensor.producer < 0:
                return -1.0
            if nodes[tensor.producer].seen != stamp:
                nodes[tensor.producer].seen = stamp
                top += 1
                nodes[top].stack = tensor.producer
    return total
