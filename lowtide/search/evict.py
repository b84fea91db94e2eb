"""Recomputation under a limit of bytes by eviction with look-ahead: a whole schedule for any limit, in milliseconds.

The nodes run in a given order within the limit. Where a node's results do not fit, those tensors are let go that cost least to make again
for their bytes and for the steps until they are wanted; where an input is missing, it is made again, with all that this wants. This is
Belady's rule with costs, planned before the run, when every next use is known; DTR (ICLR 2021) decides alike at run time, without knowing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numba import njit

from lowtide.ir.problem import Ints, OrderProblem, Rows
from lowtide.ir.problem_check import Task
from lowtide.search.runs import RunProblem, cost_of

_LONGEST = 12  # a sequence of more runs than this many times the nodes is no answer


@dataclass(frozen=True)
class Weights:
    """A tensor's score is `cost ** cost_power / (bytes ** bytes_power * steps ** steps_power)`; the least is let go first."""

    cost_power: float = 1.0
    bytes_power: float = 1.0
    steps_power: float = 1.0


def evict(
    problem: RunProblem,
    runs: Ints,
    limit_bytes: int,
    weights: Weights = Weights(),
) -> Ints | None:
    """A sequence that goes through `runs` in that order, and runs some nodes again, so that what is alive stays within the limit.

    Where `runs` itself repeats a node, what that makes is let go after its last reader before. None where this rule finds no sequence.
    The limit counts what is resident.
    """
    base = problem.problem
    found = _evict(
        runs, limit_bytes - base.resident_bytes, weights.cost_power, weights.bytes_power, weights.steps_power, problem.cost_us,
        problem.repeatable, *problem.limits, *base.reads, *base.outputs_of, *base.takes, base.take_output, base.tensor_bytes,
        base.made_bytes, base.workspace_bytes, base.kept, base.producer, len(base.names) * _LONGEST,
    )  # fmt: skip
    return found if len(found) else None


def rehearse_eviction() -> None:
    """Compile the kernels, or load them, so that it is not the first search that waits."""
    problem = OrderProblem.of([8, 8], [Task("make", makes=(0,)), Task("use", makes=(1,), reads=(0,))], kept=[1])
    rows = Rows(np.zeros(3, np.int32), np.zeros(0, np.int32))
    runs = RunProblem(problem, np.ones(2), np.zeros(2, np.bool_), np.ones(2, np.bool_), rows)
    order = runs.runs_of(np.arange(2))
    cost_of(runs, order)
    evict(runs, order, 16)


@njit(cache=True)
def _evict(
    base: Any, limit: Any, a: Any, b: Any, c: Any, cost_us: Any, repeatable: Any, limit_ptr: Any, limit_ids: Any, read_ptr: Any,
    read_ids: Any, made_ptr: Any, made_ids: Any, take_ptr: Any, take_ids: Any, take_output: Any, tensor_bytes: Any, made_bytes: Any,
    workspace_bytes: Any, kept: Any, producer: Any, longest: Any,
) -> Ints:  # fmt: skip
    """The sequence, or an empty one."""
    n, m, steps = len(made_bytes), len(tensor_bytes), len(base)
    step_of = np.full(n, steps, np.int64)
    for step in range(steps - 1, -1, -1):
        step_of[base[step]] = step
    until = np.full(n, steps, np.int64)  # the first step from which on a node may not be repeated
    for node in range(n):
        if not repeatable[node]:
            until[node] = -1
        for entry in range(limit_ptr[node], limit_ptr[node + 1]):
            until[node] = min(until[node], step_of[limit_ids[entry]])
    use_ptr, uses = _uses(base, step_of, read_ptr, read_ids, made_ptr, made_ids, m)
    at, use_end = use_ptr[:-1].copy(), use_ptr[1:]  # of each tensor: its next use from the present step on
    resident, lock = np.zeros(m, np.bool_), np.zeros(m, np.int32)
    level = np.int64(0)
    for tensor in range(m):
        if producer[tensor] < 0 and (use_end[tensor] > use_ptr[tensor] or kept[tensor]):
            resident[tensor] = True
            level += tensor_bytes[tensor]
    out = np.empty(longest, np.int32)
    count = 0
    frame_node, frame_entry = np.empty(n + 1, np.int32), np.empty(n + 1, np.int64)
    seen, stamp, stack = np.zeros(n, np.int64), 0, np.empty(n + 1, np.int32)
    score, rank = np.empty(m, np.float64), np.empty(m, np.int64)
    for step in range(steps):
        depth = 0 if step == step_of[base[step]] or _lacks(base[step], resident, made_ptr, made_ids, uses, use_end, at) else -1
        frame_node[0], frame_entry[0] = base[step], -1
        while depth >= 0:
            node = frame_node[depth]
            if frame_entry[depth] == -1:  # hold on to what is there already
                for entry in range(read_ptr[node], read_ptr[node + 1]):
                    if resident[read_ids[entry]]:
                        lock[read_ids[entry]] += 1
                frame_entry[depth] = read_ptr[node]
            missing = -1
            while frame_entry[depth] < read_ptr[node + 1]:
                tensor = read_ids[frame_entry[depth]]
                if not resident[tensor]:
                    missing = tensor
                    break
                frame_entry[depth] += 1
            if missing >= 0:
                maker = producer[missing]
                if maker < 0 or until[maker] <= step or depth >= n:
                    return out[:0]
                depth += 1
                frame_node[depth], frame_entry[depth] = maker, -1
                continue
            # All inputs are there and held. Make room, run.
            again = depth > 0
            need = made_bytes[node] + workspace_bytes[node]
            for entry in range(take_ptr[node], take_ptr[node + 1]):
                tensor = take_ids[entry]
                if lock[tensor] == 1 and not kept[tensor] and not _wanted(tensor, step, again, uses, use_end, at):
                    need -= tensor_bytes[take_output[node]]
                    break
            if level + need > limit:
                candidates = 0
                for tensor in range(m):
                    if not resident[tensor] or lock[tensor] > 0 or kept[tensor] or tensor_bytes[tensor] == 0:
                        continue
                    later = _next(tensor, step, again, uses, use_end, at)
                    if later < 0:
                        score[candidates], rank[candidates] = -1.0, tensor
                        candidates += 1
                        continue
                    if producer[tensor] < 0:
                        continue
                    stamp += 1
                    remake = _remake_us(producer[tensor], later, until, resident, producer, read_ptr, read_ids, cost_us, seen, stamp, stack)
                    if remake < 0:
                        continue
                    score[candidates] = remake**a / (tensor_bytes[tensor] ** b * max(1.0, float(later - step)) ** c)
                    rank[candidates] = tensor
                    candidates += 1
                for place in np.argsort(score[:candidates], kind="mergesort"):
                    if level + need <= limit:
                        break
                    resident[rank[place]] = False
                    level -= tensor_bytes[rank[place]]
                if level + need > limit:
                    return out[:0]
            if count >= longest:
                return out[:0]
            out[count] = node
            count += 1
            for entry in range(read_ptr[node], read_ptr[node + 1]):
                tensor = read_ids[entry]
                lock[tensor] -= 1
                if lock[tensor] == 0 and not kept[tensor] and not _wanted(tensor, step, again, uses, use_end, at):
                    resident[tensor] = False
                    level -= tensor_bytes[tensor]
            wanted = read_ids[frame_entry[depth - 1]] if again else -1
            for entry in range(made_ptr[node], made_ptr[node + 1]):
                tensor = made_ids[entry]
                if resident[tensor]:
                    continue
                if tensor == wanted or kept[tensor] or _wanted(tensor, step, again, uses, use_end, at):
                    resident[tensor] = True
                    level += tensor_bytes[tensor]
            if again:
                lock[wanted] += 1  # held for the run below, which has not read it yet
                frame_entry[depth - 1] += 1
            depth -= 1
        for entry in range(read_ptr[base[step]], read_ptr[base[step] + 1]):
            at[read_ids[entry]] += 1
        if step > step_of[base[step]]:
            for entry in range(made_ptr[base[step]], made_ptr[base[step] + 1]):
                at[made_ids[entry]] += 1
    return out[:count].copy()


@njit(cache=True)
def _uses(base: Any, step_of: Any, read_ptr: Any, read_ids: Any, made_ptr: Any, made_ids: Any, m: Any) -> tuple[Any, Any]:
    """By tensor the steps at which it is read, ascending, as rows laid end to end; `-1 - step` where it is made once more."""
    use_ptr = np.zeros(m + 1, np.int64)
    for turn in range(2):  # count, then fill
        if turn == 1:
            use_ptr = np.concatenate((np.zeros(1, np.int64), np.cumsum(use_ptr[:-1])))
            fill, uses = use_ptr[:-1].copy(), np.empty(use_ptr[-1], np.int64)
        for step in range(len(base)):
            node = base[step]
            for entry in range(read_ptr[node], read_ptr[node + 1]):
                if turn == 0:
                    use_ptr[read_ids[entry]] += 1
                else:
                    uses[fill[read_ids[entry]]] = step
                    fill[read_ids[entry]] += 1
            if step > step_of[node]:
                for entry in range(made_ptr[node], made_ptr[node + 1]):
                    if turn == 0:
                        use_ptr[made_ids[entry]] += 1
                    else:
                        uses[fill[made_ids[entry]]] = -1 - step
                        fill[made_ids[entry]] += 1
    return use_ptr, uses


@njit(cache=True)
def _lacks(node: Any, resident: Any, made_ptr: Any, made_ids: Any, uses: Any, use_end: Any, at: Any) -> bool:
    """Whether something that a node makes and that is read later is not there."""
    for entry in range(made_ptr[node], made_ptr[node + 1]):
        tensor = made_ids[entry]
        later = at[tensor] + 1  # past the mark that it is made now
        if not resident[tensor] and later < use_end[tensor] and uses[later] >= 0:
            return True
    return False


@njit(cache=True)
def _next(tensor: Any, step: Any, again: Any, uses: Any, use_end: Any, at: Any) -> int:
    """The step at which what there is of a tensor is read next; -1 for never. The present step counts while it has not run."""
    entry = at[tensor]
    if entry < use_end[tensor] and ((uses[entry] == step and not again) or uses[entry] == -1 - step):
        entry += 1
    return max(uses[entry], -1) if entry < use_end[tensor] else -1


@njit(cache=True)
def _wanted(tensor: Any, step: Any, again: Any, uses: Any, use_end: Any, at: Any) -> bool:
    return _next(tensor, step, again, uses, use_end, at) >= 0


@njit(cache=True)
def _remake_us(
    maker: Any, when: Any, until: Any, resident: Any, producer: Any, read_ptr: Any, read_ids: Any, cost_us: Any, seen: Any, stamp: Any,
    stack: Any,
) -> float:  # fmt: skip
    """What it costs to run a node again with all that it misses now; -1 where something could not be run at step `when`."""
    total, top = 0.0, 0
    stack[0] = maker
    seen[maker] = stamp
    while top >= 0:
        node = stack[top]
        top -= 1
        if until[node] <= when:
            return -1.0
        total += cost_us[node]
        for entry in range(read_ptr[node], read_ptr[node + 1]):
            tensor = read_ids[entry]
            if resident[tensor]:
                continue
            if producer[tensor] < 0:
                return -1.0
            if seen[producer[tensor]] != stamp:
                seen[producer[tensor]] = stamp
                top += 1
                stack[top] = producer[tensor]
    return total
