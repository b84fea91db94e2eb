"""A network that can be called: with tensors in, tensors out, its arena and its packed constants held from call to call.

Constants are packed at the first call, and again where a call brings others or changed ones: other tensors, other memory, a write that
torch counts, or another number at the one place of each that is looked at.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from lowtide.ir.graph import Value
from lowtide.ir.packed import Packed
from lowtide.runtime.networks.built import Experience, Team
from lowtide.runtime.networks.constants import Constants
from lowtide.runtime.networks.pack import aligned, pack

SPIN_US = 200  # how long threads wait awake for the next run
_SLACK_ELEMENTS = 64  # behind the arena, which kernels may read


@dataclass(frozen=True)
class Described:
    """What a network needs to run."""

    address: int  # of its function
    library: Any  # that has it
    arena_bytes: int
    kept_elements: int
    recipes: tuple[Packed, ...]
    live: tuple[int, ...]  # the arguments that differ from call to call
    fixed: tuple[int, ...]  # the constants among the arguments
    wanted: tuple[Value, ...]  # what the recipes read
    constants: Callable[[Sequence[Any]], list[Any]]  # that from the fixed arguments
    results: tuple[Value, ...]


class Running:
    """Calls a network. Several threads run as long as that is faster; `always` where it is not, too."""

    def __init__(self, described: Described, team: Team, always: bool = False) -> None:
        self._its, self._team = described, team
        self._lock = threading.Lock()
        self._experience = Experience()
        self._experience_at = None if always else ctypes.addressof(self._experience)
        self._arena = aligned(described.arena_bytes // 4 + _SLACK_ELEMENTS)
        self._kept: torch.Tensor | None = None
        self._constants = Constants(())
        self._mark = 0
        self._looks = [([int(size) for size in value.shape], [int(step) for step in value.stride]) for value in described.results]
        count = 2 + len(described.live) + len(described.results)
        self._at = (ctypes.c_void_p * count)()
        self._at[0] = self._arena.data_ptr()

    @property
    def packed_bytes(self) -> int:
        """What is held from call to call: the arena, and constants as kernels read them."""
        return self._arena.nbytes + 4 * self._its.kept_elements

    def __call__(self, *given: torch.Tensor) -> list[torch.Tensor]:
        """The body's results."""
        fixed = [given[at] for at in self._its.fixed]
        with self._lock:
            if self._kept is None or not self._constants.same(fixed) or self._marked() != self._mark:
                self._pack(fixed)
            return self._run([given[at] for at in self._its.live])

    def again(self, *live: torch.Tensor) -> list[torch.Tensor]:
        """The same from the same constants as in the last call, of which only the arguments that differ are given.

        A call's many tensors are not even touched: what a network of a tenth of a millisecond does leaves none of them in a near cache.
        """
        with self._lock:
            if not self._constants.unchanged() or self._marked() != self._mark:
                self._pack(self._constants.tensors)
            return self._run(live)

    def _run(self, live: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        results = [torch.empty_strided(shape, stride, dtype=torch.float32) for shape, stride in self._looks]
        at = self._at
        for place, tensor in enumerate((*live, *results), 2):
            at[place] = tensor.data_ptr()
        self._team.run(self._its.address, at, torch.get_num_threads(), SPIN_US, self._experience_at)
        return results

    def _pack(self, fixed: Sequence[torch.Tensor]) -> None:
        its = self._its
        kept = aligned(its.kept_elements)
        values = its.constants(fixed)
        pack(its.recipes, dict(zip(its.wanted, values, strict=True)), kept)
        self._constants = Constants(fixed)
        marked = [tensor for tensor in fixed if tensor.dtype == torch.float32 and tensor.numel()]
        self._marks = (ctypes.c_void_p * len(marked))(*map(torch.Tensor.data_ptr, marked))
        self._places = (ctypes.c_int64 * len(marked))(*map(_middle, marked))
        self._mark = self._marked()
        self._at[1], self._kept = kept.data_ptr(), kept

    def _marked(self) -> int:
        return int(self._team.mark(self._marks, self._places, len(self._marks)))


def _middle(tensor: torch.Tensor) -> int:
    """The position in memory of an element in the middle of a tensor."""
    index = [size // 2 for size in tensor.shape]
    return sum(at * step for at, step in zip(index, tensor.stride(), strict=True))
