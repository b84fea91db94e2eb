"""An order carried over to a changed problem: what both have keeps its place, what is new goes where memory likes it best."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import ArrayLike, NDArray

from lowtide.base.kernels import kernel
from lowtide.errors import CheckError
from lowtide.problems.order import Ints, OrderProblem

Moved: TypeAlias = Mapping[int, int] | ArrayLike  # by old node: its index now; -1, or absent from a mapping, where it is gone


class Carried(NamedTuple):
    """An order carried over, and the steps that have to do with what changed: from `first` to `last`, or none where `last` < `first`."""

    order: Ints  # [n]
    first: int
    last: int


def carry_over(problem: OrderProblem, old_order: ArrayLike, moved: Moved) -> Carried:
    """A topological order of `problem` in which the nodes of `old_order` stand as they stood, as far as new edges allow.

    `old_order` holds the nodes of another problem, all of them, and `moved` says what became of each. A node without an origin runs as soon
    as it adds nothing to live memory, as a store does, else right before the first node that waits for it, as a load or a second
    computation does. A node that new edges put after others runs where it was, and they right before it.

    What changed is: nodes without an origin, who makes and reads the tensors that they make and read, nodes that stand in another order
    than before, and those that stood beside one that is gone. In O(nodes + edges).

    Raises CheckError where `old_order` is no permutation, or `moved` has another length, an unknown node, or one node for two old ones.
    """
    steps = np.asarray(old_order, np.int64).reshape(-1)
    targets = _targets(moved, len(steps))
    misplaced, misled = _first_wrong(steps, targets, problem.node_count)
    if misplaced >= 0:
        expected = f"each of {len(steps)} nodes once"
        raise CheckError(f"old order: expected {expected}, got node {steps[misplaced]} at step {misplaced}: is it another problem's order?")
    if misled >= 0:
        expected = f"-1 or one of {problem.node_count} nodes that no other old node became"
        raise CheckError(f"moved: expected {expected}, got node {targets[misled]} for old node {misled}")
    sequence = targets[steps]
    order = _carry(sequence, *problem.preds, *problem.reads, *problem.outputs_of, problem.tensor_bytes, problem.uses, problem.kept)
    first, last = _changed(sequence, order, *problem.reads, *problem.readers, *problem.outputs_of, problem.producer)
    return Carried(order, int(first), int(last))


def _targets(moved: Moved, count: int) -> NDArray[np.int64]:
    """[old n] what became of each old node, -1 where it is gone."""
    if isinstance(moved, Mapping):
        targets = np.full(count, -1, np.int64)
        for old, new in moved.items():
            if not 0 <= old < count:
                raise CheckError(f"moved: expected old nodes from 0 to {count - 1}, as the old order has, got {old}")
            targets[old] = new
        return targets
    targets = np.asarray(moved, np.int64).reshape(-1)
    if len(targets) != count:
        raise CheckError(f"moved: expected an entry for each of the {count} nodes of the old order, got {len(targets)}")
    return targets


@kernel
def _first_wrong(steps: Any, targets: Any, n: Any) -> tuple[int, int]:
    """The first step of an order whose node is unknown or has run before, and the first node whose target is; -1 where all is well."""
    seen = np.zeros(len(steps), np.bool_)
    for step in range(len(steps)):
        if steps[step] < 0 or steps[step] >= len(steps) or seen[steps[step]]:
            return step, -1
        seen[steps[step]] = True
    taken = np.zeros(n, np.bool_)
    for old in range(len(targets)):
        if targets[old] < -1 or targets[old] >= n or (targets[old] >= 0 and taken[targets[old]]):
            return -1, old
        if targets[old] >= 0:
            taken[targets[old]] = True
    return -1, -1


@kernel
def _carry(
    sequence: Any, pred_ptr: Any, pred_ids: Any, read_ptr: Any, read_ids: Any, made_ptr: Any, made_ids: Any, tensor_bytes: Any, uses: Any,
    kept: Any,
) -> NDArray[np.int32]:  # fmt: skip
    """Depth first along predecessors from the nodes of `sequence` (-1: none), then from the new ones that nobody waited for."""
    n = len(pred_ptr) - 1
    waits, added_bytes, by_pred, by_tensor, new, next_ = _new_nodes(
        sequence, pred_ptr, pred_ids, read_ptr, read_ids, made_ptr, made_ids, tensor_bytes, uses, kept
    )
    fresh = np.flatnonzero(waits >= 0)
    at_once = np.flatnonzero((waits == 0) & (added_bytes <= 0))
    roots, stack = np.concatenate((at_once, sequence[sequence >= 0], fresh)), np.empty(n + len(fresh) + 1, np.int32)
    order, step, done, entry, left = np.empty(n, np.int32), 0, np.zeros(n, np.bool_), pred_ptr[:-1].copy(), uses.copy()
    for root in roots:
        stack[0], depth = root, 1
        while depth:
            node = stack[depth - 1]
            while entry[node] < pred_ptr[node + 1] and done[pred_ids[entry[node]]]:
                entry[node] += 1
            if entry[node] < pred_ptr[node + 1]:
                stack[depth], depth = pred_ids[entry[node]], depth + 1
                continue
            depth -= 1
            if done[node]:  # a new one, as soon as it could
                continue
            order[step], step, done[node] = node, step + 1, True
            for position in range(read_ptr[node], read_ptr[node + 1]):
                tensor = read_ids[position]
                left[tensor] -= 1
                link = by_tensor[tensor] if left[tensor] == 1 and not kept[tensor] else -1
                while link >= 0:
                    other, link = new[link], next_[link]
                    if not done[other]:  # the only one left to read the tensor
                        added_bytes[other] -= tensor_bytes[tensor]
                        if waits[other] == 0 and added_bytes[other] <= 0:
                            stack[depth], depth, waits[other] = other, depth + 1, -1
            link = by_pred[node]
            while link >= 0:
                other, link = new[link], next_[link]
                waits[other] -= 1
                if waits[other] == 0 and added_bytes[other] <= 0:
                    stack[depth], depth, waits[other] = other, depth + 1, -1
    return order


@kernel(inner=True)
def _new_nodes(
    sequence: Any, pred_ptr: Any, pred_ids: Any, read_ptr: Any, read_ids: Any, made_ptr: Any, made_ids: Any, tensor_bytes: Any, uses: Any,
    kept: Any,
) -> Any:  # fmt: skip
    """What the nodes without an origin wait for, so that a pass over all nodes notices when one of them is free to run.

    By node: how many predecessors a new one waits for (-1 of all others), what it adds to live memory, and the first link of a list of new
    nodes that come after it. By tensor: the first link of a list of new nodes that read it. By link: the new node, and the next link.
    """
    n, links = len(pred_ptr) - 1, 0
    waits, added_bytes = np.zeros(n, np.int32), np.zeros(n, np.int64)
    for node in sequence:
        if node >= 0:
            waits[node] = -1
    fresh = np.flatnonzero(waits == 0)
    for node in fresh:
        waits[node] = pred_ptr[node + 1] - pred_ptr[node]
        links += waits[node] + read_ptr[node + 1] - read_ptr[node]
    by_pred, by_tensor = np.full(n, -1, np.int32), np.full(len(uses), -1, np.int32)
    new, next_, link = np.empty(links, np.int32), np.empty(links, np.int32), 0
    for node in fresh:
        for position in range(pred_ptr[node], pred_ptr[node + 1]):
            new[link], next_[link], by_pred[pred_ids[position]] = node, by_pred[pred_ids[position]], link
            link += 1
        for position in range(read_ptr[node], read_ptr[node + 1]):
            tensor = read_ids[position]
            new[link], next_[link], by_tensor[tensor] = node, by_tensor[tensor], link
            link += 1
            if uses[tensor] == 1 and not kept[tensor]:  # nobody else reads it
                added_bytes[node] -= tensor_bytes[tensor]
        for position in range(made_ptr[node], made_ptr[node + 1]):
            if uses[made_ids[position]]:
                added_bytes[node] += tensor_bytes[made_ids[position]]
    return waits, added_bytes, by_pred, by_tensor, new, next_


@kernel
def _changed(
    sequence: Any, order: Any, read_ptr: Any, read_ids: Any, reader_ptr: Any, reader_ids: Any, made_ptr: Any, made_ids: Any, producer: Any
) -> tuple[int, int]:
    """The first and the last step of nodes that are new or share a tensor with one, stand elsewhere, or stood beside one that is gone."""
    n = len(order)
    is_touched, step_of, is_new = np.zeros(n, np.bool_), np.empty(n, np.int32), np.ones(n, np.bool_)
    for step in range(n):
        step_of[order[step]] = step
    before, gone, step = -1, False, 0
    for node in sequence:
        if node < 0:
            gone = True
            if before >= 0:
                is_touched[before] = True
            continue
        is_new[node] = False
        if gone:
            is_touched[node], gone = True, False
        before = node
    for node in sequence:
        if node >= 0:
            while is_new[order[step]]:
                step += 1
            if order[step] != node:
                is_touched[order[step]] = is_touched[node] = True
            step += 1
    for node in np.flatnonzero(is_new):
        is_touched[node] = True
        for rows in ((read_ptr[node], read_ptr[node + 1], read_ids), (made_ptr[node], made_ptr[node + 1], made_ids)):
            for position in range(rows[0], rows[1]):
                tensor = rows[2][position]
                if producer[tensor] >= 0:
                    is_touched[producer[tensor]] = True
                for other in range(reader_ptr[tensor], reader_ptr[tensor + 1]):
                    is_touched[reader_ids[other]] = True
    touched = step_of[is_touched]
    return (touched.min(), touched.max()) if len(touched) else (n, -1)
