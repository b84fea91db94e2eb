"""Recomputation and swapping under a limit of bytes by eviction with look-ahead: a whole schedule for any limit, in milliseconds.

The nodes run in a given order within the limit. Where a node's results do not fit, those tensors are evicted that cost least to restore for
their bytes and for the steps until they are wanted. Where an input is missing, it is restored: made again, with all that this wants, or
loaded.
This is Belady's rule with costs, planned before the run, when every next use is known; DTR (ICLR 2021) decides alike at run time, without
knowing. Where there are links to a host, what takes long to make again is stored whenever the link is free, so that it can be dropped at
no cost when room is wanted, and is loaded as much ahead of its reader as the load takes. Stores of what is never dropped are left out.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from functools import lru_cache
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
from numpy.typing import NDArray

from lowtide.base.kernels import kernel
from lowtide.problems.order import Ints, OrderProblem, Rows, Task
from lowtide.remat.cost import cost_of, first_wrong
from lowtide.remat.links import better_loaded, load, load_ahead, restore_offloaded, store_ahead, weigh
from lowtide.remat.problem import RematProblem
from lowtide.remat.state import (
    BYSTANDER,
    ENTRY,
    NOTHING,
    NOW,
    POOL,
    STORED,
    EvictionState,
    blank,
    emit,
    first_steps,
    free,
    is_over,
    next_use,
    settle,
    start,
    unpin,
    use_rows,
)
from lowtide.remat.victims import has_room, make_room

_LONGEST = 12  # a sequence of more entries than this many times the nodes is no answer
_VISITS, _VISITS_A_STEP = 1_000_000, 1_000  # at tensors and nodes; where rules lead on, a step takes 250 at most
_USUAL, _VISITS_A_RUN = 4, 12  # visits a run of most programs; and as many as take as long as a run and its usual ones
_WORKS = 4  # problems whose arrays a thread keeps
_ENDLESS = 2**62  # bytes of a host without a limit
_CHUNK = 512  # steps: what their distances count for is kept for so many more at once


@dataclass(frozen=True)
class ScoreWeights:
    """A tensor's score is `cost ** cost_power / (bytes ** bytes_power * steps ** steps_power)`; the least is evicted first.

    Swapping: a tensor is stored while the link is free if making it takes `store_above` times as long as storing it, or more (inf: nothing
    is swapped); what is worth most for its bytes is stored first, worth counted up to `store_cap`. A load counts `load_weight` of its time
    as cost, as it runs beside operators. Loads take `lead` times as long as they do, and all that are to come start as early as they then
    have to, one behind the other; with `pushes` others make room even for one that starts early for the sake of those behind it.
    """

    cost_power: float = 1.0
    bytes_power: float = 1.0
    steps_power: float = 1.0
    store_above: float = np.inf
    store_cap: float = 1.0
    load_weight: float = 0.2
    lead: float = 1.5
    pushes: bool = False


@dataclass(frozen=True, eq=False)
class Bias:
    """Exceptions from the rule, by tensor [m]: factors on its score, and on its worth where something to store is chosen; 1 for none."""

    keep: NDArray[np.float64]
    store: NDArray[np.float64]


@dataclass(frozen=True, eq=False)
class EvictionResult:
    sequence: Ints
    roles: NDArray[np.int8]  # [m] what each tensor had to do with it: BYSTANDER, WEIGHED or CHOSEN, see `remat.state`


@dataclass(frozen=True, eq=False)
class EvictionAttempt:
    """What came of an eviction, and what it took, in runs of nodes: those of the sequence, and as many as choosing victims was worth."""

    result: EvictionResult | None
    runs: int


def attempt(
    problem: RematProblem,
    sequence: Ints,
    limit_bytes: int,
    weights: ScoreWeights = ScoreWeights(),
    bias: Bias | None = None,
    *,
    reserve: tuple[int, int] | None = None,
    pinned_bytes: int | None = None,
) -> EvictionAttempt:
    """A sequence that goes through `sequence` in that order, and runs some nodes again, so that what is alive stays within the limit.

    Where `sequence` itself repeats a node, what that makes is freed after its last reader before. None where this rule finds no sequence.
    The limit counts what is resident. `reserve`: a node, and the bytes that it is to find free while it runs, whatever its workspace is.
    `pinned_bytes`: what copies on the host are to keep to. A buffer is counted from the drop on, so that a sequence may need somewhat more:
    `price_of` says how much. Where much is alive for long, choosing victims takes most of the time.
    """
    work, by_bytes = _work_on(problem), problem.by_bytes(weights.bytes_power)
    known = work.state
    if len(sequence) > len(known.out):
        return EvictionAttempt(None, len(sequence))
    work.now[:] = _rule(weights)
    known.now["limit_bytes"] = limit_bytes - problem.problem.resident_bytes
    known.now["most_pinned_bytes"] = _ENDLESS if pinned_bytes is None else pinned_bytes
    known.now["reserve_node"], known.now["reserve_bytes"] = (-1, 0) if reserve is None else reserve
    known.now["most_visits"] = _VISITS + _VISITS_A_STEP * len(sequence)
    if bias is not None:
        by_bytes = by_bytes / bias.keep
    by_steps = _powers(weights.steps_power, len(sequence) // _CHUNK + 1)
    by_store = work.ones if bias is None else bias.store
    fits, entries = go_through(sequence, by_steps, by_bytes, by_store, problem.records[0], known)
    runs = len(entries) if fits else len(sequence)
    runs += max(0, int(known.now[0]["visits"]) - _USUAL * runs) // _VISITS_A_RUN
    return EvictionAttempt(EvictionResult(entries, known.roles.copy()) if fits else None, runs)


class _Work:
    """The arrays in which a thread works on a problem. New ones for each call would cost as much as eviction, in pages that are cleared."""

    def __init__(self, problem: RematProblem) -> None:
        tensors, nodes, ids = problem.records
        longest, none = problem.problem.node_count * _LONGEST, np.empty(0, np.int64)
        self.ones = np.ones(len(tensors))
        self.state = EvictionState(
            base=np.empty(0, np.int32),
            now=blank(1, NOW),
            tensors=tensors.copy(),
            nodes=nodes.copy(),
            start_us=np.empty(longest + 1),
            by_steps=none,
            by_bytes=none,
            by_store=self.ones,
            roles=np.empty(len(tensors), np.int8),
            scores=np.empty(len(tensors)),
            heap=np.empty(len(tensors), np.int32),
            ids=ids,
            uses=none,
            pool=blank(64, POOL),
            out=blank(longest, ENTRY),
        )
        self.now = self.state.now.view(np.uint8)  # as bytes: numpy copies records field by field


class _Scratch(threading.local):
    def __init__(self) -> None:
        self.works = WeakKeyDictionary[RematProblem, _Work]()  # gone with their problems


_scratch = _Scratch()


def _work_on(problem: RematProblem) -> _Work:
    """What this thread works in, until its next call for the problem. A search goes back and forth between few."""
    works = _scratch.works
    if problem not in works:
        while len(works) >= _WORKS and (first := next(iter(works), None)) is not None:  # some may be gone, and counted still
            works.pop(first, None)
        works[problem] = _Work(problem)
    return works[problem]


@lru_cache(maxsize=64)
def _rule(weights: ScoreWeights) -> NDArray[np.uint8]:
    """The present before the first step, with the rule in it, as bytes."""
    now = blank(1, NOW)
    for name in ("cost_power", "store_above", "store_cap", "load_weight", "lead", "pushes"):
        now[name] = getattr(weights, name)
    return now.view(np.uint8)


@lru_cache(maxsize=64)
def _powers(power: float, chunks: int) -> NDArray[np.float64]:
    """What distances in steps count for in a score; 1 for none."""
    return np.array([1.0, *(float(distance) ** power for distance in range(1, chunks * _CHUNK + 1))])


def little_problem() -> tuple[RematProblem, Ints]:
    """Two nodes, to warm up by, and their order."""
    problem = OrderProblem.of([8, 8], [Task("make", makes=(0,)), Task("use", makes=(1,), reads=(0,))], kept=[1])
    rows = Rows(np.zeros(3, np.int32), np.zeros(0, np.int32))
    remat = RematProblem(problem, np.ones(2), np.zeros(2, np.bool_), np.ones(2, np.bool_), rows)
    return remat, remat.sequence_of(np.arange(2))


def warm_up_eviction() -> None:
    """Compile the kernels, or load them, so that it is not the first search that waits."""
    remat, order = little_problem()
    cost_of(remat, order)
    attempt(remat, order, 16)
    first_wrong(remat, order)


@kernel(nogil=True)
def go_through(base: Any, by_steps: Any, by_bytes: Any, by_store: Any, fresh: Any, state: Any) -> tuple[bool, Any]:
    """Whether a sequence was found, and that. What going through another one has changed is put back before.

    `fresh`: the tensors before the first step.
    """
    now, tensors, nodes, ids, roles, pool = state.now, state.tensors, state.nodes, state.ids, state.roles, state.pool
    for tensor in range(len(fresh)):
        tensors[tensor] = fresh[tensor]
        roles[tensor] = BYSTANDER
    for power in range(len(pool)):
        pool[power].used, pool[power].most = 0, 0
    first_steps(base, nodes, ids)
    uses = use_rows(base, tensors, nodes, ids)
    known = EvictionState(
        base, now, tensors, nodes, state.start_us, by_steps, by_bytes, by_store, roles, state.scores, state.heap, ids, uses, pool, state.out
    )
    fits = _all_steps(known)
    return fits, _written(state.out, now[0].count if fits else 0)


@kernel(inner=True)
def _written(out: Any, count: Any) -> Any:
    """The sequence that was made, without stores that are not needed."""
    kept = 0
    for position in range(count):
        kept += out[position].needed
    sequence, kept = np.empty(kept, np.int32), 0
    for position in range(count):
        if out[position].needed:
            sequence[kept] = out[position].code
            kept += 1
    return sequence


@kernel(inner=True, borrows=True)
def _all_steps(state: Any) -> bool:
    """Go through the sequence; False where this rule finds none."""
    base, now, tensors, nodes = state.base, state.now, state.tensors, state.nodes
    ids, uses, out = state.ids, state.uses, state.out
    start(state)
    swaps = now[0].store_above < np.inf
    for step in range(len(base)):
        top = base[step]
        depth = 0 if step == nodes[top].first or _lacks(top, tensors, nodes, ids, uses) else -1
        nodes[0].frame, nodes[0].entry = top, -1
        if swaps and now[0].away > 0 and not load_ahead(step, state):
            return False
        while depth >= 0:
            node, again = nodes[depth].frame, depth > 0
            missing = _missing(node, depth, tensors, nodes, ids)
            if missing >= 0 and better_loaded(missing, step, now, tensors, nodes, ids):
                if not make_room(tensors[missing].bytes, step, again, np.int64(-1), state):
                    return False
                if not load(missing, now, tensors, nodes, out):
                    return False
                tensors[missing].lock += 1
                nodes[depth].entry += 1
                continue
            if missing >= 0:
                maker = tensors[missing].producer
                if maker < 0 or nodes[maker].until <= step or depth >= len(nodes) - 1:
                    return False
                depth += 1
                nodes[depth].frame, nodes[depth].entry = maker, -1
                continue
            need = _need(node, step, again, now, tensors, nodes, ids, uses)
            if not has_room(need, now) and not make_room(need, step, again, np.int64(-1), state):
                return False
            wanted = ids[nodes[depth - 1].entry] if again else -1
            if not _run(node, step, again, wanted, state):
                return False
            if swaps and not again:
                weigh(node, step, now, tensors, nodes, ids, uses)
            if swaps and now[0].to_host <= now[0].clock and not store_ahead(step, state):
                return False
            if again:
                tensors[wanted].lock += 1  # held for the run below, which has not read it yet
                nodes[depth - 1].entry += 1
            depth -= 1
        _pass(top, step, tensors, nodes, ids)
    return bool(not swaps or restore_offloaded(len(base), state))


@kernel(inner=True, borrows=True)
def _missing(node: Any, depth: Any, tensors: Any, nodes: Any, ids: Any) -> int:
    """The next input of a run in progress that is not there, -1 where all are. A run holds on to the inputs that it finds at first."""
    each, frame = nodes[node], nodes[depth]
    if frame.entry == -1:
        for entry in range(each.read, each.read_end):
            if tensors[ids[entry]].resident:
                tensors[ids[entry]].lock += 1
        frame.entry = each.read
    while frame.entry < each.read_end:
        if not tensors[ids[frame.entry]].resident:
            return int(ids[frame.entry])
        frame.entry += 1
    return -1


@kernel(inner=True, borrows=True)
def _need(node: Any, step: Any, again: Any, now: Any, tensors: Any, nodes: Any, ids: Any, uses: Any) -> int:
    """The bytes that a node wants beside what is there, all of whose inputs are there and held."""
    each = nodes[node]
    need = each.made_bytes + (now[0].reserve_bytes if node == now[0].reserve_node else each.workspace_bytes)
    for entry in range(each.reuse, each.reuse_end):
        tensor = ids[entry]
        if tensors[tensor].lock == 1 and not tensors[tensor].kept and next_use(tensor, step, again, tensors, uses) < 0:
            return int(need - tensors[each.take_output].bytes)
    return int(need)


@kernel(inner=True, borrows=True)
def _run(node: Any, step: Any, again: Any, wanted: Any, state: Any) -> bool:
    """Run a node: its inputs are freed where nobody wants them any more, of its results what is wanted stays."""
    now, tensors, nodes, ids, uses, out = state.now, state.tensors, state.nodes, state.ids, state.uses, state.out
    for entry in range(nodes[node].read, nodes[node].read_end):
        tensor = ids[entry]
        each = tensors[tensor]
        now[0].clock = max(now[0].clock, each.arrived_us)
        each.lock -= 1
        each.fresh = False
        if each.lock == 0 and not each.kept and next_use(tensor, step, again, tensors, uses) < 0:
            if is_over(tensor, step, again, tensors, uses):  # else it may be dropped once more, and no copy is made twice
                unpin(tensor, tensors, state.pool)
            free(tensor, now, tensors)
    now[0].clock += nodes[node].cost_us
    for entry in range(nodes[node].write, nodes[node].write_end):
        each = tensors[ids[entry]]
        each.offloaded = each.storable = False  # from here on it stays: what is on the host is no longer true
        unpin(ids[entry], tensors, state.pool)
    for entry in range(nodes[node].result, nodes[node].result_end):
        tensor = ids[entry]
        if tensors[tensor].resident:
            if tensors[tensor].host == STORED:  # nobody would wait for the copy of the one before
                tensors[tensor].host = NOTHING
            continue
        if tensor == wanted or tensors[tensor].kept or next_use(tensor, step, again, tensors, uses) >= 0:
            settle(tensor, now, tensors)
            tensors[tensor].arrived_us = 0.0
    return emit(node, now, out)


@kernel(inner=True, borrows=True)
def _lacks(node: Any, tensors: Any, nodes: Any, ids: Any, uses: Any) -> bool:
    """Whether something that a node makes and that is read later is not there."""
    for entry in range(nodes[node].result, nodes[node].result_end):
        each = tensors[ids[entry]]
        later = each.at + 1  # past the mark that it is made now
        if not each.resident and later < each.use_end and uses[later] >= 0:
            return True
    return False


@kernel(inner=True, borrows=True)
def _pass(node: Any, step: Any, tensors: Any, nodes: Any, ids: Any) -> None:
    """A step is over: the uses that were its own are behind."""
    for entry in range(nodes[node].read, nodes[node].read_end):
        tensors[ids[entry]].at += 1
    if step > nodes[node].first:
        for entry in range(nodes[node].result, nodes[node].result_end):
            tensors[ids[entry]].at += 1
