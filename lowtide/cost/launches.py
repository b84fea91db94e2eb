"""What a call takes on a device beside the host, by two clocks: the device's own, and the host's to issue it.

The host issues faster than the device runs, or slower; so neither is seen where both wait for one another. Here the device is kept busy
while a call is issued several times: the host does not wait, and then the device finds all of them in its queue and does not wait either.
What a call reads is then in the device's cache, as in a step what the operator before has just made, but not a parameter; so it is also
run with caches emptied. On an H100 the kernels of a step of gpt2 take 65.4 ms: alone, in warm caches, 63.9, in cold ones 68.0.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch

from lowtide.cost.trial import aside, crowd, made_ready, once_ns

_LAUNCHES = ((3 * 10**6, 10), (3 * 10**7, 3), (2**63, 1))  # nanoseconds, and how often what takes less is issued at once
_ROUNDS = 2  # of which the least counts, for either clock
_BUSY_CYCLES_A_NS = 8  # of the host, which needs less: clocks have some two
_COLD = 3  # runs in cold caches, of which the least counts
_BUSY_CYCLES, _LONGER, _TRIES = 2 * 10**6, 4, 3  # about a millisecond; for slow hosts so many times as long, so often
_WARM_UP_CYCLES = 10**8  # about 50 milliseconds: the device's clocks are then those of a long run


def take_launches(recipes: Sequence[dict[str, Any]], device: str, gradients: bool) -> dict[str, Any]:
    """By recipe, nanoseconds of the device in warm and in cold caches, and of the host."""
    with aside(device, gradients):
        return {"ns": [clocks_ns(made_ready(recipe), device) for recipe in recipes]}


def clocks_ns(call: Callable[[], Any], device: str) -> tuple[int, int, int]:
    """Nanoseconds of a run on the device in warm and in cold caches, and of the host to issue it."""
    with torch.cuda.device(torch.device(device)):
        _warm_up(device)
        return _clocks_ns(call, device)


def _clocks_ns(call: Callable[[], Any], device: str) -> tuple[int, int, int]:
    call()  # libraries choose and make kernels
    alone_ns = once_ns(call, device)
    count = next(count for below_ns, count in _LAUNCHES if alone_ns < below_ns)
    rounds = [_queued(call, count, device) or (alone_ns, alone_ns) for _ in range(_ROUNDS)]
    warm_ns, host_ns = min(each for each, _ in rounds), min(each for _, each in rounds)
    if count == 1:  # too long for caches to matter
        return warm_ns, warm_ns, host_ns
    return warm_ns, max(warm_ns, _cold_ns(call, host_ns, device) - _pair_ns(device)), host_ns


def _queued(call: Callable[[], Any], count: int, device: str) -> tuple[int, int] | None:
    """The same of `count` runs, one behind the other. None for a call that waits for the device itself."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    for longer in range(_TRIES):
        torch.cuda.synchronize(device)
        torch.cuda._sleep(_BUSY_CYCLES * _LONGER**longer)
        begin.record()
        clock = time.perf_counter_ns()
        for _ in range(count):
            call()
        issue_ns = (time.perf_counter_ns() - clock) // count
        late = begin.query()
        end.record()
        torch.cuda.synchronize(device)
        if not late:
            return max(1, int(begin.elapsed_time(end) * 1e6 / count)), max(1, issue_ns)
    return None


def _cold_ns(call: Callable[[], Any], host_ns: int, device: str) -> int:
    """Of one run, between two events, when other memory has been read: the least of some."""
    evict = crowd(device) or torch.ones(1, device=device).neg_
    pairs = [(torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)) for _ in range(_COLD)]
    torch.cuda.synchronize(device)
    torch.cuda._sleep(_BUSY_CYCLES // 2 + _BUSY_CYCLES_A_NS * _COLD * host_ns)
    for begin, end in pairs:
        evict()
        begin.record()
        call()
        end.record()
    torch.cuda.synchronize(device)
    return min(int(begin.elapsed_time(end) * 1e6) for begin, end in pairs)


@cache
def _pair_ns(device: str) -> int:
    """What lies between two events beside the run: of an operator that does as good as nothing, which is all the same in cold caches."""
    one = torch.ones(1, device=device)
    queued = _queued(one.neg_, _LAUNCHES[0][1], device)
    return 0 if queued is None else max(0, _cold_ns(one.neg_, queued[1], device) - queued[0])


@cache
def _warm_up(device: str) -> None:
    torch.cuda._sleep(_WARM_UP_CYCLES)
    torch.cuda.synchronize(device)
