"""The links to the host while operators run: what is stored when a link is free, and what is loaded ahead of its reader."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowtide.base.kernels import kernel
from lowtide.remat.entries import LOAD, code_of
from lowtide.remat.state import DROPPED, NOTHING, emit, forget, has_buffer, next_use, settle
from lowtide.remat.victims import has_room, make_room, remake_us, store


@kernel(inner=True, borrows=True)
def store_ahead(step: Any, state: Any) -> bool:
    """While the link is free: store what is worth most, of equals what is wanted latest. False where the sequence is too long."""
    now, tensors, nodes, out = state.now, state.tensors, state.nodes, state.out
    while now[0].to_host <= now[0].clock:
        chosen = _to_store(step, state)
        if chosen < 0:
            return True
        if not store(chosen, now, tensors, nodes, out):
            return False
    return True


@kernel(inner=True, borrows=True)
def weigh(node: Any, step: Any, now: Any, tensors: Any, nodes: Any, ids: Any, uses: Any) -> None:
    """What it would cost to make again what a node just made, from what stays."""
    for entry in range(nodes[node].result, nodes[node].result_end):
        tensor = ids[entry]
        if tensors[tensor].resident and tensors[tensor].storable:
            later = next_use(tensor, step, np.bool_(True), tensors, uses)
            worth = remake_us(node, later, now, tensors, nodes, ids)
            tensors[tensor].worth_us = np.inf if worth < 0 else worth


@kernel(inner=True, borrows=True)
def _to_store(step: Any, state: Any) -> Any:
    """Of what is there and worth it, the tensor that is worth most for its bytes; -1 for none. Worth counts up to `store_cap`."""
    now, tensors, start_us, by_store = state.now, state.tensors, state.start_us, state.by_store
    chosen, best, latest = -1, 0.0, step
    for position in range(now[0].members):
        tensor = tensors[position].member
        each = tensors[tensor]
        if not each.storable or each.host != NOTHING:
            continue
        gain = min(by_store[tensor] * each.worth_us / each.store_us, now[0].store_cap)
        if gain < now[0].store_above or gain < best:
            continue
        later = next_use(tensor, step, np.bool_(True), tensors, state.uses)
        if later <= step or (gain == best and later <= latest):
            continue
        if start_us[later] - start_us[step] < each.store_us + each.load_us or not has_buffer(tensor, now, state.tensors, state.pool):
            continue
        chosen, best, latest = tensor, gain, later
    return chosen


@kernel(inner=True, borrows=True)
def load_ahead(step: Any, state: Any) -> bool:
    """Load what later steps want back, as early as all loads together need; what finds no room waits. False where the sequence is too long.

    Others make room for what has to begin; unless loads push, for one that waits for those behind it alone, nothing does.
    """
    now, tensors, start_us = state.now, state.tensors, state.start_us
    coming = state.nodes[state.base[step]]  # it runs next, and finds its room
    while now[0].away > 0:
        tensor = tensors[now[0].away - 1].away
        each = tensors[tensor]
        if each.resident:  # made again meanwhile
            forget(tensor, now, tensors)
            continue
        begin_us = start_us[step + 1] + max(now[0].from_host - now[0].clock, 0.0)  # by the clock of steps without repetition
        if not _is_due(begin_us, now, tensors, start_us):
            return True
        need = each.bytes + coming.made_bytes + coming.workspace_bytes
        if not has_room(need, now):
            if not now[0].pushes and start_us[each.back] - begin_us > now[0].lead * each.load_us:
                return True
            if not make_room(need, step, np.bool_(True), each.back, state):
                return True
        if not load(tensor, now, tensors, state.nodes, state.out):
            return False
        each.fresh = True
    return True


@kernel(inner=True, borrows=True)
def _is_due(begin_us: Any, now: Any, tensors: Any, start_us: Any) -> bool:
    """Whether the first load that is to come has to begin at a time, so that it and those behind it on the link are there when wanted.

    Each load takes `lead` times as long as it does, so that there is something to spare.
    """
    first = tensors[tensors[now[0].away - 1].away].back
    if start_us[first] - begin_us > now[0].lead * now[0].away_us:
        return False
    queue_us = 0.0
    for at in range(now[0].away - 1, -1, -1):
        each = tensors[tensors[at].away]
        if not each.resident:
            queue_us += now[0].lead * each.load_us
            if start_us[each.back] - begin_us <= queue_us:
                return True
    return False


@kernel(inner=True, borrows=True)
def restore_offloaded(end: Any, state: Any) -> bool:
    """Load what is offloaded and not there, after the last step. False where there is no room, or the sequence is too long."""
    now, tensors, nodes, out = state.now, state.tensors, state.nodes, state.out
    for tensor in range(len(tensors)):
        if tensors[tensor].offloaded and not tensors[tensor].resident:
            if not make_room(tensors[tensor].bytes, end, np.bool_(True), end, state):
                return False
            if not load(tensor, now, tensors, nodes, out):
                return False
    return True


@kernel(inner=True, borrows=True)
def load(tensor: Any, now: Any, tensors: Any, nodes: Any, out: Any) -> bool:
    """Begin to copy a tensor from the host into memory for which there is room."""
    now[0].from_host = max(now[0].from_host, now[0].clock) + tensors[tensor].load_us
    tensors[tensor].arrived_us = now[0].from_host
    settle(tensor, now, tensors)
    forget(tensor, now, tensors)
    return emit(code_of(LOAD, tensor, len(nodes) - 1), now, out)


@kernel(inner=True, borrows=True)
def better_loaded(tensor: Any, step: Any, now: Any, tensors: Any, nodes: Any, ids: Any) -> bool:
    """Whether what is missing now is restored sooner from the host than by computing it again."""
    each = tensors[tensor]
    if each.host != DROPPED:
        return False
    if each.producer < 0:
        return True
    wait_us = max(now[0].from_host - now[0].clock, 0.0) + each.load_us
    remake = remake_us(each.producer, step, now, tensors, nodes, ids)
    return bool(remake < 0 or wait_us <= remake)
