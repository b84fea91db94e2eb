"""Safe commits: sets of nodes that may run now without losing the best order, so that a search need not branch on them.

Let a downset S beyond the one reached be reachable within the bound, and of the least live memory among all its own sub-downsets, no more
than what is live now. Then any order within the bound that goes on from here can run S first and stay within the bound, because
live memory is submodular and what a node needs beside it never grows with the downset. Three ways to find such an S, cheapest first:

- a **single** node that adds nothing;
- a **chain**, each node made ready by the one before, until memory is back (it covers ICCAD'23, Theorem IV.2, on residual blocks);
- a **valley**: greedily run what became ready until memory is back, then shrink that to its cheapest sub-downset by a minimum cut.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from lowtide.base.kernels import kernel
from lowtide.schedule.cuts import select
from lowtide.schedule.downsets import DONE, EPOCH, LIVE, READY, DownsetNet, DownsetWalk, added_bytes, need_bytes, run, undo

CHAIN, VALLEY, TOUCHED, SWEPT = 400, 400, 256, 1024  # how far each looks, nodes


@kernel(inner=True)
def commit_all(net: DownsetNet, walk: DownsetWalk, bound_bytes: Any, since: Any, swept_bytes: Any) -> Any:
    """Runs safe sets until none is found. `bound_bytes` is the most that may be live at any step.

    Chains and valleys are tried from the ready nodes that the nodes run `since` have to do with. All others are tried only when less
    is live than when they were all tried in vain, which was at `swept_bytes`; returns that level for whoever goes on from here.
    """
    while True:
        _singles(net, walk, bound_bytes)
        nodes, since = _touched(net, walk, since), walk.registers[DONE]
        if _sweep(net, walk, nodes, bound_bytes):
            continue
        if walk.registers[READY] == 1 and _fits(net, walk, np.int64(walk.ready[0]), bound_bytes):
            run(net, walk, np.int64(walk.ready[0]))  # there is no other way
            continue
        if walk.registers[LIVE] >= swept_bytes or walk.registers[READY] > SWEPT:
            return swept_bytes
        nodes = walk.ready[: walk.registers[READY]].copy()
        if not (_valley(net, walk, nodes, bound_bytes) or _sweep(net, walk, nodes, bound_bytes)):
            return walk.registers[LIVE]


@kernel(inner=True, borrows=True)
def take_back(net: DownsetNet, walk: DownsetWalk, done: Any) -> None:
    """Undoes all but the first `done` nodes."""
    while walk.registers[DONE] > done:
        undo(net, walk)


@kernel(inner=True, borrows=True)
def _fits(net: DownsetNet, walk: DownsetWalk, node: Any, bound_bytes: Any) -> Any:
    return walk.registers[LIVE] + need_bytes(net, walk, node) <= bound_bytes


@kernel(inner=True, borrows=True)
def _singles(net: DownsetNet, walk: DownsetWalk, bound_bytes: Any) -> Any:
    """Runs ready nodes that add nothing; goes round until a whole round finds none."""
    before, position, missed = walk.registers[DONE], 0, 0
    while missed < walk.registers[READY]:
        if position >= walk.registers[READY]:
            position = 0
        node = np.int64(walk.ready[position])
        if walk.opens[node] <= walk.closes[node] and _fits(net, walk, node, bound_bytes):
            run(net, walk, node)  # its position in `ready` now holds another
            missed = 0
        else:
            position += 1
            missed += 1
    return walk.registers[DONE] > before


@kernel(inner=True)
def _touched(net: DownsetNet, walk: DownsetWalk, since: Any) -> Any:
    """Ready nodes on the way to nodes that wait for less, or free more, now that the nodes `since` have run: the nearest ones."""
    walk.registers[EPOCH] += 1
    queue, last = np.empty(TOUCHED, np.int32), np.int64(0)
    for step in range(walk.registers[DONE] - 1, since - 1, -1):
        node = walk.order[step]
        for entry in range(net.succ_ptr[node], net.succ_ptr[node + 1]):
            last = _note(walk, np.int64(net.succ_ids[entry]), queue, last)
        for entry in range(net.pin_ptr[node], net.pin_ptr[node + 1]):
            tensor = net.pin_ids[entry]
            if walk.ran[tensor] == net.pins[tensor] - 1:
                last = _note(walk, walk.left_sum[tensor], queue, last)
        if last == TOUCHED:
            break
    first, count = 0, 0
    while first < last:
        node = queue[first]
        first += 1
        if walk.position[node] >= 0:
            queue[count] = node
            count += 1
            continue
        for entry in range(net.pred_ptr[node], net.pred_ptr[node + 1]):
            last = _note(walk, np.int64(net.pred_ids[entry]), queue, last)
    return queue[:count]


@kernel(inner=True, borrows=True)
def _note(walk: DownsetWalk, node: Any, queue: Any, last: Any) -> Any:
    """Puts a node into the queue that has not run and was not there yet; forgets it where the queue is full."""
    if last == len(queue) or walk.seen[node] == walk.registers[EPOCH] or (walk.position[node] < 0 and walk.waits[node] == 0):
        return last
    walk.seen[node] = walk.registers[EPOCH]
    queue[last] = node
    return last + 1


@kernel(inner=True, borrows=True)
def _sweep(net: DownsetNet, walk: DownsetWalk, nodes: Any, bound_bytes: Any) -> Any:
    """Runs what is safe from each of `nodes`; whether anything was."""
    done = walk.registers[DONE]
    for node in nodes:
        if walk.position[node] >= 0:
            _chain(net, walk, np.int64(node), bound_bytes)
    if walk.registers[DONE] > done:
        return True
    for position in range(len(nodes)):
        if walk.position[nodes[position]] >= 0:
            _valley(net, walk, nodes[position : position + 1], bound_bytes)
    return walk.registers[DONE] > done


@kernel(inner=True, borrows=True)
def _chain(net: DownsetNet, walk: DownsetWalk, node: Any, bound_bytes: Any) -> Any:
    done, live = walk.registers[DONE], walk.registers[LIVE]
    for _ in range(CHAIN):
        if not _fits(net, walk, node, bound_bytes):
            break
        run(net, walk, node)
        if walk.registers[LIVE] <= live:
            return True
        newly, count = node, 0
        for entry in range(net.succ_ptr[node], net.succ_ptr[node + 1]):
            if walk.waits[net.succ_ids[entry]] == 0:
                newly = np.int64(net.succ_ids[entry])
                count += 1
        if count != 1:
            break
        node = newly
    take_back(net, walk, done)
    return False


@kernel(inner=True)
def _valley(net: DownsetNet, walk: DownsetWalk, nodes: Any, bound_bytes: Any) -> Any:
    done, live = walk.registers[DONE], walk.registers[LIVE]
    if not _roll_out(net, walk, nodes, bound_bytes):
        return False
    reached = walk.order[done : walk.registers[DONE]].copy()
    fallen = live - walk.registers[LIVE]
    take_back(net, walk, done)
    chosen = _cheapest(net, walk, reached, fallen)
    for position in range(len(reached)):
        if not chosen[position]:
            continue
        if not _fits(net, walk, np.int64(reached[position]), bound_bytes):
            take_back(net, walk, done)
            return False
        run(net, walk, np.int64(reached[position]))
    return True


@kernel(inner=True)
def _roll_out(net: DownsetNet, walk: DownsetWalk, nodes: Any, bound_bytes: Any) -> Any:
    """Runs what adds least among `nodes` and what they make ready, until memory is back where it was; takes all back if it never is."""
    done, live = walk.registers[DONE], walk.registers[LIVE]
    open_nodes = np.empty(len(nodes) + 4 * VALLEY, np.int32)
    for position in range(len(nodes)):
        open_nodes[position] = nodes[position]
    count = len(nodes)
    for _ in range(VALLEY):
        best, best_added, best_need = -1, np.int64(0), np.int64(0)
        for position in range(count):
            node = np.int64(open_nodes[position])
            added = added_bytes(walk, node)
            if best >= 0 and added > best_added:
                continue
            need = need_bytes(net, walk, node)
            if walk.registers[LIVE] + need > bound_bytes:
                continue
            if best < 0 or added < best_added or need < best_need or (need == best_need and node < open_nodes[best]):
                best, best_added, best_need = position, added, need
        if best < 0:
            break
        node = np.int64(open_nodes[best])
        count -= 1
        open_nodes[best] = open_nodes[count]
        run(net, walk, node)
        if walk.registers[LIVE] <= live:
            return True
        for entry in range(net.succ_ptr[node], net.succ_ptr[node + 1]):
            if walk.waits[net.succ_ids[entry]] == 0:
                if count == len(open_nodes):
                    open_nodes = np.concatenate((open_nodes, np.empty(count, np.int32)))
                open_nodes[count] = net.succ_ids[entry]
                count += 1
    take_back(net, walk, done)
    return False


@kernel(inner=True)
def _cheapest(net: DownsetNet, walk: DownsetWalk, reached: Any, fallen: Any) -> Any:
    """[reached] whether each node is in the sub-downset of `reached` of least live memory: all of them where none is cheaper."""
    position_of, index_of, pins = walk.position_of, walk.index_of, _numbered(net, walk, reached)
    k, count = len(reached), len(pins)
    opened, closed = k, k + count  # vertices: nodes, then each tensor once as opened, once as closed
    cost, gain = np.zeros(k + 2 * count, np.int64), np.zeros(k + 2 * count, np.int64)
    ptr = np.zeros(k + 2 * count + 1, np.int32)
    ids = np.empty(0, np.int32)
    for is_filling in (False, True):  # counts the arcs of each vertex first
        for position in range(k):
            node = reached[position]
            for entry in range(net.pin_ptr[node], net.pin_ptr[node + 1]):
                tensor = net.pin_ids[entry]
                index = index_of[tensor]
                if walk.ran[tensor] == 0:
                    cost[opened + index] = net.tensor_bytes[tensor]
                    _arc(position, opened + index, ptr, ids, is_filling)
                if walk.ran[tensor] + pins[index] == net.pins[tensor]:
                    gain[closed + index] = net.tensor_bytes[tensor]
                    _arc(closed + index, position, ptr, ids, is_filling)
            for entry in range(net.pred_ptr[node], net.pred_ptr[node + 1]):
                if position_of[net.pred_ids[entry]] >= 0:
                    _arc(position, position_of[net.pred_ids[entry]], ptr, ids, is_filling)
        if not is_filling:
            total = np.int32(0)
            for row in range(len(ptr)):  # from counts to where rows start; filling moves each start to its end
                total, ptr[row] = total + ptr[row], total
            ids = np.empty(total, np.int32)
    _forgotten(net, walk, reached)
    for row in range(len(ptr) - 1, 0, -1):
        ptr[row] = ptr[row - 1]
    ptr[0] = 0
    most = gain.sum()
    flow, chosen = select(ptr, ids, cost, gain, len(ptr))
    return np.ones(k, np.bool_) if most - flow <= fallen else chosen[:k]


@kernel(inner=True)
def _numbered(net: DownsetNet, walk: DownsetWalk, reached: Any) -> Any:
    """Numbers the nodes by position, and their tensors as they are met; by that number how many of a tensor's pins are among `reached`."""
    entries = 0
    for node in reached:
        entries += net.pin_ptr[node + 1] - net.pin_ptr[node]
    pins, count = np.zeros(entries, np.int32), 0
    for position in range(len(reached)):
        node = reached[position]
        walk.position_of[node] = position
        for entry in range(net.pin_ptr[node], net.pin_ptr[node + 1]):
            tensor = net.pin_ids[entry]
            if walk.index_of[tensor] < 0:
                walk.index_of[tensor] = count
                count += 1
            pins[walk.index_of[tensor]] += 1
    return pins[:count]


@kernel(inner=True, borrows=True)
def _forgotten(net: DownsetNet, walk: DownsetWalk, reached: Any) -> None:
    for node in reached:
        walk.position_of[node] = -1
        for entry in range(net.pin_ptr[node], net.pin_ptr[node + 1]):
            walk.index_of[net.pin_ids[entry]] = -1


@kernel(inner=True, borrows=True)
def _arc(tail: Any, head: Any, ptr: Any, ids: Any, is_filling: Any) -> None:
    """Counts an arc of `tail`, or puts it in the next position of its row."""
    if is_filling:
        ids[ptr[tail]] = head
    ptr[tail] += 1
