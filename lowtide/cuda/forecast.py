"""What a planned step will ask PyTorch's allocator for, before it has run, and what that allocator will count and reserve.

    takes   a plan
    leaves  the requests for its storages in their order, and for operators' workspaces one block each: enough to serve its first run from
            an arena; or what a process comes to that trains so, by the allocator's simulation (`segments`)

Operators ask for their workspaces in pieces that no plan knows; a block as large as all of them together is there while one runs.
"""

from __future__ import annotations

import os
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import numpy as np

from lowtide.cuda.segments import HUGE_BYTES, CachingAllocator, ExpandableAllocator, rounded_bytes, segment_bytes
from lowtide.ir.graph import Kind, Node, Storage, Value
from lowtide.ir.operators.nodes import is_collective, is_transfer, row_of
from lowtide.ir.operators.row import STORE
from lowtide.plan.contents import Contents
from lowtide.plan.promises import lives
from lowtide.runtime.arena.allocator import Recorded

_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
_EXPANDABLE = re.compile(r"expandable_segments:(true|false)")
_HARMLESS = re.compile(r"pinned_\w+:|$")
_REPEATS = 8  # of a step, in which it settles or does not


@dataclass(frozen=True)
class MemoryRequest:
    nbytes: int
    start: int  # step of the plan
    end: int  # the step before which it is let go; -1: it outlives the run
    stays: bool = False  # with the caller, where it outlives the run: an optimizer made it, as state


def requests_of(plan: Contents) -> tuple[list[MemoryRequest], list[MemoryRequest]]:
    """Requests by the steps of the plan, in their order; and blocks for workspaces, of which none is a request by itself."""
    owner = _owners(plan)
    spans = {storage: span for storage, span in lives(plan).items() if _is_there(storage) and span[1] < span[2]}
    given = {value.storage for value in plan.graph.inputs}
    kept = {owner.get(value.storage, value.storage) for value in plan.graph.outputs}
    lifetimes = {storage: [start, end] for storage, (_, start, end) in spans.items() if storage not in owner and storage not in given}
    for storage, (_, _, end) in spans.items():
        if (first := owner.get(storage)) in lifetimes:
            lifetimes[first][1] = max(lifetimes[first][1], end)
    rows = [
        (1, MemoryRequest(int(each.nbytes), start, -1 if each in kept else end, each.kind is Kind.TEMPORARY))
        for each, (start, end) in lifetimes.items()
    ]
    spaces: list[MemoryRequest] = []
    for step, index in enumerate(plan.order):
        node, nbytes = plan.graph.nodes[index], plan.workspace_bytes[index]
        for at in row_of(node.op).scratch_like:  # of which the workspace has been measured as well
            scratch = node.args[at]
            assert isinstance(scratch, Value), "else it has no bytes"
            rows.append((0, MemoryRequest(int(scratch.storage.nbytes), step, step + 1)))
            nbytes -= -(-int(scratch.storage.nbytes) // plan.granule_bytes) * plan.granule_bytes
        if nbytes > 0:
            spaces.append(MemoryRequest(nbytes, step, step + 1))
    rows.sort(key=lambda row: (row[1].start, row[0]))  # stable: of one node in the order of its results
    return [request for _, request in rows], spaces


def expected(plan: Contents) -> tuple[Recorded, Recorded, frozenset[int]]:
    """The same as an arena takes them, in steps of the plan; and the steps whose results are no other's memory and there at once."""
    requests, spaces = requests_of(plan)
    alone = (step for step, index in enumerate(plan.order) if _is_alone(plan.graph.nodes[index]))
    return _recorded(requests), _recorded(spaces), frozenset(alone)


def _is_alone(node: Node) -> bool:
    """Whether its results may be moved behind it: not where another stream still fills them, or a copy is known by its address."""
    storages = {value.storage for value in node.results}
    return 0 < len(storages) == len(node.results) and not is_transfer(node) and not is_collective(node)


def simulated_allocator() -> CachingAllocator | None:
    """An empty one with the settings of this process's environment; None where they are none that are simulated."""
    settings = next((os.environ[name] for name in _SETTINGS if name in os.environ), "")
    expandable = False
    for each in "".join(settings.split()).split(","):
        if setting := _EXPANDABLE.fullmatch(each.lower()):
            expandable = setting[1] == "true"  # the last one holds
        elif not _HARMLESS.match(each):
            return None
    if "PYTORCH_NO_CUDA_MEMORY_CACHING" in os.environ:
        return None
    return ExpandableAllocator() if expandable else CachingAllocator()


def device_memory(plan: Contents, *, arena: bool, copies_bytes: int | None = None) -> tuple[int, int] | None:
    """What `torch.cuda.max_memory_allocated` and `max_memory_reserved` will say of a process that has nothing else on the device.

    What the caller holds is asked for first, in the graph's order; then first steps run, and this one until it settles. With
    `copies_bytes` it is captured as a CUDA graph, which has so many bytes of copies, and segments of its own. Not counted are the
    workspaces that cuBLAS keeps for each stream, of 8 to 32 MiB. None for another device, for settings that are not simulated, and for
    state that is swapped.
    """
    programs = (*plan.first_steps, plan)
    storages = dict.fromkeys(value.storage for value in programs[0].graph.inputs if value.storage.kind.caller_owned)
    if not any(storage.device.startswith("cuda") for storage in storages) or any(map(_swaps_state, programs)):
        return None
    resident = [int(storage.nbytes) for storage in storages if _is_there(storage)]
    runs = [[request for requests in requests_of(each) for request in requests] for each in programs]
    if arena:  # one block for all but what outlives a run
        most_bytes = max(map(_most_bytes, runs))
        resident.append(segment_bytes(most_bytes) if most_bytes >= HUGE_BYTES else most_bytes)  # as device.hpp does
        runs = [[request for request in requests if request.end < 0] for requests in runs]
    return _simulated(resident, runs, copies_bytes)


def arena_peak_bytes(plan: Contents) -> int:
    """What a step takes that has an arena, with what is resident: the block stays as large as it ever has to be, results lie beside it."""
    requests, spaces = requests_of(plan)
    return plan.resident_bytes + _most_bytes([*requests, *spaces]) + sum(rounded_bytes(each.nbytes) for each in requests if each.end < 0)


def eager_memory(lives: Sequence[tuple[Kind, int, int, int]], workspace_bytes: Sequence[int]) -> tuple[int, int] | None:
    """The same of a program as it stands: kind, bytes and steps of its tensors, and workspaces by step."""
    resident = [nbytes for kind, nbytes, *_ in lives if nbytes and kind.caller_owned]
    tensors = [(nbytes, start, end) for kind, nbytes, start, end in lives if nbytes and start < end and not kind.caller_owned]
    runs = [MemoryRequest(nbytes, start, -1 if end == len(workspace_bytes) else end) for nbytes, start, end in tensors]
    runs += [MemoryRequest(nbytes, step, step + 1) for step, nbytes in enumerate(workspace_bytes) if nbytes]
    return _simulated(resident, [runs])


def _simulated(resident: Sequence[int], runs: Sequence[Sequence[MemoryRequest]], copies_bytes: int | None = None) -> tuple[int, int] | None:
    """The most allocated and reserved over what is held throughout and runs, of which the last is repeated, and captured."""
    allocator, before = simulated_allocator(), None
    if allocator is None or (copies_bytes is not None and isinstance(allocator, ExpandableAllocator)):
        return None
    for nbytes in filter(None, resident):
        allocator.malloc(nbytes)
    for requests in (*runs, *[runs[-1]] * (_REPEATS - 1)):
        _run(allocator, sorted(requests, key=lambda each: each.start))
        if before == (before := allocator.layout()):
            break
    most = allocator.most_allocated_bytes, allocator.peak[0]
    if copies_bytes is None:
        return most
    allocator.malloc(copies_bytes)
    allocator.empty_cache()
    pool = CachingAllocator()
    _run(pool, runs[-1])
    allocated_bytes, reserved_bytes = allocator.allocated_bytes + pool.most_allocated_bytes, allocator.reserved_bytes + pool.peak[0]
    return max(most[0], allocated_bytes), max(most[1], reserved_bytes)


def _run(allocator: CachingAllocator, requests: Sequence[MemoryRequest]) -> None:
    """Once; what outlives it and does not stay is let go at its end."""
    ending: dict[int, list[int]] = {}
    now = 0
    for each in requests:
        for step in [step for step in ending if 0 <= step <= each.start] if each.start > now else ():
            for address in ending.pop(step):
                allocator.free(address)
        now = each.start
        address = allocator.malloc(each.nbytes)
        if not (each.stays and each.end < 0):
            ending.setdefault(each.end, []).append(address)
    for address in (address for addresses in ending.values() for address in addresses):
        allocator.free(address)


def _most_bytes(requests: Sequence[MemoryRequest]) -> int:
    """The most that is alive at once of what does not outlive the run."""
    change = Counter[int]()
    for each in requests:
        if each.end >= 0:
            change[each.start] += rounded_bytes(each.nbytes)
            change[each.end] -= rounded_bytes(each.nbytes)
    return max(accumulate(change[step] for step in sorted(change)), default=0)


def _is_there(storage: Storage) -> bool:
    """Whether it takes memory of the device; an optimizer may count its steps on the host."""
    return bool(storage.nbytes) and not storage.device.startswith("cpu")


def _swaps_state(plan: Contents) -> bool:
    return any(value.storage.kind.caller_owned for node in plan.graph.nodes if node.op == STORE for value in node.inputs)


def _owners(plan: Contents) -> dict[Storage, Storage]:
    """Of each storage that takes over another's memory the one that was asked for."""
    owner: dict[Storage, Storage] = {}
    for index in plan.order:
        node, reuse = plan.graph.nodes[index], plan.reuses[index]
        if reuse >= 0 and node.outputs and node.outputs[0] is not None:
            taken = node.inplace[reuse][0].storage
            owner[node.outputs[0].storage] = owner.get(taken, taken)
    return owner


def _recorded(requests: Sequence[MemoryRequest]) -> Recorded:
    sizes, born, died = np.array([(each.nbytes, each.start, each.end) for each in requests], np.int64).reshape(-1, 3).T
    return Recorded(sizes, born, died)
