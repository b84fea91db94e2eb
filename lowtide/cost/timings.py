"""How long operators take: each distinct call run alone on made-up data, and remembered on disk.

    takes   nodes of a graph with concrete sizes
    leaves  microseconds for each node: measured, by the roofline where a call cannot be run here, 0 for views; a loop is its parts

The same calls are told apart, and tried in the same place, as for `workspaces`. In a training step an operator finds little of what it
reads in the processor's caches: so other memory is read before each run that counts. Without that, what only moves bytes would seem two to
four times as fast as it is in a step, and recomputing it too cheap. The calls take turns, in several rounds, and the least time of each
counts: whatever else the machine does only adds to it, and seldom lasts for all rounds. A call that takes long is run less often: what
disturbs it is a small part of it, and the run in which its memory was watched tells as much. Small calls share the reading of other memory.

On a GPU a call is timed both with its arguments in the cache and without. Which time counts in a graph is said by a model of that cache:
it keeps what was touched last, and what is larger than all of it goes through and leaves nothing behind. `device_here` measures the rates
by which an operator is timed that cannot be run.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.cost.bodies import runs_of
from lowtide.cost.cache import Cache
from lowtide.cost.device import Device, half_flops_of, node_flops
from lowtide.cost.laboratory import Call, GpuClocks, Laboratory, Unmeasured, device_of
from lowtide.cost.trial import aside, cache_bytes, circumstances, clocks_ns, on_gpu, once_ns
from lowtide.cost.workspaces import call_of, needs_none, warn_of_memory
from lowtide.errors import FormatError
from lowtide.ir.graph import Node, Storage
from lowtide.ir.operators.nodes import is_view


def cold_shares(nodes: Sequence[Node], cache_bytes: int) -> dict[Node, float]:
    """By node, the share of the bytes it reads that come from memory: 0 of one that reads nothing."""
    cache = _Cache(cache_bytes)
    shares: dict[Node, float] = {}
    for node in nodes:
        if is_view(node):
            continue
        reads = {value.storage: _known_nbytes(value.storage) for value in node.inputs}
        cold_bytes = sum(nbytes for storage, nbytes in reads.items() if storage not in cache.entries)
        shares[node] = cold_bytes / max(1, sum(reads.values()))
        for storage in dict.fromkeys((*reads, *(value.storage for value in node.results))):
            cache.touch(storage)
    return shares


class _Cache:
    def __init__(self, room_bytes: int) -> None:
        self.entries: dict[Storage, int] = {}  # the one that was touched longest ago first
        self._room_bytes = room_bytes

    def touch(self, storage: Storage) -> None:
        self._room_bytes += self.entries.pop(storage, 0) - _known_nbytes(storage)
        self.entries[storage] = _known_nbytes(storage)
        while self._room_bytes < 0:
            self._room_bytes += self.entries.pop(next(iter(self.entries)))


def _known_nbytes(storage: Storage) -> int:
    return storage.nbytes if isinstance(storage.nbytes, int) else 0


_RUNS = ((10**6, 2), (2 * 10**7, 1))  # nanoseconds, and how often what takes less is run for its time
_COUNTS_NS = 2 * 10**6  # from here on the watching of allocations is none to speak of: the run in which they were watched counts
_BASE_NS, _BYTE_NS, _FLOP_NS = 200_000, 20, 0.5  # what takes longer than these make it is run again: few do, unless they are disturbed
_AGAIN, _ALIKE, _NEAR, _AGAIN_NS = 8, 2, 1.25, 10**9  # so often, until so many runs took no more than this times the least; or so long
_TOGETHER, _TOGETHER_BYTES = 16, 2**25  # so many calls at most, of so many bytes, before which other memory is read once
_LEAST_RUNS, _LEAST_S = 3, 1e-3
_LONGEST_NS = 3600 * 10**9  # no operator takes an hour: such an entry is no measurement
_RATED_DTYPES = ("float32", "float64", "bfloat16", "float16")


@dataclass(frozen=True)
class Timings:
    us: tuple[float, ...]  # by node, of the device
    issue_us: tuple[float, ...]  # by node, of the host to issue it; empty where the host itself computes
    unknown: tuple[Unmeasured, ...]  # distinct calls that were not measured: their times are the roofline's


def measure_timings(
    nodes: Sequence[Node], rates: Callable[[], Device], *, among: Sequence[Node] | None = None, laboratory: Laboratory | None = None
) -> Timings:
    """The time of each node on the device of what it makes; of a call that is not known and cannot be run here, by the roofline of `rates`.

    `among` are the nodes of their graph, where those are not all that are asked about.
    A call whose arguments and results pass a quarter of the device's free memory is not run, and one that fails is not hidden: both are
    listed as unknown, and where memory was the reason a warning says so. Of two processes that measure the same call, both get what the
    first one wrote down. A `laboratory` that is given stays open. The caller's random state stays as it is.
    """
    runs = [list(runs_of(node, among or nodes)) for node in nodes]
    calls = {run.node: call_of(run.node, run.beside) if _takes_time(run.node) else None for each in runs for run in each}
    wanted = {call.text: call for call in calls.values() if call is not None}
    known: dict[str, GpuClocks] = {}
    with nullcontext(laboratory) if laboratory is not None else Laboratory() as used:
        for device in dict.fromkeys(call.device for call in wanted.values()):
            known |= _of_device({text: call for text, call in wanted.items() if call.device == device}, device, used)
    unknown = tuple(used.failures[text] for text in wanted if text not in known and text in used.failures)
    warn_of_memory(unknown, "their times are taken from the device's rates")
    cold = next((cold_shares(among or nodes, cache_bytes(call.device)) for call in wanted.values() if on_gpu(call.device)), {})
    us, issue_us = (
        tuple(sum(run.times * times[run.node][clock] for run in each) for each in runs)
        for times in [{node: _clocks(node, call, known, rates, cold.get(node, 0.0)) for node, call in calls.items()}]
        for clock in range(2)
    )
    if not any(on_gpu(call.device) for call in wanted.values()):  # the host is the device
        return Timings(tuple(device + host for device, host in zip(us, issue_us, strict=True)), (), unknown)
    return Timings(us, issue_us, unknown)


def _takes_time(node: Node) -> bool:
    """Whether a node is tried. A view takes no time to speak of, but where the host has more to do than to make it."""
    return not needs_none(node) or (is_view(node) and on_gpu(device_of(node)))


def _clocks(node: Node, call: Call | None, known: Mapping[str, GpuClocks], rates: Callable[[], Device], cold: float) -> tuple[float, float]:
    """Microseconds of the device and of the host, as they were measured or by the rates; so much of what it reads comes from memory."""
    if call is None:
        return 0.0, 0.0
    if call.text not in known:
        return rates().node_us(node), rates().node_issue_us(node)
    warm_ns, cold_ns, host_ns = known[call.text]
    return (warm_ns + cold * (cold_ns - warm_ns)) / 1e3, host_ns / 1e3


def _of_device(wanted: Mapping[str, Call], device: str, laboratory: Laboratory) -> dict[str, GpuClocks]:
    """By call: remembered, or measured now and remembered."""
    if on_gpu(device):
        return _of_gpu(wanted, device, laboratory)
    circumstances = (*laboratory.circumstances(device), "caches of 64 MiB are cold")
    cache = Cache("timings", circumstances, 1, _LONGEST_NS) if laboratory.remember else None
    remembered = cache.load() if cache is not None else {}
    measured = _measured([call for text, call in wanted.items() if text not in remembered], laboratory)
    known = remembered | (cache.merge(measured) if cache is not None and measured else measured)
    return {text: (0, 0, ns) for text, ns in known.items()}


def _of_gpu(wanted: Mapping[str, Call], device: str, laboratory: Laboratory) -> dict[str, GpuClocks]:
    cache = Cache("clocks", laboratory.circumstances(device), parse=_parsed) if laboratory.remember else None
    remembered = cache.load() if cache is not None else {}
    calls, entries = [call for text, call in wanted.items() if text not in remembered], dict[str, str]()
    for done in range(0, len(calls), _TOGETHER):
        laboratory.tell(done / len(calls))
        group = calls[done : done + _TOGETHER]
        launches = zip(group, laboratory.launches_ns(group), strict=True)
        entries |= {call.text: " ".join(map(str, clocks)) for call, clocks in launches if clocks is not None}
    known = remembered | (cache.merge(entries) if cache is not None and entries else entries)
    return {text: _parsed(entry) for text, entry in known.items()}


def _parsed(text: str) -> GpuClocks:
    """Raises ValueError for what is no measurement."""
    warm_ns, cold_ns, host_ns = map(int, text.split())
    if not (1 <= warm_ns <= cold_ns <= _LONGEST_NS and 1 <= host_ns <= _LONGEST_NS):
        raise ValueError(f"expected nanoseconds in warm caches, in cold ones and of the host, from 1 to {_LONGEST_NS}, got {text!r}")
    return warm_ns, cold_ns, host_ns


def _measured(calls: Sequence[Call], laboratory: Laboratory) -> dict[str, int]:
    """Nanoseconds by call; without those that cannot be run."""
    rough, rounds = laboratory.rough_ns, max(runs for _, runs in _RUNS)
    least = {call.text: rough[call.text] for call in calls if rough.get(call.text, 0) >= _COUNTS_NS}
    for turn in range(rounds):
        due = [call for call in calls if turn < _runs(least.get(call.text, rough.get(call.text, 0)))]
        done = 0
        for group in _groups(due):
            laboratory.tell((turn + done / len(due)) / rounds)
            times = laboratory.times_ns(group, warm_up=turn == 0 and any(call.text not in rough for call in group))
            least |= {call.text: min(ns, least.get(call.text, ns)) for call, ns in zip(group, times, strict=True) if ns is not None}
            done += len(group)
    _run_again([call for call in calls if call.text in least and call.text not in laboratory.failures], least, laboratory)
    return {text: took for text, took in least.items() if text not in laboratory.failures}


def _run_again(calls: Sequence[Call], least: dict[str, int], laboratory: Laboratory) -> None:
    """Run what took far longer than it should, until it does not, or takes as long each time: such times are kept for good."""
    alike, spent_ns = Counter[str](), Counter[str]()

    def is_open(call: Call) -> bool:
        is_told = alike[call.text] >= _ALIKE or spent_ns[call.text] > _AGAIN_NS
        return not is_told and least[call.text] > _BASE_NS + _BYTE_NS * call.nbytes + _FLOP_NS * node_flops(call.node)

    for _ in range(_AGAIN):
        for group in _groups([call for call in calls if is_open(call)]):
            for call, ns in zip(group, laboratory.times_ns(group, warm_up=False), strict=True):
                if ns is None:
                    spent_ns[call.text] = _AGAIN_NS + 1
                    continue
                spent_ns[call.text] += ns
                if ns * _NEAR < least[call.text]:
                    alike[call.text] = 0
                elif ns <= least[call.text] * _NEAR:
                    alike[call.text] += 1
                least[call.text] = min(ns, least[call.text])


def _runs(took_ns: int) -> int:
    """How often a call is run that takes about so long: what disturbs a long one is a small part of it."""
    return next((runs for below_ns, runs in _RUNS if took_ns < below_ns), 0)


def _groups(calls: Sequence[Call]) -> Iterator[list[Call]]:
    """The calls in order, as many at once as find their arguments in no cache."""
    group: list[Call] = []
    nbytes = 0
    for call in calls:
        if group and (len(group) == _TOGETHER or nbytes + _nbytes(call) > _TOGETHER_BYTES):
            yield group
            group, nbytes = [], 0
        group.append(call)
        nbytes += _nbytes(call)
    if group:
        yield group


def _nbytes(call: Call) -> int:
    try:
        return call.nbytes
    except FormatError:  # symbolic sizes: it is tried by itself, and that fails
        return _TOGETHER_BYTES


def _best_ns(call: Callable[[], Any], device: str) -> int:
    """The least time of a call in warm caches: the first run is to warm up. Of a device beside the host its own time, in cold ones."""
    if on_gpu(device):
        return clocks_ns(call, device)[1]
    call()
    best, spent, runs = 2**62, 0, 0
    while runs < _LEAST_RUNS or (spent < _LEAST_S * 1e9 and runs < 1000):
        took = once_ns(call, device)
        best, spent, runs = min(best, took), spent + took, runs + 1
    return best


def device_here(device: str) -> Device:
    """This machine's device as numbers, for what cannot be measured operator by operator; measured at first use and remembered."""
    beside = on_gpu(device)
    cache = Cache("rates", circumstances(device), 1)
    known = cache.load()
    if not known.keys() >= _rate_names(beside):
        known = cache.merge(_rates(device))
    return Device(
        name=device,
        flops_per_s={dtype: float(known[f"{dtype}_flops_per_s"]) for dtype in _RATED_DTYPES},
        bandwidth_bytes_per_s=float(known["bytes_per_s"]),
        launch_us=known["launch_ns"] / 1e3,
        to_host_bytes_per_s=float(known.get("to_host_bytes_per_s", 0)),
        from_host_bytes_per_s=float(known.get("from_host_bytes_per_s", 0)),
        half_flops=float(known["half_flops"]),
        granule_bytes=512 if beside else 1,
        issue_us=known.get("issue_ns", 0) / 1e3,
        moves_beside=beside,
        memory_bytes=torch.cuda.get_device_properties(device).total_memory if beside else 0,
    )


def devices_here() -> list[Device]:
    """This machine's CPU, and its GPU where it has one."""
    gpus = [f"cuda:{torch.cuda.current_device()}"] if torch.cuda.is_available() else []
    return [device_here(name) for name in ("cpu", *gpus)]


def _rate_names(beside: bool) -> set[str]:
    link = {"to_host_bytes_per_s", "from_host_bytes_per_s", "issue_ns"} if beside else set()
    return {"bytes_per_s", "launch_ns", "half_flops"} | {f"{dtype}_flops_per_s" for dtype in _RATED_DTYPES} | link


def _rates(device: str) -> dict[str, int]:
    """What matrix products by type, copies, and an operator that does as good as nothing reach."""
    with aside(device):
        launch_ns, issue_ns = _launch(torch.ones(1, device=device), device)
        largest = 12 if on_gpu(device) else 9  # powers of 2; some CPUs take seconds for float16
        rates = {f"{dtype}_flops_per_s": _product(largest, dtype, device) for dtype in _RATED_DTYPES}
        rising = [*(_product(power, "float32", device) for power in range(4, largest)), rates["float32_flops_per_s"]]
        half = half_flops_of(rising, max(flops / took_ns for flops, took_ns in rising), launch_ns)
        measured = {name: int(flops * 1e9 / took_ns) for name, (flops, took_ns) in rates.items()}
        return measured | {"launch_ns": launch_ns, "half_flops": max(1, int(half)), **issue_ns, **_copies(device)}


def _launch(one: torch.Tensor, device: str) -> tuple[int, dict[str, int]]:
    """The nanoseconds of an operator that does as good as nothing; on a device beside the host, what it takes the host, too."""
    if on_gpu(device):
        launch_ns, _, issue_ns = clocks_ns(one.neg_, device)
        return launch_ns, {"issue_ns": issue_ns}
    many = 100
    return max(1, _best_ns(lambda: [one.neg_() for _ in range(many)], device) // many), {}


def _product(power: int, dtype: str, device: str) -> tuple[int, int]:
    """Operations and nanoseconds of a product of two square matrices with sides of 2**power."""
    side = 2**power
    matrix = torch.ones((side, side), dtype=getattr(torch, dtype), device=device)
    return 2 * side**3, _best_ns(lambda: matrix @ matrix, device)


def _copies(device: str) -> dict[str, int]:
    """Bytes in a second: within the device, read and written; over the link each way, from and to memory that the host holds in place."""
    count = 2**26 if on_gpu(device) else 2**24
    source = torch.ones(count, device=device)
    target = torch.empty_like(source)
    rates = {"bytes_per_s": int(2 * source.nbytes * 1e9 / _best_ns(lambda: target.copy_(source), device))}
    if not on_gpu(device):
        return rates
    host = torch.empty(count, pin_memory=True)
    return rates | {
        "to_host_bytes_per_s": int(host.nbytes * 1e9 / _best_ns(lambda: host.copy_(source, non_blocking=True), device)),
        "from_host_bytes_per_s": int(host.nbytes * 1e9 / _best_ns(lambda: target.copy_(host, non_blocking=True), device)),
    }
