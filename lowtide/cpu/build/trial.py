"""How long networks of one source take, side by side on made-up numbers.

They run in turns, by the team, as they would, and find what others have left in the caches; the least time of each counts. What is compiled
for that is not kept.
"""

from __future__ import annotations

import ctypes
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from lowtide.cpu.build.constants import aligned
from lowtide.cpu.build.library import ENTRY, build, team
from lowtide.runtime.compiler import NativeError

_SPIN_US = 200
_ROUNDS, _FEWEST = 40, 5
_PATIENCE_NS = 600_000_000


def times_ns(source: str, count: int, elements: Sequence[int]) -> list[int]:
    """The least time of each of so many networks, given blocks of memory of so many elements. Raises NativeError."""
    blocks = [_numbers(each) for each in elements]
    at = (ctypes.c_void_p * len(blocks))(*(block.data_ptr() for block in blocks))
    with tempfile.TemporaryDirectory(prefix="lowtide-trial-") as folder:
        path = Path(folder) / "trial.so"
        build(source, path)
        try:
            library = ctypes.CDLL(str(path))
            functions = [getattr(library, f"{ENTRY}_{number}" if number else ENTRY) for number in range(count)]
        except (OSError, AttributeError) as error:
            raise NativeError(f"the library that was built does not load ({error})") from error
        return _least_ns([ctypes.cast(each, ctypes.c_void_p).value or 0 for each in functions], at)


def _least_ns(addresses: Sequence[int], at: ctypes.Array[ctypes.c_void_p]) -> list[int]:
    run, threads = team().run, torch.get_num_threads()
    best = [2**62] * len(addresses)
    end = time.perf_counter_ns() + _PATIENCE_NS
    for turn in range(_ROUNDS):
        for number, address in enumerate(addresses):
            begin = time.perf_counter_ns()
            run(address, at, threads, _SPIN_US, None)
            best[number] = min(best[number], max(1, time.perf_counter_ns() - begin))
        if turn + 1 >= _FEWEST and time.perf_counter_ns() > end:
            break
    return best


def _numbers(elements: int) -> torch.Tensor:
    """Some that no sum makes huge or tiny."""
    block = aligned(elements + 64)
    return block.copy_(torch.arange(block.numel(), device="cpu").remainder_(997)).mul_(1e-4)
