"""Runs one call on made-up data and tells what it takes and what it gives, in whatever process this is.

    takes   a recipe: plain data, as `recipe` leaves it
    leaves  bytes and the looks of results, or nanoseconds: plain data too

The data is ones, and zeros for integers, which are valid indices everywhere: an operator whose result has a size known beforehand does not
size its temporaries by the data.

What a call takes on a device beside the host is told by two clocks: the device's own, and the host's to issue it. The host issues faster
than the device runs, or slower; so neither is seen where both wait for one another. Here the device is kept busy while a call is issued
several times: the host does not wait, and then the device finds all of them in its queue and does not wait either. What a call reads is
then in the device's cache, as in a step what the operator before has just made, but not a parameter; so it is also run with caches emptied.
On an H100 the kernels of a step of gpt2 take 65.4 ms: alone, in warm caches, 63.9, in cold ones 68.0.
"""

from __future__ import annotations

import math
import re
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from lowtide.cost.operators import atom, dtype_name, of_torch, operator
from lowtide.cost.profiler import device_name, measure_memory_of_each
from lowtide.ir.result_specs import pieces_of
from lowtide.ir.sizes import reach
from lowtide.kernels.draws import draws_apart

_LACKING = ("not enough memory", "Cannot allocate memory")
CACHES = Path("/sys/devices/system/cpu/cpu0/cache")
_CACHES_WHERE_UNKNOWN_BYTES = 32 * 2**20
_CROWD_BYTES = 64 * 2**20  # at most: a cache that many processors share is not one program's own, and reading as much takes its time
_FREE_WHERE_UNKNOWN_BYTES = 4 * 2**30  # systems without /proc/meminfo


def take_level(recipe: dict[str, Any], device: str, gradients: bool) -> dict[str, Any]:
    """The highest level of the allocator during the call above that at its start, what the results look like, and nanoseconds, roughly."""
    with aside(device, gradients):
        call = made_ready(recipe)
        if on_gpu(device):
            call()  # the first call of a kind makes buffers that its library keeps: they are not the call's
        seen: list[Any] = []
        took: list[int] = []
        (level,) = measure_memory_of_each([lambda: took.append(once_ns(lambda: _noted(call(), seen), device))], device, collect=False)
    return {"level_bytes": level.above_bytes, "results": seen, "ns": took[0]}


def take_times(recipes: list[dict[str, Any]], device: str, gradients: bool, warm_up: bool) -> dict[str, Any]:
    """Nanoseconds of one run of each call with arguments that are in no cache. Runs before it let libraries choose and make kernels."""
    with aside(device, gradients):
        calls, evict = [made_ready(recipe) for recipe in recipes], crowd(device)
        for call in calls if warm_up else ():
            call()
        if evict is not None:
            evict()
        return {"ns": [once_ns(call, device) for call in calls]}


def answer(take: Callable[[], dict[str, Any]]) -> dict[str, Any]:
    """What a trial tells. Whatever an operator raises on made-up data is an answer too: {"failure": ..., "of_memory": ...}."""
    try:
        return take()
    except Exception as error:  # an operator may raise anything on data that nobody meant for it
        lacking = isinstance(error, (MemoryError, torch.OutOfMemoryError)) or any(words in str(error) for words in _LACKING)
        return {"failure": f"{type(error).__name__}: {error}", "of_memory": lacking}


def made_ready(recipe: dict[str, Any]) -> Callable[[], Any]:
    """The last step of a recipe with its arguments; the steps before it have run. Raises FormatError for what this torch does not have."""
    kitchen = _Kitchen(recipe["values"])
    *before, last = recipe["steps"]
    for step in before:
        kitchen.run(step)
    return kitchen.ready(last)


def made_up(layout: list[Any]) -> torch.Tensor:
    """A tensor of ones (zeros for integers) of a dtype, shape and strides, on a device."""
    name, shape, stride, device = layout
    dtype = of_torch(name)
    ones = dtype.is_floating_point or dtype.is_complex or dtype == torch.bool
    # Strides may overlap (expanded tensors): what lies beneath is filled, not the tensor.
    return torch.full((reach(shape, stride),), int(ones), dtype=dtype, device=device).as_strided(shape, stride)


class _Kitchen:
    """The values of a recipe, each made when it is first asked for."""

    def __init__(self, entries: list[dict[str, Any]]) -> None:
        self._entries = entries
        self._made: dict[int, Any] = {}
        self._results: list[list[Any]] = []

    def run(self, step: dict[str, Any]) -> None:
        self._results.append(pieces_of(self.ready(step)()))

    def ready(self, step: dict[str, Any]) -> Callable[[], Any]:
        func, args = operator(step["op"]), [self._argument(arg) for arg in step["args"]]
        kwargs = {name: self._argument(arg) for name, arg in step["kwargs"].items()}
        schema = getattr(func, "_schema", None)
        for at, argument in enumerate(() if schema is None else schema.arguments):  # a generator: torch's, which is put back
            if "Generator" in str(argument.type):
                args[at : at + 1] = [None] * len(args[at : at + 1])
                kwargs |= {argument.name: None} if argument.name in kwargs else {}
            elif str(argument.type) in ("int", "SymInt") and at < len(args) and isinstance(args[at], float):
                args[at] = math.ceil(args[at])  # a number that was made up
        return lambda: func(*args, **kwargs)

    def _argument(self, arg: Any) -> Any:
        if isinstance(arg, list):
            return [self._argument(item) for item in arg]
        if not isinstance(arg, dict):
            return arg
        if "value" in arg:
            return self._value(arg["value"])
        return complex(*arg["complex"]) if "complex" in arg else atom(*arg["atom"])

    def _value(self, number: int) -> Any:
        if number not in self._made:
            self._made[number] = self._new(self._entries[number])
        return self._made[number]

    def _new(self, entry: dict[str, Any]) -> Any:
        if "step" in entry:
            return self._results[entry["step"]][entry["result"]]
        return made_up(entry["made"]) if "made" in entry else entry["scalar"]


def _noted(out: Any, seen: list[Any]) -> Any:
    """Note what results look like, and hand them on."""
    seen += [_look(piece) for piece in pieces_of(out)]
    return out


def _look(piece: Any) -> Any:
    """[dtype, shape, stride, offset, bytes of the storage, device]; None for what is no dense tensor."""
    if not isinstance(piece, torch.Tensor) or piece.layout is not torch.strided:
        return None
    nbytes = piece.untyped_storage().nbytes()
    return [dtype_name(piece.dtype), list(piece.shape), list(piece.stride()), piece.storage_offset(), nbytes, str(piece.device)]


@contextmanager
def aside(device: str, gradients: bool = True) -> Iterator[None]:
    """Leave no trace on the caller: neither on random state nor on modes.

    Some kernels ask whether gradients are enabled, so they are as they will be in the program; nothing is recorded, as no made-up tensor
    requires any.
    """
    kind = torch.device(device).type
    with draws_apart([device]), torch.set_grad_enabled(gradients), torch.autocast(kind, enabled=False), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what an operator says of made-up data concerns nobody
        yield


def circumstances(device: str, gradients: bool = True) -> tuple[str, ...]:
    """What decides, besides the call, which kernels run and what they take."""
    return (
        f"torch {torch.__version__}",
        device_name(device),
        f"{torch.get_num_threads()} threads",
        f"oneDNN {torch.backends.mkldnn.enabled}",
        f"deterministic {torch.are_deterministic_algorithms_enabled()}",
        f"matmul precision {torch.get_float32_matmul_precision()}",
        f"default {dtype_name(torch.get_default_dtype())}",
        f"gradients {gradients}",
        *([f"cudnn {cudnn_flags()}"] if on_gpu(device) else []),
    )


def cudnn_flags() -> dict[str, bool]:
    """What decides which of cuDNN's kernels run."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of a flag that goes by another name from some version on
        return {name: bool(getattr(torch.backends.cudnn, name)) for name in ("enabled", "benchmark", "deterministic", "allow_tf32")}


def free_bytes(device: str) -> int:
    if on_gpu(device):
        return torch.cuda.mem_get_info(device)[0]
    info = Path("/proc/meminfo")
    available = re.search(r"MemAvailable:\s*(\d+) kB", info.read_text()) if info.exists() else None
    return int(available[1]) * 1024 if available else _FREE_WHERE_UNKNOWN_BYTES


def once_ns(call: Callable[[], Any], device: str) -> int:
    """On one thread of a CPU the processor's own time counts: waiting for a busy processor is not the operator's doing."""
    clock = time.thread_time_ns if device == "cpu" and torch.get_num_threads() == 1 else time.perf_counter_ns
    finish(device)
    start = clock()
    call()
    finish(device)
    return max(1, clock() - start)


def finish(device: str) -> None:
    if on_gpu(device):
        torch.cuda.synchronize(device)


def on_gpu(device: str) -> bool:
    """Whether a device is one that works beside the processor."""
    return device.startswith("cuda")


@cache
def crowd(device: str) -> Callable[[], Any] | None:
    """Reads as much other memory as crowds what a call reads out of a device's caches; None where there is no memory for that."""
    try:
        return torch.ones(min(_CROWD_BYTES, 2 * cache_bytes(device)) // 4, device=device).sum
    except (MemoryError, RuntimeError):
        return None


def forget_crowds() -> None:
    """Let go the memory that trials of times read beside."""
    crowd.cache_clear()


def cache_bytes(device: str) -> int:
    """The size of the largest cache; a guess where the system does not tell."""
    if on_gpu(device):
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    return max(caches_bytes(), default=_CACHES_WHERE_UNKNOWN_BYTES)


def caches_bytes(folder: Path = CACHES) -> tuple[int, ...]:
    """Sizes of the processor's data caches, nearest first; nothing where the system does not tell."""
    sizes: dict[int, int] = {}
    try:
        for index in sorted(folder.glob("index*")):
            if (index / "type").read_text().strip() in ("Data", "Unified"):
                size = re.fullmatch(r"(\d+)([KM]?)", (index / "size").read_text().strip())
                if size is not None:
                    sizes[int((index / "level").read_text())] = int(size[1]) * {"K": 2**10, "M": 2**20, "": 1}[size[2]]
    except (OSError, ValueError):
        return ()
    return tuple(size for _, size in sorted(sizes.items()))


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
