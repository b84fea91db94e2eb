"""A network that can be called: with tensors in, tensors out, its arena and its packed constants held from call to call.

Constants are packed at the first call, and again where a call brings others or changed ones: other tensors, other memory, a write that
torch counts, or another number at the one place of each that is looked at.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch

from lowtide.base.narrow import there
from lowtide.ir.graph import Value
from lowtide.ir.packed import Packed
from lowtide.runtime.networks.built import Experience, Team
from lowtide.runtime.networks.constants import Constants
from lowtide.runtime.networks.pack import aligned, pack
from lowtide.runtime.networks.watched import Seen
from lowtide.runtime.plain import refuse_surroundings

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


class Held:
    """A network with an arena of its own, and constants as they were packed once: runs with the arguments that differ.

    Several threads run as long as that is faster; `always` where it is not, too.
    """

    def __init__(self, described: Described, team: Team, always: bool = False) -> None:
        self.its, self.team, self.always, self.lock = described, team, always, threading.Lock()
        self.kept: torch.Tensor | None = None
        self._experience = Experience()
        self.experience_at = None if always else ctypes.addressof(self._experience)
        self._arena = aligned(described.arena_bytes // 4 + _SLACK_ELEMENTS)
        self._looks = [([int(size) for size in value.shape], [int(step) for step in value.stride]) for value in described.results]
        self._at = (ctypes.c_void_p * (2 + len(described.live) + len(described.results)))()
        self._at[0] = self._arena.data_ptr()

    @property
    def nbytes(self) -> int:
        """What is held from call to call."""
        return self._arena.nbytes + (0 if self.kept is None else self.kept.nbytes)

    def keep(self, constants: torch.Tensor) -> None:
        """Run with these from now on."""
        self._at[1], self.kept = constants.data_ptr(), constants

    def __call__(self, *live: torch.Tensor) -> list[torch.Tensor]:
        """The body's results."""
        with self.lock:
            return self.run(live)

    def run(self, live: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """The same for who has the lock."""
        results, at = self._results(), self._at
        for place, tensor in enumerate((*live, *results), 2):
            at[place] = tensor.data_ptr()
        self.team.run(self.its.address, at, torch.get_num_threads(), SPIN_US, self.experience_at)
        return results

    @property
    def result_bytes(self) -> int:
        """What the results of a run take."""
        return sum(int(value.storage.nbytes) for value in self.its.results)

    def fresh(self, constants: torch.Tensor) -> tuple[list[torch.Tensor], Any]:
        """Results for one run with these constants, and all addresses for it but those of the arguments that differ."""
        results = self._results()
        at = type(self._at)(self._at[0], constants.data_ptr(), *([None] * len(self.its.live)), *(each.data_ptr() for each in results))
        return results, at

    def _results(self) -> list[torch.Tensor]:
        refuse_surroundings()
        return [torch.empty_strided(shape, stride, dtype=torch.float32, device="cpu") for shape, stride in self._looks]


class Kept(NamedTuple):
    """A network with constants as they were when this was made."""

    held: Held
    constants: torch.Tensor
    seen: Seen


class Running:
    """Calls a network with constants that may change."""

    def __init__(self, described: Described, team: Team, always: bool = False) -> None:
        self._its, self._team, self._held = described, team, Held(described, team, always)
        self._constants = Constants(())
        self._mark = 0

    def __call__(self, *given: torch.Tensor) -> list[torch.Tensor]:
        """The body's results."""
        fixed = [given[at] for at in self._its.fixed]
        with self._held.lock:
            if self._held.kept is None or not self._constants.same(fixed) or self._marked() != self._mark:
                self._pack(fixed)
            return self._held.run([given[at] for at in self._its.live])

    def again(self, *live: torch.Tensor) -> list[torch.Tensor]:
        """The same from the same constants as in the last call, of which only the arguments that differ are given.

        A call's many tensors are not even touched: what a network of a tenth of a millisecond does leaves none of them in a near cache.
        """
        with self._held.lock:
            if not self._constants.unchanged() or self._marked() != self._mark:
                self._pack(self._constants.tensors)
            return self._held.run(live)

    def packed(self) -> Kept | None:
        """What runs, with which constants, and what tells that these are what they were packed of; None where nothing does."""
        with self._held.lock:
            theirs = self._constants.words
            if theirs is None or self._held.kept is None:
                return None
            marked = [at + 4 * place for at, place in zip(self._marks, self._places, strict=True)]
            seen = Seen(*theirs, marked, self._marked_at, self._constants)  # whose tensors keep what is read
            same = self._constants.unchanged() and self._marked() == self._mark  # what was read before this is what was packed
            return Kept(self._held, self._held.kept, seen) if same else None

    def frozen(self) -> Held:
        """What runs with the constants of the last call for good, and holds nothing of the caller's."""
        with self._held.lock:
            held = Held(self._its, self._team, self._held.always)
            held.keep(there(self._held.kept))
            return held

    def _pack(self, fixed: Sequence[torch.Tensor]) -> None:
        kept = packed(self._its, fixed)
        self._constants = Constants(fixed)
        self._marked_at = [at for at, tensor in enumerate(fixed) if tensor.dtype == torch.float32 and tensor.numel()]
        marked = [fixed[at] for at in self._marked_at]
        self._marks = (ctypes.c_void_p * len(marked))(*map(torch.Tensor.data_ptr, marked))
        self._places = (ctypes.c_int64 * len(marked))(*map(_middle, marked))
        self._mark = self._marked()
        self._held.keep(kept)

    def _marked(self) -> int:
        return int(self._team.mark(self._marks, self._places, len(self._marks)))


def packed(its: Described, fixed: Sequence[torch.Tensor]) -> torch.Tensor:
    """Constants as kernels read them."""
    kept = aligned(its.kept_elements)
    pack(its.recipes, dict(zip(its.wanted, its.constants(fixed), strict=True)), kept)
    return kept


def _middle(tensor: torch.Tensor) -> int:
    """The position in memory of an element in the middle of a tensor."""
    index = [size // 2 for size in tensor.shape]
    return sum(at * step for at, step in zip(index, tensor.stride(), strict=True))
