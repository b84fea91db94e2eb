"""One sweep over the downsets of a problem, level by level: the kernel of the dynamic programme.

A downset's live memory is a function of the set alone, and so is what a node needs beside it: see `cost.memory`.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lowtide.base.kernels import kernel
from lowtide.problems.order import OrderProblem

SOLVED, NONE, WIDE = range(3)  # outcomes of a sweep
UNBOUNDED = 2**62  # bytes: all sizes together are at most that


class Net(NamedTuple):
    """A problem as the sweep reads it; rows are `ptr`, `ids` pairs."""

    pred_ptr: Any
    pred_ids: Any
    succ_ptr: Any
    succ_ids: Any
    read_ptr: Any
    read_ids: Any
    reader_ptr: Any
    reader_ids: Any
    take_ptr: Any
    take_ids: Any
    take_bytes: Any  # [n] what a reuse saves
    own_bytes: Any  # [n] what a node needs beside what is live, without a reuse
    lasting_bytes: Any  # [n] of that, what outlives it
    tensor_bytes: Any
    kept: Any
    key: Any  # [n] random words: a downset's hash is the exclusive or of its nodes'
    start_bytes: Any


class _Level(NamedTuple):
    """Downsets of equally many nodes, one a row; sets are bits in words."""

    done: Any  # [rows, words]
    ready: Any  # [rows, words] nodes whose predecessors are done: Serenity's zero-indegree set
    live_bytes: Any  # [rows]
    peak_bytes: Any  # [rows] the least of all ways to get here
    hash: Any  # [rows]
    parent: Any  # [rows] the row in the level before
    via: Any  # [rows] the node that was run last


def net_of(problem: OrderProblem) -> Net:
    """The arrays of a problem with at least one node."""
    size, output = problem.tensor_bytes, problem.take_output
    return Net(
        *problem.preds, *problem.succs, *problem.reads, *problem.readers, *problem.takes,
        take_bytes=np.where(output >= 0, size[output] if len(size) else 0, 0),
        own_bytes=problem.made_bytes + problem.workspace_bytes,
        lasting_bytes=problem.sum_by_row(problem.outputs_of, np.where(problem.uses > 0, size, 0)),
        tensor_bytes=size,
        kept=problem.kept,
        key=np.random.default_rng(0).integers(0, 2**64, problem.node_count, np.uint64),
        start_bytes=problem.start_bytes,
    )  # fmt: skip


def state_bytes(n: int) -> int:
    """The memory that a downset of `n` nodes takes, its two slots in the table included."""
    return 16 * (n // 64 + 1) + 48


@kernel(inner=True, borrows=True)
def _words(n: Any) -> Any:
    return n // 64 + 1


@kernel(inner=True, borrows=True)
def _has(bits: Any, node: Any) -> Any:
    return bits[node >> 6] >> np.uint64(node & 63) & np.uint64(1) != 0


@kernel(inner=True, borrows=True)
def _flip(bits: Any, node: Any) -> None:
    bits[node >> 6] ^= np.uint64(1) << np.uint64(node & 63)


@kernel(inner=True)
def _level(rows: Any, words: Any) -> Any:
    """Room for so many downsets."""
    done, ready = np.empty((rows, words), np.uint64), np.empty((rows, words), np.uint64)
    live_bytes, peak_bytes, hashes = np.empty(rows, np.int64), np.empty(rows, np.int64), np.empty(rows, np.uint64)
    return _Level(done, ready, live_bytes, peak_bytes, hashes, np.empty(rows, np.int32), np.empty(rows, np.int32))


@kernel(inner=True)
def _grown(level: Any) -> Any:
    """The same rows, with room for twice as many."""
    rows, words = level.done.shape
    wider = _level(2 * rows, words)
    for row in range(rows):
        for word in range(words):  # by element: numba takes seconds to compile assignments of slices
            wider.done[row, word], wider.ready[row, word] = level.done[row, word], level.ready[row, word]
        wider.live_bytes[row], wider.peak_bytes[row] = level.live_bytes[row], level.peak_bytes[row]
        wider.hash[row], wider.parent[row], wider.via[row] = level.hash[row], level.parent[row], level.via[row]
    return wider


@kernel(inner=True, borrows=True)
def _dies(net: Any, done: Any, tensor: Any, node: Any) -> Any:
    """Whether nobody needs a tensor any more once `node`, which reads it, has run."""
    if net.kept[tensor]:
        return False
    for entry in range(net.reader_ptr[tensor], net.reader_ptr[tensor + 1]):
        reader = net.reader_ids[entry]
        if reader != node and not _has(done, reader):
            return False
    return True


@kernel(inner=True, borrows=True)
def _need_bytes(net: Any, done: Any, node: Any) -> Any:
    """What a node needs beside what is live, were it to run now."""
    for entry in range(net.take_ptr[node], net.take_ptr[node + 1]):
        if _dies(net, done, net.take_ids[entry], node):
            return net.own_bytes[node] - net.take_bytes[node]
    return net.own_bytes[node]


@kernel(inner=True, borrows=True)
def _change_bytes(net: Any, done: Any, node: Any) -> Any:
    """What a node adds to live memory, were it to run now."""
    change = net.lasting_bytes[node]
    for entry in range(net.read_ptr[node], net.read_ptr[node + 1]):
        if _dies(net, done, net.read_ids[entry], node):
            change -= net.tensor_bytes[net.read_ids[entry]]
    return change


@kernel(inner=True, borrows=True)
def _slot(table: Any, mask: Any, level: Any, done: Any, node: Any, hash_: Any) -> Any:
    """The slot of the table that holds the downset `done` and `node`, or the free one where it belongs."""
    slot = np.int64(hash_ & np.uint64(mask))
    while table[slot] >= 0:
        row = table[slot]
        if level.hash[row] == hash_ and _is_with(level.done[row], done, node):
            return slot
        slot = (slot + 1) & mask
    return slot


@kernel(inner=True, borrows=True)
def _is_with(bits: Any, done: Any, node: Any) -> Any:
    """Whether `bits` are those of `done` and `node`."""
    for word in range(len(bits)):
        expected = done[word] | np.uint64(1) << np.uint64(node & 63) if word == node >> 6 else done[word]
        if bits[word] != expected:
            return False
    return True


@kernel(inner=True, borrows=True)
def _refill(table: Any, mask: Any, hashes: Any, rows: Any) -> None:
    """Puts so many rows into a table that is cleared first; they are known to be distinct."""
    for entry in range(mask + 1):
        table[entry] = -1
    for row in range(rows):
        slot = np.int64(hashes[row] & np.uint64(mask))
        while table[slot] >= 0:
            slot = (slot + 1) & mask
        table[slot] = row


@kernel(inner=True, borrows=True)
def _put(net: Any, here: Any, row: Any, node: Any, there: Any, to: Any) -> None:
    """Writes the downset that `node` makes of `here`'s row into a new row of the next level; its peak and origin are yet to come."""
    for word in range(here.done.shape[1]):
        there.done[to, word], there.ready[to, word] = here.done[row, word], here.ready[row, word]
    _flip(there.done[to], node)
    _flip(there.ready[to], node)
    for entry in range(net.succ_ptr[node], net.succ_ptr[node + 1]):
        succ = net.succ_ids[entry]
        waits = False
        for before in range(net.pred_ptr[succ], net.pred_ptr[succ + 1]):
            waits |= not _has(there.done[to], net.pred_ids[before])
        if not waits:
            _flip(there.ready[to], succ)
    there.live_bytes[to] = here.live_bytes[row] + _change_bytes(net, here.done[row], node)
    there.hash[to] = here.hash[row] ^ net.key[node]
    there.peak_bytes[to] = UNBOUNDED + 1


@kernel(inner=True, borrows=True)
def _start(net: Any, level: Any) -> None:
    """Writes the empty downset into row 0."""
    for word in range(level.done.shape[1]):
        level.done[0, word], level.ready[0, word] = 0, 0
    for node in range(len(net.own_bytes)):
        if net.pred_ptr[node] == net.pred_ptr[node + 1]:
            _flip(level.ready[0], node)
    level.live_bytes[0], level.peak_bytes[0], level.hash[0], level.parent[0], level.via[0] = net.start_bytes, 0, 0, -1, -1


@kernel(inner=True, borrows=True)
def _members(bits: Any, nodes: Any) -> Any:
    """Writes the members of a set into `nodes`, ascending; how many there are."""
    count = 0
    for word in range(len(bits)):
        left, node = bits[word], 64 * word
        while left:
            if left & np.uint64(1):
                nodes[count], count = node, count + 1
            left, node = left >> np.uint64(1), node + 1
    return count


@kernel(inner=True)
def _next_level(net: Any, here: Any, rows: Any, there: Any, table: Any, nodes: Any, budget_bytes: Any, room: Any) -> Any:
    """Writes all that one more node makes of `here`'s rows within the budget into `there`, each downset once.

    The level and its table, which may have grown; how many rows it has, `room` + 1 where they did not fit; and the least that was refused.
    """
    count, mask, refused_bytes = 0, 63, np.int64(UNBOUNDED + 1)
    _refill(table, mask, there.hash, 0)
    for row in range(rows):
        for index in range(_members(here.ready[row], nodes)):
            node = nodes[index]
            step_bytes = here.live_bytes[row] + _need_bytes(net, here.done[row], node)
            if step_bytes > budget_bytes:
                refused_bytes = min(refused_bytes, step_bytes)
                continue
            slot = _slot(table, mask, there, here.done[row], node, here.hash[row] ^ net.key[node])
            to = np.int64(table[slot])
            if to < 0:
                if count == room:
                    return there, table, room + 1, refused_bytes
                if count == len(there.via):
                    there = _grown(there)
                to, table[slot], count = np.int64(count), count, count + 1
                _put(net, here, row, node, there, to)
                if 2 * count > mask:
                    mask = 4 * mask + 3
                    table = table if mask < len(table) else np.empty(mask + 1, np.int32)
                    _refill(table, mask, there.hash, count)
            peak_bytes = max(here.peak_bytes[row], step_bytes)
            if peak_bytes < there.peak_bytes[to]:
                there.peak_bytes[to], there.parent[to], there.via[to] = peak_bytes, row, node
    return there, table, count, refused_bytes


@kernel(inner=True)
def _recorded(trace: Any, offset: Any, level: Any, rows: Any) -> Any:
    """The trace with the origins of a level's rows written from `offset` on; a longer one where it was full."""
    if offset + rows > len(trace):
        longer = np.empty((2 * (offset + rows), 2), np.int32)
        for entry in range(offset):
            longer[entry, 0], longer[entry, 1] = trace[entry, 0], trace[entry, 1]
        trace = longer
    for row in range(rows):
        trace[offset + row, 0], trace[offset + row, 1] = level.parent[row], level.via[row]
    return trace


@kernel
def sweep(net: Any, budget_bytes: Any, width: Any, max_states: Any) -> Any:
    """Outcome, the optimum or what every order needs at least, states kept, and the order where solved.

    SOLVED where an order within the budget was found, and then its peak is the least of all. NONE where there is no such order: each
    has to take one of the steps that were refused. WIDE where a level has more than `width` states, or all levels more than `max_states`.
    """
    n = len(net.own_bytes)
    here, there, rows = _level(16, _words(n)), _level(16, _words(n)), 1
    table, nodes, order = np.empty(64, np.int32), np.empty(n, np.int32), np.empty(n, np.int32)
    trace, offset, least_refused_bytes = np.empty((64, 2), np.int32), np.zeros(n + 1, np.int64), np.int64(UNBOUNDED + 1)
    _start(net, here)
    for step in range(n):
        room = min(width, max_states - offset[step])
        there, table, count, refused_bytes = _next_level(net, here, rows, there, table, nodes, budget_bytes, room)
        if count > room:
            return WIDE, 0, offset[step] + room, order
        least_refused_bytes = min(least_refused_bytes, refused_bytes)
        if count == 0:
            return NONE, least_refused_bytes, offset[step], order
        trace = _recorded(trace, offset[step], there, count)
        offset[step + 1] = offset[step] + count
        here, there, rows = there, here, count
    row = 0
    for step in range(n - 1, -1, -1):
        order[step], row = trace[offset[step] + row, 1], trace[offset[step] + row, 0]
    return SOLVED, here.peak_bytes[0], offset[n], order
