"""What each node asks for, at least, where a limit leaves so much room when it first runs: the knapsack of `remat.bound`."""

from __future__ import annotations

from typing import Any

import numpy as np

from lowtide.base.kernels import kernel

_HALVINGS = 40  # of the time behind a node in which loads have to come back


@kernel(nogil=True)
def asked_us(
    room: Any, every: Any, facts: Any, pred_ptr: Any, pred_ids: Any, succ_ptr: Any, succ_ids: Any, reader_ptr: Any, reader_ids: Any,
    again: Any, store_us: Any, load_us: Any, out_rate: Any, in_rate: Any,
) -> Any:  # fmt: skip
    """[nodes looked at] the microseconds that each asks for, infinite where it can never run."""
    n, m = len(facts.cost_us), len(facts.tensor_bytes)
    out_costs, in_costs = np.minimum(again, store_us), np.minimum(again, load_us)
    out_order, in_order = _dearest_first(out_costs, facts.tensor_bytes), _dearest_first(in_costs, facts.tensor_bytes)
    marks, stack = np.zeros(n, np.int8), np.empty(n, np.int32)
    alive, asked = np.zeros(m, np.bool_), np.zeros((n + every - 1) // every)
    total_us = facts.cost_us.sum()
    for at in range(len(asked)):
        node = at * every
        marks[:] = 0
        before_us = _walk(node, np.int8(1), pred_ptr, pred_ids, facts.cost_us, marks, stack)
        after_us = _walk(node, np.int8(2), succ_ptr, succ_ids, facts.cost_us, marks, stack)
        left = room - _needs(node, facts) - _alive(node, facts, marks, reader_ptr, reader_ids, out_costs, alive)
        if left < 0:
            asked[at] = np.inf
            continue
        window_us = total_us - after_us - facts.cost_us[node]
        asked[at] = _unfit_us(left + out_rate * window_us, out_order, out_costs, facts.tensor_bytes, alive)
        if in_rate > 0:
            window_us = total_us - before_us - facts.cost_us[node]
            asked[at] = _loaded_us(left, window_us, in_rate, in_order, in_costs, facts.tensor_bytes, alive, asked[at])
    return asked


@kernel(inner=True)
def _dearest_first(costs: Any, sizes: Any) -> Any:
    """Tensors by what a byte of them costs."""
    ratios = np.zeros(len(costs))
    for tensor in range(len(costs)):
        ratios[tensor] = -costs[tensor] / sizes[tensor] if sizes[tensor] > 0 else 0.0
    return np.argsort(ratios)


@kernel(inner=True)
def _walk(start: Any, mark: Any, ptr: Any, ids: Any, cost_us: Any, marks: Any, stack: Any) -> float:
    """Marks all that comes before a node, or after it, itself aside; the time that those take."""
    top, total = 1, 0.0
    stack[0] = start
    while top > 0:
        top -= 1
        node = stack[top]
        for entry in range(ptr[node], ptr[node + 1]):
            other = ids[entry]
            if marks[other] != mark:
                marks[other] = mark
                total += cost_us[other]
                stack[top] = other
                top += 1
    return total


@kernel(inner=True)
def _needs(node: Any, facts: Any) -> Any:
    """Bytes that a node cannot run without: what it reads and makes, and its workspace, less what it may take over."""
    needs = facts.made_bytes[node] + facts.workspace_bytes[node]
    for entry in range(facts.read_ptr[node], facts.read_ptr[node + 1]):
        needs += facts.tensor_bytes[facts.read_ids[entry]]
    if facts.take_ptr[node] < facts.take_ptr[node + 1]:
        needs -= facts.tensor_bytes[facts.take_output[node]]
    return needs


@kernel(inner=True)
def _alive(node: Any, facts: Any, marks: Any, reader_ptr: Any, reader_ids: Any, costs: Any, alive: Any) -> Any:
    """Fills in what was made before a node and is wanted after it, what it reads aside; the bytes of what can be had in no other way."""
    pinned = np.int64(0)
    for tensor in range(len(alive)):
        maker = facts.producer[tensor]
        wanted = maker < 0 or marks[maker] == 1
        if wanted and not facts.kept[tensor]:
            wanted = False
            for entry in range(reader_ptr[tensor], reader_ptr[tensor + 1]):
                if marks[reader_ids[entry]] == 2:
                    wanted = True
                    break
        alive[tensor] = wanted
    for entry in range(facts.read_ptr[node], facts.read_ptr[node + 1]):
        alive[facts.read_ids[entry]] = False
    for tensor in range(len(alive)):
        if alive[tensor] and costs[tensor] == np.inf:
            pinned += facts.tensor_bytes[tensor]
            alive[tensor] = False
    return pinned


@kernel(inner=True)
def _unfit_us(room: Any, order: Any, costs: Any, sizes: Any, alive: Any) -> Any:
    """What does not fit costs at least so much: the dearest bytes are kept, as if tensors could be kept in part."""
    total = 0.0
    for tensor in order:
        if alive[tensor]:
            kept = min(max(room, 0.0), sizes[tensor])
            room -= kept
            if kept < sizes[tensor]:
                total += costs[tensor] * (1.0 - kept / sizes[tensor])
    return total


@kernel(inner=True)
def _loaded_us(room: Any, window_us: Any, rate: Any, order: Any, costs: Any, sizes: Any, alive: Any, known_us: Any) -> Any:
    """The least time more behind a node in which what does not fit comes back; what is made again takes of that time, too."""
    low, high = known_us, _unfit_us(room + rate * window_us, order, costs, sizes, alive)
    if high <= low:
        return low
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _unfit_us(room + rate * (window_us + middle), order, costs, sizes, alive) > middle:
            low = middle
        else:
            high = middle
    return low
