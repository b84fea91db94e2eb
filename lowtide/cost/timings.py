"""How long operators take: each distinct call run alone on made-up data, and remembered on disk.

    takes   nodes of a graph with concrete sizes
    leaves  microseconds for each node: measured, by the roofline where a call cannot be run here, 0 for views

The same calls are told apart, and made ready, as for `workspaces`. A call runs once to warm up and then until it has taken a millisecond,
at least three times; the least of those times is what counts, since whatever else the machine does only adds to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.cost.cache import Cache
from lowtide.cost.device import Device
from lowtide.cost.workspaces import (
    Unknown,
    aside,
    circumstances,
    device_of,
    fits,
    free_bytes,
    needs_none,
    ready_call,
    signature,
)
from lowtide.ir.graph import Node

_LEAST_RUNS, _LEAST_S = 3, 1e-3


@dataclass(frozen=True)
class Timings:
    """What `measure_timings` found."""

    us: tuple[float, ...]  # by node
    unknown: tuple[Unknown, ...]  # distinct calls that were not measured: their times are the roofline's


def measure_timings(nodes: Sequence[Node], roofline: Device, *, limit_bytes: int | None = None, remember: bool = True) -> Timings:
    """The time of each node on the device of what it makes; of a call that is not known and cannot be run here, what `roofline` says.

    A call whose arguments and results pass `limit_bytes` (a quarter of the device's free memory, where None) is not run, and one that fails
    is not hidden: both are listed as unknown. The caller's random state stays as it is.
    """
    calls = [None if needs_none(node) else signature(node) for node in nodes]
    wanted = {call: node for call, node in zip(calls, nodes, strict=True) if call is not None}
    known: dict[str, int] = {}  # nanoseconds
    unknown: list[Unknown] = []
    for device in dict.fromkeys(map(device_of, wanted.values())):
        here = {call: node for call, node in wanted.items() if device_of(node) == device}
        cache = Cache("timings", circumstances(device)) if remember else None
        remembered = cache.load() if cache is not None else {}
        found, failed = _measured({call: node for call, node in here.items() if call not in remembered}, device, limit_bytes)
        if cache is not None and found:
            cache.merge(found)
        known |= remembered | found
        unknown += failed
    times = [
        0.0 if call is None else known[call] / 1e3 if call in known else roofline.node_us(node)
        for call, node in zip(calls, nodes, strict=True)
    ]
    return Timings(tuple(times), tuple(unknown))


def _measured(wanted: dict[str, Node], device: str, limit_bytes: int | None) -> tuple[dict[str, int], list[Unknown]]:
    """Nanoseconds by call, and the calls that could not be run."""
    found: dict[str, int] = {}
    failed: list[Unknown] = []
    with aside(device):
        limit = free_bytes(device) // 4 if limit_bytes is None else limit_bytes
        for call, node in wanted.items():
            try:
                fits(node, limit)
                found[call] = _best_ns(ready_call(node), device)
            except Exception as error:  # whatever an operator raises on made-up data is its answer
                failed.append(Unknown(call, f"{type(error).__name__}: {error}"))
    return found, failed


def _best_ns(call: Callable[[], Any], device: str) -> int:
    """The least time of a call: the first run is to warm up."""
    call()
    best, spent, runs = 2**62, 0, 0
    while runs < _LEAST_RUNS or (spent < _LEAST_S * 1e9 and runs < 1000):
        _finish(device)
        start = time.perf_counter_ns()
        call()
        _finish(device)
        took = time.perf_counter_ns() - start
        best, spent, runs = min(best, took), spent + took, runs + 1
    return best


def _finish(device: str) -> None:
    """Wait for what a GPU still does."""
    if device.startswith("cuda"):
        torch.cuda.synchronize(device)


def device_here(device: str) -> Device:
    """This machine's device as numbers, for what cannot be measured operator by operator; measured at first use and remembered."""
    cache = Cache("device", circumstances(device))
    known = cache.load()
    if known.keys() != {"flops_per_s", "bytes_per_s", "launch_ns"} or not all(known.values()):
        known = _rates(device)
        cache.merge(known)
    rate = float(known["flops_per_s"])
    return Device(
        name=device,
        flops_per_s={"float32": rate, "float64": rate / 2, "float16": rate, "bfloat16": rate},
        bandwidth_bytes_per_s=float(known["bytes_per_s"]),
        launch_us=known["launch_ns"] / 1e3,
        to_host_bytes_per_s=float(known["bytes_per_s"]),
        from_host_bytes_per_s=float(known["bytes_per_s"]),
        granule_bytes=512 if device.startswith("cuda") else 1,
    )


def _rates(device: str) -> dict[str, int]:
    """Of a product of matrices, of a copy that no cache holds, and of an operator that does as good as nothing."""
    with aside(device):
        matrix, long, one = (torch.ones(shape, device=device) for shape in ((1024, 1024), (2**24,), (1,)))
        target = torch.empty_like(long)
        return {
            "flops_per_s": int(2 * 1024**3 / (_best_ns(lambda: matrix @ matrix, device) / 1e9)),
            "bytes_per_s": int(2 * 4 * 2**24 / (_best_ns(lambda: target.copy_(long), device) / 1e9)),
            "launch_ns": _best_ns(lambda: one.add_(1), device),
        }
