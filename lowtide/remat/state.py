"""What eviction knows while it goes through a sequence: of each tensor, node and step a record, and of the present one more.

Kernels take these as arrays of records, whose fields are read and written in place. Those that need nearly all of them take an
`EvictionState`; what runs at every step takes the arrays that it needs, since taking them out of that costs time.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lowtide.base.kernels import SWITCHED_OFF, kernel
from lowtide.problems.order import Ints
from lowtide.remat.entries import RematArrays

# Of a tensor's `role` in the choices of victims, so that a search knows which exceptions change nothing.
BYSTANDER, WEIGHED, CHOSEN = 0, 1, 2  # it was resident at none of them, or held; it could have been evicted; it was

# Of a tensor's `host`: what the host holds of it.
NOTHING, STORED, DROPPED = 0, 1, 2  # a copy, or one on its way; one that is needed, since the device's was dropped

TENSOR = np.dtype([
    ("bytes", np.int64), ("producer", np.int32), ("kept", np.bool_), ("storable", np.bool_), ("offloaded", np.bool_),
    ("store_us", np.float64), ("load_us", np.float64), ("pinned", np.int32),
    # The present:
    ("resident", np.bool_),
    ("fresh", np.bool_),  # loaded ahead of its reader, who has not come yet
    ("host", np.int8),
    ("lock", np.int32),  # how many runs in progress read it
    ("at", np.int64),  # its next entry in `uses`
    ("use_end", np.int64),
    ("stored_us", np.float64),  # when its store is done
    ("arrived_us", np.float64),  # when its load is done
    ("worth_us", np.float64),  # what it would cost to make it again, as things were when it was made
    ("store_at", np.int64),  # where its store stands in the sequence
    ("member_at", np.int32),  # where it stands among the members
    ("back", np.int64),  # where it was dropped: the step that wants it back
    # Lists of tensors, by position and not by tensor:
    ("member", np.int32),  # all that are resident, in no order
    ("candidate", np.int32),
    ("away", np.int32),  # all that were dropped and have not been loaded since, those wanted first last
    ("method", np.int8),  # how that candidate would be evicted
])  # fmt: skip

NODE = np.dtype([
    ("cost_us", np.float64), ("made_bytes", np.int64), ("workspace_bytes", np.int64), ("take_output", np.int32),
    ("read", np.int64), ("read_end", np.int64), ("result", np.int64), ("result_end", np.int64),
    ("reuse", np.int64), ("reuse_end", np.int64),  # what it may work in the memory of
    ("limit", np.int64), ("limit_end", np.int64), ("write", np.int64), ("write_end", np.int64), ("repeatable", np.bool_),
    ("first", np.int64),  # the step at which it first runs
    ("until", np.int64),  # the first step from which on it may not be repeated
    ("seen", np.int64),  # by the walk of that stamp
    # A stack of nodes, by depth and not by node:
    ("stack", np.int32),
    ("frame", np.int32),
    ("entry", np.int64),
])  # fmt: skip

ENTRY = np.dtype([("code", np.int32), ("needed", np.bool_)])  # of the sequence; a store may turn out not to be needed

NOW = np.dtype([
    ("level", np.int64), ("count", np.int64), ("stamp", np.int64), ("members", np.int64),
    ("away", np.int64), ("away_us", np.float64),  # how many were dropped and have not been loaded since, and what their loads take
    ("clock", np.float64), ("to_host", np.float64), ("from_host", np.float64),  # when operators and either link are free
    # The rule, see `eviction.ScoreWeights`; powers of bytes and of steps are in `by_bytes` and `by_steps`:
    ("limit_bytes", np.int64), ("cost_power", np.float64),
    ("most_pinned_bytes", np.int64), ("pinned_bytes", np.int64),  # the limit of the host, and what buffers there come to by now
    ("store_above", np.float64), ("store_cap", np.float64), ("load_weight", np.float64), ("lead", np.float64), ("pushes", np.bool_),
    ("reserve_node", np.int64), ("reserve_bytes", np.int64),  # what a node finds free while it runs, in place of its workspace
    ("visits", np.int64), ("most_visits", np.int64),  # at tensors and nodes, to choose victims: so many were there, and may be
])  # fmt: skip


POOL = np.dtype([("used", np.int64), ("most", np.int64)])  # by power of two: buffers on the host in use now, and at most by now


class EvictionState(NamedTuple):
    base: Ints  # the sequence that it goes through
    now: Any  # [1] NOW
    tensors: Any  # [m] TENSOR
    nodes: Any  # [n + 1] NODE; the last is there for the stacks alone
    start_us: Any  # [steps + 1] by step, when it starts if nothing is repeated
    by_steps: Any  # by distance in steps, what that counts for in a score
    by_bytes: Any  # [m] what a tensor's bytes count for in its score, with its exception from the rule
    by_store: Any  # [m] its worth counts so many times when something to store is chosen
    roles: Any  # [m] in the choices of victims
    scores: Any  # [m] by position among the candidates
    heap: Any  # [m] positions of candidates
    ids: Ints  # rows of tensors and nodes, laid end to end
    uses: Any  # by tensor the steps at which it is read, as rows laid end to end, see `use_rows`
    pool: Any  # [64] POOL
    out: Any  # ENTRY: the sequence that is made


def records(facts: RematArrays) -> tuple[NDArray[Any], NDArray[Any], NDArray[np.int32]]:
    """The tensors and nodes of a problem before the first step, and the rows of identifiers that nodes point into."""
    tensors, nodes = blank(len(facts.tensor_bytes), TENSOR), blank(len(facts.cost_us) + 1, NODE)
    for name in ("bytes", "producer", "kept", "storable", "offloaded", "store_us", "load_us", "pinned"):
        tensors[name] = getattr(facts, "tensor_bytes" if name == "bytes" else name)
    for name in ("cost_us", "made_bytes", "workspace_bytes", "take_output", "repeatable"):
        nodes[name][:-1] = getattr(facts, name)
    tensors["worth_us"][tensors["offloaded"]] = np.inf  # nobody can make it
    start = 0
    for name, row in (("read", "read"), ("result", "made"), ("reuse", "take"), ("limit", "limit"), ("write", "write")):
        ptr = getattr(facts, f"{row}_ptr").astype(np.int64) + start
        nodes[name][:-1], nodes[f"{name}_end"][:-1] = ptr[:-1], ptr[1:]
        start = int(ptr[-1])
    return tensors, nodes, np.concatenate([facts.read_ids, facts.made_ids, facts.take_ids, facts.limit_ids, facts.write_ids])


def blank(length: int, dtype: np.dtype[Any]) -> NDArray[Any]:
    """So many records of zeros, whose fields Python can name, too: where numba is switched off, kernels are stepped through."""
    return np.zeros(length, dtype).view(np.recarray) if SWITCHED_OFF else np.zeros(length, dtype)


@kernel(inner=True, borrows=True)
def start(state: Any) -> None:
    """Fill in what follows from the sequence."""
    base, now, tensors, nodes, start_us = state.base, state.now, state.tensors, state.nodes, state.start_us
    start_us[0] = 0.0
    for step in range(len(base)):
        start_us[step + 1] = start_us[step] + nodes[base[step]].cost_us
    for tensor in range(len(tensors)):
        each = tensors[tensor]
        if each.producer < 0 and (each.use_end > each.at or each.kept):
            settle(tensor, now, tensors)


@kernel(inner=True, borrows=True)
def first_steps(base: Any, nodes: Any, ids: Any) -> None:
    """By node the step at which it first runs, and the first from which on it may not be repeated."""
    for node in range(len(nodes)):
        nodes[node].first, nodes[node].seen = len(base), 0
    for step in range(len(base) - 1, -1, -1):
        nodes[base[step]].first = step
    for node in range(len(nodes)):
        nodes[node].until = len(base) if nodes[node].repeatable else -1
        for entry in range(nodes[node].limit, nodes[node].limit_end):
            nodes[node].until = min(nodes[node].until, nodes[ids[entry]].first)


@kernel(inner=True)
def use_rows(base: Any, tensors: Any, nodes: Any, ids: Any) -> Any:
    """By tensor the steps at which it is read, as rows laid end to end.

    Rows ascend, with `-1 - step` where the tensor is made once more; what is offloaded is used at last at the end.
    """
    for filling in (False, True):  # count, then fill
        if filling:
            total = 0
            for tensor in range(len(tensors)):
                count = tensors[tensor].use_end
                tensors[tensor].at = tensors[tensor].use_end = total
                total += count
            uses = np.empty(total, np.int64)
        for step in range(len(base)):
            node = nodes[base[step]]
            for entry in range(node.read, node.read_end):
                if filling:
                    uses[tensors[ids[entry]].use_end] = step
                tensors[ids[entry]].use_end += 1
            if step > node.first:
                for entry in range(node.result, node.result_end):
                    if filling:
                        uses[tensors[ids[entry]].use_end] = -1 - step
                    tensors[ids[entry]].use_end += 1
        for tensor in range(len(tensors)):
            if tensors[tensor].offloaded:
                if filling:
                    uses[tensors[tensor].use_end] = len(base)
                tensors[tensor].use_end += 1
    return uses


@kernel(inner=True, borrows=True)
def next_use(tensor: Any, step: Any, again: Any, tensors: Any, uses: Any) -> int:
    """The step at which what there is of a tensor is read next; -1 for never. The present step counts while it has not run."""
    entry, end = tensors[tensor].at, tensors[tensor].use_end
    if entry < end and ((uses[entry] == step and not again) or uses[entry] == -1 - step):
        entry += 1
    return max(uses[entry], -1) if entry < end else -1


@kernel(inner=True, borrows=True)
def emit(code: Any, now: Any, out: Any) -> bool:
    """One entry more; False where the sequence has become too long."""
    count = now[0].count
    if count >= len(out):
        return False
    out[count].code = code
    out[count].needed = True
    now[0].count = count + 1
    return True


@kernel(inner=True, borrows=True)
def settle(tensor: Any, now: Any, tensors: Any) -> None:
    count = now[0].members
    tensors[tensor].resident = True
    tensors[tensor].member_at = count
    tensors[count].member = tensor
    now[0].members = count + 1
    now[0].level += tensors[tensor].bytes


@kernel(inner=True, borrows=True)
def free(tensor: Any, now: Any, tensors: Any) -> None:
    tensors[tensor].resident = False
    tensors[tensor].fresh = False
    now[0].level -= tensors[tensor].bytes
    now[0].members -= 1
    last, at = tensors[now[0].members].member, tensors[tensor].member_at
    tensors[at].member, tensors[last].member_at = last, at
    if tensors[tensor].host == STORED:  # what was stored was not needed
        tensors[tensor].host = NOTHING


@kernel(inner=True, borrows=True)
def has_buffer(tensor: Any, now: Any, tensors: Any, pool: Any) -> bool:
    """Whether there is a buffer for a copy on the host, or may be one more."""
    power = tensors[tensor].pinned
    return bool(pool[power].used < pool[power].most or now[0].pinned_bytes + (np.int64(1) << power) <= now[0].most_pinned_bytes)


@kernel(inner=True, borrows=True)
def pin(tensor: Any, now: Any, tensors: Any, pool: Any) -> None:
    """Give a copy that is needed its buffer. What is stored ahead and not needed yet has none: it may turn out not to be stored."""
    power = tensors[tensor].pinned
    pool[power].used += 1
    if pool[power].used > pool[power].most:
        pool[power].most = pool[power].used
        now[0].pinned_bytes += np.int64(1) << power
    tensors[tensor].host = DROPPED


@kernel(inner=True, borrows=True)
def is_over(tensor: Any, step: Any, again: Any, tensors: Any, uses: Any) -> bool:
    """Whether nobody reads a tensor any more, nor what is made once more of it; arguments as of `next_use`."""
    entry, end = tensors[tensor].at, tensors[tensor].use_end
    if entry < end and ((uses[entry] == step and not again) or uses[entry] == -1 - step):
        entry += 1
    return bool(entry >= end)


@kernel(inner=True, borrows=True)
def unpin(tensor: Any, tensors: Any, pool: Any) -> None:
    """Let the copy of a tensor on the host go, if there is one."""
    if tensors[tensor].host == DROPPED:
        pool[tensors[tensor].pinned].used -= 1
    tensors[tensor].host = NOTHING


@kernel(inner=True, borrows=True)
def forget(tensor: Any, now: Any, tensors: Any) -> bool:
    """No load of a tensor is to come any more; whether one was."""
    for at in range(now[0].away - 1, -1, -1):
        if tensors[at].away == tensor:
            now[0].away -= 1
            now[0].away_us -= tensors[tensor].load_us
            for other in range(at, now[0].away):
                tensors[other].away = tensors[other + 1].away
            return True
    return False
