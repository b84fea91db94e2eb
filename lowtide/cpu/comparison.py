"""Whether generated kernels are faster than torch's own operators for a body: measured side by side, once, and kept on disk.

    takes   a body, what runs it generated, its source
    leaves  yes or no; the same for as long as the file of measurements is there

Both run on the same made-up tensors, in turns of a few runs; the least time of each counts, as all that disturbs only adds. torch's threads
stay awake for some milliseconds after an operator, on the processors that generated kernels want: a turn begins when they sleep. And as
the answer stays, where generated kernels lose they are measured again, later: a machine is not busy all the time. The file is by machine,
compiler, torch and library version, an entry by what is computed, the source and the threads.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch

from lowtide.base import VERSION
from lowtide.cost.cache import Cache
from lowtide.ir.graph import Graph, Value
from lowtide.ir.sizes import ITEM_BYTES, reach
from lowtide.ir.text.graph_text import to_text
from lowtide.runtime.libraries import machine

_NOISE = 1.02  # generated kernels stay where they are within this of torch's
_TURNS, _FEWEST, _RUNS = 8, 2, 4  # in a row; where one run takes long, that is a turn
_TURN_NS = 20_000_000
_CLEAR = 0.8  # of torch's time: what takes less after the fewest turns needs no more of them
_PATIENCE_NS = 400_000_000  # for all turns, but for the fewest
_AWAKE_S = 0.008  # OpenMP's threads, after their last work
_AGAIN_S = (0.05, 0.25)  # later, where generated kernels lost
_MOST_NS = 3600 * 10**9
_MOST_BYTES = 2**30  # of made-up tensors: larger bodies are believed to win, as work on them hides what a call costs
_NUMBER = 0.999
_PERIOD = 2**20 - 3
Runs = Callable[[Sequence[Any]], object]


def is_faster(body: Graph, source: str, generated: Runs, torchs: Runs, given: Sequence[Any] = ()) -> bool:
    """Whether a body is to be generated. Raises what the two raise. `given` is made-up data on which both have run, if any."""
    if _bytes_of(body) > _MOST_BYTES:
        return True
    cache, names = _cache(), _names(body, source)
    known = cache.load()
    if not all(name in known for name in names):
        known = cache.merge(dict(zip(names, _times_ns(generated, torchs, given or _warm(body, generated, torchs)), strict=True)))
    mine, its = (known[name] for name in names)
    return bool(mine <= _NOISE * its)


def measured_ns(body: Graph, source: str) -> tuple[int, int] | None:
    """What a body was measured to take generated, and by torch's operators; None where it was not."""
    known, (mine, its) = _cache().load(), _names(body, source)
    return (known[mine], known[its]) if mine in known and its in known else None


def _names(body: Graph, source: str) -> tuple[str, str]:
    key = hashlib.sha256(f"{to_text(body, sources=False)}\0{source}\0{torch.get_num_threads()}".encode()).hexdigest()[:32]
    return f"{key} generated", f"{key} torch"


def _cache() -> Cache:
    """The file for this machine, as it is now, and this way to measure."""
    return Cache("generated_times", (str((_TURNS, _RUNS, _AGAIN_S, _CLEAR)), *machine(), torch.__version__, VERSION), 1, _MOST_NS)


def _warm(body: Graph, generated: Runs, torchs: Runs) -> Sequence[Any]:
    given = made_up(body)
    generated(given), torchs(given)  # what comes first packs weights and fills caches
    return given


def _times_ns(one: Runs, two: Runs, given: Sequence[Any]) -> tuple[int, int]:
    best = _in_turns(one, two, given)
    for later_s in _AGAIN_S:
        if best[0] > _NOISE * best[1]:
            time.sleep(later_s)
            again = _in_turns(one, two, given)
            best = min(best[0], again[0]), min(best[1], again[1])
    return best


def _in_turns(one: Runs, two: Runs, given: Sequence[Any]) -> tuple[int, int]:
    best = [_MOST_NS, _MOST_NS]
    end = time.perf_counter_ns() + _PATIENCE_NS
    for turn in range(_TURNS):
        for at, runs in enumerate((one, two)):
            time.sleep(_AWAKE_S if torch.get_num_threads() > 1 else 0)
            best[at] = min(best[at], _turn_ns(runs, given))
        if turn + 1 >= _FEWEST and (time.perf_counter_ns() > end or best[0] < _CLEAR * best[1]):
            break
    return best[0], best[1]


def _turn_ns(runs: Runs, given: Sequence[Any]) -> int:
    best, start = _MOST_NS, time.perf_counter_ns()
    for _ in range(_RUNS):
        begin = time.perf_counter_ns()
        runs(given)
        _wait(given)
        now = time.perf_counter_ns()
        best = min(best, max(1, now - begin))
        if now - start > _TURN_NS:
            break
    return best


def _wait(given: Sequence[Any]) -> None:
    if any(isinstance(each, torch.Tensor) and each.is_cuda for each in given):
        torch.cuda.synchronize()


def made_up(body: Graph) -> list[Any]:
    """Tensors and numbers as a body takes them; the caller's random numbers stay as they are."""
    draws = torch.Generator("cpu").manual_seed(0)
    return [_tensor(value, draws) for value in body.inputs]


def _tensor(value: Value, draws: torch.Generator) -> Any:
    """Near one where there is one dimension, as norms have it; of a size that sums keep where there are more. Indices are zeros.

    Numbers are near one, too: what is multiplied by them in place run after run stays of its size.
    """
    if value.dtype == "scalar":
        return _NUMBER
    shape, stride = [int(size) for size in value.shape], [int(step) for step in value.stride]
    dtype: Any = getattr(torch, value.dtype)
    elements = reach(shape, stride)
    if not dtype.is_floating_point:
        flat = torch.zeros(elements, dtype=dtype, device="cpu")
    elif len(shape) > 1:
        flat = _drawn(torch.randn, elements, draws, 1 / max(1.0, prod(shape[1:]) ** 0.5 if len(shape) == 4 else shape[0] ** 0.5), 0.0)
    else:
        flat = _drawn(torch.rand, elements, draws, 1.0, 0.5)
    return flat.to(value.storage.device, dtype).as_strided(shape, stride)  # elements may share a place


def _drawn(draw: Callable[..., torch.Tensor], elements: int, draws: torch.Generator, scale: float, shift: float) -> torch.Tensor:
    """Draws that come again after a prime number, so that rows differ: to draw all takes longer than to measure."""
    few = draw(min(elements, _PERIOD), generator=draws, dtype=torch.float32, device="cpu").mul_(scale).add_(shift)
    return few if elements <= _PERIOD else few.repeat(-(-elements // _PERIOD))[:elements]


def _bytes_of(body: Graph) -> int:
    return sum(prod(int(size) for size in value.shape) * ITEM_BYTES[value.dtype] for value in body.inputs)
