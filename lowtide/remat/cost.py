"""What a remat sequence costs, and whether it is right: one pass over integer arrays.

No lifetime is decided: a copy lives from the entry that makes it to the last that reads it, so a backward sweep finds where each ends.
Three streams run side by side: operators, one after another; copies to the host; copies from the host. A copy starts when its link is free
and the operators before it are done; a drop waits for its store, a run for the loads that it reads, the end for offloaded state that is
restored. On a device beside the host nothing starts before the host has issued it, which it does in order, never more than `_QUEUE` runs
ahead of the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lowtide.base.kernels import kernel
from lowtide.problems.order import Bytes, Ints
from lowtide.remat.entries import DROP, LOAD, RUN, STORE, Lane, code_of, deed_of, storage_of
from lowtide.remat.problem import RematProblem

COMPUTE, LANE_LOAD, LANE_SAVE = int(Lane.COMPUTE), int(Lane.LOAD), int(Lane.SAVE)
_QUEUE = 1024  # kernels that may wait on a stream before who launches the next one has to


@dataclass(frozen=True, eq=False)
class Cost:
    footprint_bytes: NDArray[np.int64]  # by entry, with what is resident
    peak_bytes: int
    time_us: float
    pinned_bytes: int  # on the host, by when the sequence is over, see `pinned_kernel`


def cost_of(problem: RematProblem, sequence: Ints) -> Cost:
    """The footprint of a sequence, entry by entry, and its time."""
    footprint, peak, time_us, pinned = _costs(sequence, problem.facts, problem.problem.resident_bytes)
    return Cost(footprint, int(peak), float(time_us), int(pinned))


def price_of(problem: RematProblem, sequence: Ints) -> tuple[int, float, int]:
    """The peak of a sequence in bytes, with what is resident, its time in microseconds, and the bytes that it pins on the host."""
    cost = cost_of(problem, sequence)
    return cost.peak_bytes, cost.time_us, cost.pinned_bytes


def footprint_of(problem: RematProblem, sequence: Ints, tensor_bytes: Bytes) -> Bytes:
    """The footprint of a sequence were its tensors of these sizes [m], without workspaces and what is resident: linear in the sizes."""
    sizes, nothing = np.ascontiguousarray(tensor_bytes), np.zeros(problem.problem.node_count, np.int64)
    for array in (sizes, nothing):
        array.setflags(write=False)  # as all that kernels are given
    made_bytes = problem.problem.sum_by_row(problem.problem.outputs_of, sizes)
    facts = problem.facts._replace(tensor_bytes=sizes, made_bytes=made_bytes, workspace_bytes=nothing)
    footprint: Bytes = _costs(sequence, facts, 0)[0]
    return footprint


def first_wrong(problem: RematProblem, sequence: Ints) -> int:
    """The first position at which an entry is wrong, -1 where none is.

    A run is wrong that lacks an input, repeats what may not be, or comes after what wrote over its inputs, or that makes anew what has been
    stored and not yet dropped; a store of what is not there; a drop without a store, or of what is not there; a load of what was never
    dropped. What is offloaded is there at the start, in one copy: it is loaded only while it is away, and neither stored nor dropped once
    it has been written. The end is wrong where something has been stored and not dropped, since nobody would wait for that copy, or
    offloaded and is not there.
    """
    return int(_first_wrong(sequence, problem.facts))


def runs_all(problem: RematProblem, sequence: Ints) -> bool:
    """Whether a sequence, wherever it comes from, is right and runs every node; views need not be run."""
    there = np.zeros(problem.problem.node_count, np.bool_)
    if first_wrong(problem, sequence) < 0:
        there[problem.codes.runs_in(sequence)] = True
    return bool((there | problem.is_view).all())


@kernel
def _first_wrong(sequence: Any, facts: Any) -> int:
    n, m = len(facts.repeatable), len(facts.producer)
    done, there, dropped = np.zeros(n, np.bool_), facts.producer < 0, np.zeros(m, np.bool_)
    stored, pending, written = np.zeros(m, np.bool_), np.zeros(m, np.bool_), np.zeros(m, np.bool_)
    for position in range(len(sequence)):
        code = sequence[position]
        if code < 0 or code >= code_of(STORE, m, n):
            return position
        deed, tensor = deed_of(code, n), storage_of(code, n)
        if deed != RUN:
            if deed == STORE:
                if not there[tensor] or stored[tensor] or not facts.storable[tensor] or written[tensor]:
                    return position
                stored[tensor] = pending[tensor] = True
            elif deed == DROP:
                if not there[tensor] or not stored[tensor] or written[tensor]:
                    return position
                there[tensor], pending[tensor], dropped[tensor] = False, False, True
            else:
                if not dropped[tensor] or (facts.offloaded[tensor] and there[tensor]):
                    return position
                there[tensor] = True
            continue
        for entry in range(facts.read_ptr[code], facts.read_ptr[code + 1]):
            if not there[facts.read_ids[entry]]:
                return position
        if done[code]:
            if not facts.repeatable[code]:
                return position
            for entry in range(facts.limit_ptr[code], facts.limit_ptr[code + 1]):
                if done[facts.limit_ids[entry]]:
                    return position
        for entry in range(facts.made_ptr[code], facts.made_ptr[code + 1]):
            if pending[facts.made_ids[entry]]:
                return position
            there[facts.made_ids[entry]] = True
        for entry in range(facts.write_ptr[code], facts.write_ptr[code + 1]):
            if pending[facts.write_ids[entry]]:
                return position
            written[facts.write_ids[entry]] = True
        done[code] = True
    return len(sequence) if pending.any() or (facts.offloaded & ~there).any() else -1


@kernel(nogil=True)
def _costs(sequence: Any, facts: Any, resident_bytes: Any) -> tuple[NDArray[np.int64], int, float, int]:
    footprint, peak = footprint_kernel(sequence, facts), resident_bytes
    for position in range(len(footprint)):
        footprint[position] += resident_bytes
        peak = max(peak, footprint[position])
    return footprint, peak, time_kernel(sequence, facts), pinned_kernel(sequence, facts)


@kernel(inner=True)
def pinned_kernel(sequence: Any, facts: Any) -> int:
    """The bytes of all buffers that a sequence needs on the host.

    A copy has a buffer from its store to its last load or drop. Buffers are of powers of two, and each is used again for copies of its own
    size alone: of each size there are as many as are ever used at once, and these are kept.
    """
    n, m = len(facts.made_bytes), len(facts.tensor_bytes)
    last, used, most = np.full(m, -1, np.int64), np.zeros(64, np.int64), np.zeros(64, np.int64)
    for position in range(len(sequence)):
        deed = deed_of(sequence[position], n)
        if deed in (DROP, LOAD):
            last[storage_of(sequence[position], n)] = position
    for position in range(len(sequence)):
        deed = deed_of(sequence[position], n)
        if deed == RUN:
            continue
        tensor = storage_of(sequence[position], n)
        power = facts.pinned[tensor]
        if deed == STORE:
            used[power] += 1
            most[power] = max(most[power], used[power])
        elif last[tensor] == position:
            used[power] -= 1
    total = np.int64(0)
    for power in range(63):
        total += most[power] << power
    return int(total)


@kernel(inner=True)
def footprint_kernel(sequence: Any, facts: Any) -> NDArray[np.int64]:
    """Footprint by entry without what is resident. Backwards to find the last reader of each copy, then forwards."""
    count, n, m = len(sequence), len(facts.made_bytes), len(facts.tensor_bytes)
    last = np.full(m, -1, np.int32)  # of the copy that a backward sweep is in: the entry that reads it last
    dead = np.zeros(count, np.int64)  # bytes that are freed after each entry
    taken = np.zeros(count, np.int64)  # bytes that its first output finds in the memory of an input that dies there
    live = np.int64(0)
    for tensor in range(m):
        if facts.kept[tensor]:
            last[tensor] = count
    for position in range(count - 1, -1, -1):
        code, freed = sequence[position], np.int64(0)
        if deed_of(code, n) != RUN:
            tensor = storage_of(code, n)
            if last[tensor] < 0:
                freed = facts.tensor_bytes[tensor]
                last[tensor] = position
            if deed_of(code, n) == LOAD:
                last[tensor] = -1
            dead[position] = freed
            continue
        for entry in range(facts.made_ptr[code], facts.made_ptr[code + 1]):
            tensor = facts.made_ids[entry]
            if last[tensor] < 0:
                freed += facts.tensor_bytes[tensor]
            last[tensor] = -1
        for entry in range(facts.take_ptr[code], facts.take_ptr[code + 1]):
            if last[facts.take_ids[entry]] < 0:
                taken[position] = facts.tensor_bytes[facts.take_output[code]]
                break
        for entry in range(facts.read_ptr[code], facts.read_ptr[code + 1]):
            tensor = facts.read_ids[entry]
            if last[tensor] < 0:
                last[tensor] = position
                freed += facts.tensor_bytes[tensor]
        dead[position] = freed
    for tensor in range(m):
        if facts.producer[tensor] < 0 and last[tensor] >= 0:
            live += facts.tensor_bytes[tensor]
    footprint = np.empty(count, np.int64)
    for position in range(count):
        code = sequence[position]
        if deed_of(code, n) != RUN:
            if deed_of(code, n) == LOAD:
                live += facts.tensor_bytes[storage_of(code, n)]
            footprint[position] = live
        else:
            live += facts.made_bytes[code]
            footprint[position] = live + facts.workspace_bytes[code] - taken[position]
        live -= dead[position]
    return footprint


@kernel(inner=True)
def time_kernel(sequence: Any, facts: Any) -> float:
    """When the last operator is done: three streams side by side, and the host before them."""
    n, m = len(facts.made_bytes), len(facts.tensor_bytes)
    clock, to_host, from_host = 0.0, 0.0, 0.0
    issued, begun, turn = 0.0, np.zeros(_QUEUE), 0  # by the host; when the runs began that are the last ones so far
    stored, arrived = np.zeros(m), np.zeros(m)
    for position in range(len(sequence)):
        code = sequence[position]
        deed = deed_of(code, n)
        if deed == RUN:
            for entry in range(facts.read_ptr[code], facts.read_ptr[code + 1]):
                clock = max(clock, arrived[facts.read_ids[entry]])
            if facts.lane[code] != COMPUTE:
                issued += facts.handling_us[0]
                if facts.lane[code] == LANE_LOAD:
                    from_host = max(from_host, clock, issued) + facts.copy_us[code]
                    for entry in range(facts.made_ptr[code], facts.made_ptr[code + 1]):
                        arrived[facts.made_ids[entry]] = from_host
                elif facts.lane[code] == LANE_SAVE:
                    to_host = max(to_host, clock, issued) + facts.copy_us[code]
                    stored[facts.read_ids[facts.read_ptr[code]]] = to_host
                else:
                    clock = max(clock, stored[facts.read_ids[facts.read_ptr[code]]])
                continue
            issued = max(issued, begun[turn]) + facts.issue_us[code]
            clock = begun[turn] = max(clock, issued)
            turn = (turn + 1) % _QUEUE
            clock += facts.device_us[code]
            for entry in range(facts.made_ptr[code], facts.made_ptr[code + 1]):
                arrived[facts.made_ids[entry]] = 0.0
            continue
        tensor = storage_of(code, n)
        issued += facts.handling_us[0]
        if deed == STORE:
            to_host = max(to_host, clock, issued, arrived[tensor]) + facts.store_us[tensor]
            stored[tensor] = to_host
        elif deed == DROP:
            clock = max(clock, stored[tensor])
        else:
            from_host = max(from_host, clock, issued) + facts.load_us[tensor]
            arrived[tensor] = from_host
    for tensor in range(m):
        if facts.kept[tensor]:
            clock = max(clock, arrived[tensor])
    return clock
