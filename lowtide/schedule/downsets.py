"""Downsets of an ordering problem, walked forth and back one node at a time, in either direction of time.

A downset is a set of executed nodes closed under predecessors. Its live memory depends on the set alone, not on the order in which
it was executed: a tensor is live while some of its *pins* (the node that makes it and those that read it) have run and others have
not. A tensor that is there from the start has one pin that has always run, a kept one has a pin that never does. Said like this, time
has no direction: run backwards, the last reader opens a tensor and its maker closes it, and everything else stays as it is.

Live memory is submodular over downsets, and what a node needs beside it while it runs never grows with the set, in both directions.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np

from lowtide.base.kernels import kernel
from lowtide.problems.order import OrderProblem, Rows

LIVE, HASH, SALT, READY, DONE, EPOCH, MOVES = range(7)  # registers of a walk


class DownsetNet(NamedTuple):
    """A problem as one direction of time sees it; read-only. Rows are `ptr`, `ids` pairs."""

    succ_ptr: Any  # [n + 1] nodes that wait for each node
    succ_ids: Any
    pred_ptr: Any  # [n + 1] nodes that each node waits for
    pred_ids: Any
    pin_ptr: Any  # [n + 1] tensors whose pin each node is
    pin_ids: Any
    open_ptr: Any  # [m + 1] nodes that may be the first pin of each tensor
    open_ids: Any
    take_ptr: Any  # [n + 1] tensors whose memory a node may take over
    take_ids: Any
    take_bytes: Any  # [n] what a reuse saves
    base_bytes: Any  # [n] what a node needs while it runs beside the tensors that it opens: its workspace and what nobody reads
    tensor_bytes: Any  # [m]
    pins: Any  # [m] pins that must run until the tensor is closed, the one that has always run among them
    started: Any  # [m] pins that have run before the first step: 0 or 1
    pin_sum: Any  # [m] the sum of the pins' node indices, so that the last one left is known by subtraction
    waits: Any  # [n] how many nodes each node waits for
    key: Any  # [n, 2] random words of each node: a downset's hash is the exclusive or of its nodes'
    backwards: Any  # 0 or 1
    live_bytes: Any  # before the first step
    target: Any  # how many nodes there are


class DownsetWalk(NamedTuple):
    ran: Any  # [m] pins that have run
    left_sum: Any  # [m] of the pins that have not run
    waits: Any  # [n]
    opens: Any  # [n] bytes that a node would open
    closes: Any  # [n] bytes that it would close
    ready: Any  # [n] the ready nodes, in no order: the first `registers[READY]`
    position: Any  # [n] of a node in `ready`, -1 where it is not there
    order: Any  # [n] the nodes that have run: the first `registers[DONE]`
    position_of: Any  # [n] for whoever numbers some nodes: -1 in between
    index_of: Any  # [m] the same of tensors
    seen: Any  # [n] the last epoch in which each node was looked at; `registers[EPOCH]` is the present one
    registers: Any  # [7] int64: see LIVE, ...


def net_of(problem: OrderProblem, backwards: bool = False) -> DownsetNet:
    """The problem as the forward or the backward direction of time sees it."""
    n, m = problem.node_count, problem.tensor_count
    readers = np.diff(problem.readers.ptr)
    given = problem.producer < 0
    pins = readers + 1 + problem.kept  # maker or start, readers, end; one more than there are where the last never runs
    pin_ptr, pin_ids = _pins(problem)
    if backwards:
        opener = problem.readers
        started = problem.kept
        pins = pins + given
    else:
        makers = np.where(given, 0, 1)
        opener = Rows(np.concatenate([[0], np.cumsum(makers)]).astype(np.int32), problem.producer[~given])
        started = given
        pins = pins + problem.kept
    pins = np.where(problem.uses == 0, 0, pins)  # of no tensor that outlives a step
    unread = np.where(problem.uses == 0, problem.tensor_bytes, 0)
    node_of = np.repeat(np.arange(n), np.diff(pin_ptr))
    pin_sum = np.zeros(m, np.int64)
    np.add.at(pin_sum, pin_ids, node_of)
    before, after = (problem.succs, problem.preds) if backwards else (problem.preds, problem.succs)
    net = DownsetNet(
        *after,
        *before,
        pin_ptr,
        pin_ids,
        *opener,
        *_takes(problem),
        np.where(problem.take_output >= 0, problem.tensor_bytes[problem.take_output] if m else 0, 0),
        problem.workspace_bytes + problem.sum_by_row(problem.outputs_of, unread),
        problem.tensor_bytes,
        pins.astype(np.int32),
        (started & (problem.uses > 0)).astype(np.int32),
        pin_sum,
        np.diff(before.ptr).astype(np.int32),
        np.random.default_rng(20231028).integers(-(2**63), 2**63 - 1, (n, 2), np.int64),
        int(backwards),
        int(problem.tensor_bytes[problem.kept].sum()) if backwards else problem.start_bytes,
        n,
    )
    # Copies, since numba compiles its kernels anew for arrays that are read-only.
    return DownsetNet(*(np.array(item) if isinstance(item, np.ndarray) else item for item in net))


def _pins(problem: OrderProblem) -> Rows:
    """By node: the tensors that it makes or reads and that live beyond one step."""
    n = problem.node_count
    ids = np.concatenate([problem.read_ids, problem.outputs_of.ids])
    nodes = np.concatenate([np.repeat(np.arange(n), np.diff(rows.ptr)) for rows in (problem.reads, problem.outputs_of)])
    nodes, ids = nodes[problem.uses[ids] > 0], ids[problem.uses[ids] > 0]
    by_node = np.argsort(nodes, kind="stable")
    ptr = np.concatenate([[0], np.cumsum(np.bincount(nodes, minlength=n))]).astype(np.int32)
    return Rows(ptr, ids[by_node].astype(np.int32))


def _takes(problem: OrderProblem) -> Rows:
    """By node: the candidates for a reuse that may die at it."""
    n = problem.node_count
    alive = ~problem.kept[problem.take_ids]
    nodes = np.repeat(np.arange(n), np.diff(problem.take_ptr))[alive]
    return Rows(np.concatenate([[0], np.cumsum(np.bincount(nodes, minlength=n))]).astype(np.int32), problem.take_ids[alive])


@kernel
def start(net: DownsetNet) -> Any:
    n, m = len(net.waits), len(net.tensor_bytes)
    walk = DownsetWalk(
        net.started.copy(),
        net.pin_sum.copy(),
        net.waits.copy(),
        np.zeros(n, np.int64),
        np.zeros(n, np.int64),
        np.empty(n, np.int32),
        np.full(n, -1, np.int32),
        np.empty(n, np.int32),
        np.full(n, -1, np.int32),
        np.full(m, -1, np.int32),
        np.zeros(n, np.int64),
        np.zeros(7, np.int64),
    )
    walk.registers[LIVE] = net.live_bytes
    for tensor in range(m):
        if net.pins[tensor] == 0:
            continue
        if walk.ran[tensor] == 0:
            _shift_opens(net, walk, tensor, net.tensor_bytes[tensor])
        elif walk.ran[tensor] == net.pins[tensor] - 1:
            walk.closes[walk.left_sum[tensor]] += net.tensor_bytes[tensor]
    for node in range(n):
        if walk.waits[node] == 0:
            _push(walk, node)
    return walk


@kernel(inner=True, borrows=True)
def need_bytes(net: DownsetNet, walk: DownsetWalk, node: Any) -> Any:
    """What a ready node adds to live memory while it runs."""
    for entry in range(net.take_ptr[node], net.take_ptr[node + 1]):
        tensor = net.take_ids[entry]
        # It dies at the node: forth where all other pins have run, back where none has.
        if walk.ran[tensor] == (0 if net.backwards else net.pins[tensor] - 1):
            return net.base_bytes[node] + walk.opens[node] - net.take_bytes[node]
    return net.base_bytes[node] + walk.opens[node]


@kernel(inner=True, borrows=True)
def added_bytes(walk: DownsetWalk, node: Any) -> Any:
    """What live memory has grown by once a ready node has run."""
    return walk.opens[node] - walk.closes[node]


@kernel(inner=True, borrows=True)
def run(net: DownsetNet, walk: DownsetWalk, node: Any) -> None:
    registers = walk.registers
    registers[MOVES] += 1
    registers[LIVE] += walk.opens[node] - walk.closes[node]
    for entry in range(net.pin_ptr[node], net.pin_ptr[node + 1]):
        tensor = np.int64(net.pin_ids[entry])
        if walk.ran[tensor] == 0:
            _shift_opens(net, walk, tensor, -net.tensor_bytes[tensor])
        walk.ran[tensor] += 1
        walk.left_sum[tensor] -= node
        if walk.ran[tensor] == net.pins[tensor] - 1:
            walk.closes[walk.left_sum[tensor]] += net.tensor_bytes[tensor]
    walk.order[registers[DONE]] = node
    registers[DONE] += 1
    registers[HASH] ^= net.key[node, 0]
    registers[SALT] ^= net.key[node, 1]
    _drop(walk, node)
    for entry in range(net.succ_ptr[node], net.succ_ptr[node + 1]):
        succ = np.int64(net.succ_ids[entry])
        walk.waits[succ] -= 1
        if walk.waits[succ] == 0:
            _push(walk, succ)


@kernel(inner=True, borrows=True)
def undo(net: DownsetNet, walk: DownsetWalk) -> Any:
    """Takes back the node that ran last, and says which."""
    registers = walk.registers
    registers[DONE] -= 1
    node = np.int64(walk.order[registers[DONE]])
    for entry in range(net.succ_ptr[node], net.succ_ptr[node + 1]):
        succ = np.int64(net.succ_ids[entry])
        if walk.waits[succ] == 0:
            _drop(walk, succ)
        walk.waits[succ] += 1
    _push(walk, node)
    registers[HASH] ^= net.key[node, 0]
    registers[SALT] ^= net.key[node, 1]
    for entry in range(net.pin_ptr[node], net.pin_ptr[node + 1]):
        tensor = np.int64(net.pin_ids[entry])
        if walk.ran[tensor] == net.pins[tensor] - 1:
            walk.closes[walk.left_sum[tensor]] -= net.tensor_bytes[tensor]
        walk.ran[tensor] -= 1
        walk.left_sum[tensor] += node
        if walk.ran[tensor] == 0:
            _shift_opens(net, walk, tensor, net.tensor_bytes[tensor])
    registers[LIVE] -= walk.opens[node] - walk.closes[node]
    return node


@kernel(inner=True, borrows=True)
def _shift_opens(net: DownsetNet, walk: DownsetWalk, tensor: Any, nbytes: Any) -> None:
    for entry in range(net.open_ptr[tensor], net.open_ptr[tensor + 1]):
        walk.opens[net.open_ids[entry]] += nbytes


@kernel(inner=True, borrows=True)
def _push(walk: DownsetWalk, node: Any) -> None:
    walk.position[node] = walk.registers[READY]
    walk.ready[walk.registers[READY]] = node
    walk.registers[READY] += 1


@kernel(inner=True, borrows=True)
def _drop(walk: DownsetWalk, node: Any) -> None:
    walk.registers[READY] -= 1
    last = walk.ready[walk.registers[READY]]
    walk.ready[walk.position[node]] = last
    walk.position[last] = walk.position[node]
    walk.position[node] = -1
