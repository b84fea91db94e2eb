"""A network that can be called: with tensors in, tensors out, its arena and its packed constants held from call to call.

Constants are packed at the first call, and again where a call brings others or changed ones: other tensors, other memory, a write that
torch counts, or another number at the one place of each that is looked at. What torch does not count (`weight.data[3, 5] = 0`) may leave
that number as it was: so each call reads on in all numbers, a part at a time, and says so where one was found late.

A region that was loaded from a file has constants for good. Its buffers get offsets without a search: where a few hundred are placed, the
room `placement` would take more memory than the network itself. Each buffer, in turn, goes to the lowest gap beside those that it lives
with; of some orders the one is taken whose arena is least.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import product
from operator import attrgetter, is_
from typing import Any

import torch

from lowtide.base.messages import warn
from lowtide.cpu.network import Experience, Network, Placing, StagedBody, Team, network, network_of, team
from lowtide.cpu.recipes import Packed, Target, aligned, pack
from lowtide.errors import CheckError, FormatError, there
from lowtide.ir.bodies import Region
from lowtide.ir.graph import Value
from lowtide.lower.interpreter import watched
from lowtide.problems.placement import PlaceProblem, check_placement
from lowtide.runtime.batch import refuse_surroundings

SPIN_US = 200  # how long threads wait awake for the next run
_shape = attrgetter("shape")
_SLACK_ELEMENTS = 64  # behind the arena, which kernels may read
_PART_WORDS, _MOST_PARTS = 2048, 256  # of constants, of which each call reads one again: some 0.3 us for the smallest
_LATE = (
    "a weight ({}) was written where PyTorch does not count it (through `.data`), and up to {} calls since then used its old numbers;"
    " this one and those to come use the new ones. Write it under torch.no_grad() (`weight[mask] = 0`) for the next call to see it"
)


@dataclass(frozen=True)
class NetworkSpec:
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


class LoadedNetwork:
    """A network with an arena of its own, and constants as they were packed once: runs with the arguments that differ.

    Several threads run as long as that is faster; `always` where it is not, too.
    """

    def __init__(self, spec: NetworkSpec, team: Team, always: bool = False) -> None:
        self.its, self.team, self.always, self.lock = spec, team, always, threading.Lock()
        self.kept: torch.Tensor | None = None
        self._experience = Experience()
        self.experience_at = None if always else ctypes.addressof(self._experience)
        self._arena = aligned(spec.arena_bytes // 4 + _SLACK_ELEMENTS)
        self._looks = [([int(size) for size in value.shape], [int(step) for step in value.stride]) for value in spec.results]
        self._at = (ctypes.c_void_p * (2 + len(spec.live) + len(spec.results)))()
        self._at[0] = self._arena.data_ptr()

    @property
    def nbytes(self) -> int:
        return self._arena.nbytes + (0 if self.kept is None else self.kept.nbytes)

    def keep(self, constants: torch.Tensor) -> None:
        self._at[1], self.kept = constants.data_ptr(), constants

    def __call__(self, *live: torch.Tensor) -> list[torch.Tensor]:
        with self.lock:
            return self.run(live)

    def run(self, live: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        results, at = self._results(), self._at
        for place, tensor in enumerate((*live, *results), 2):
            at[place] = tensor.data_ptr()
        self.team.run(self.its.address, at, torch.get_num_threads(), SPIN_US, self.experience_at)
        return results

    def _results(self) -> list[torch.Tensor]:
        refuse_surroundings()
        return [self._arena.new_empty_strided(shape, stride) for shape, stride in self._looks]


class UnlikeConstantsError(Exception):
    """Tensors that a network has packed are of another dtype or shape now: it is another program's turn."""


class Constants:
    """Tensors as they were when this was made: which objects, how often torch has counted a write to each, and how each lies in memory."""

    def __init__(self, tensors: Sequence[torch.Tensor]) -> None:
        self.tensors = list(tensors)
        self._seen, self._dtypes = self._looked(), [tensor.dtype for tensor in self.tensors]

    def same(self, tensors: Sequence[torch.Tensor]) -> bool:
        return len(tensors) == len(self.tensors) and all(map(is_, tensors, self.tensors)) and self.unchanged()

    def unchanged(self) -> bool:
        return self._looked() == self._seen

    def still_alike(self) -> bool:
        """Whether what has changed of them is their numbers, or where these lie."""
        return self._seen[2] == [*map(_shape, self.tensors)] and self._dtypes == [tensor.dtype for tensor in self.tensors]

    def _looked(self) -> tuple[list[Any], ...]:
        versions, addresses = [*map(_version, self.tensors)], [*map(torch.Tensor.data_ptr, self.tensors)]
        return versions, addresses, [*map(_shape, self.tensors)], [*map(torch.Tensor.stride, self.tensors)]


class Numbers:
    """The numbers of constants as they were when this was made, which are read again a part at a time."""

    def __init__(self, tensors: Sequence[torch.Tensor], team: Team) -> None:
        marked = [tensor for tensor in tensors if tensor.dtype == torch.float32 and tensor.numel()]
        self._team, self._count = team, len(marked)
        self._addresses = (ctypes.c_void_p * self._count)(*map(torch.Tensor.data_ptr, marked))
        self._places = (ctypes.c_int64 * self._count)(*map(_middle, marked))
        self._mark = self._marked()
        self._parts = _parts(tensors)
        self._sums = [part.sum(team) for part in self._parts]
        self._next = 0

    def same(self) -> bool:
        """Whether they are as they were, as far as this call has looked. Warns where earlier ones did not see that they are not."""
        if self._marked() != self._mark:
            return False
        if not self._parts:
            return True
        at, self._next = self._next, (self._next + 1) % len(self._parts)
        if self._parts[at].sum(self._team) == self._sums[at]:
            return True
        if len(self._parts) > 1:
            warn(_LATE.format(self._parts[at].shapes, len(self._parts) - 1))
        return False

    def _marked(self) -> int:
        return int(self._team.mark(self._addresses, self._places, self._count))


class _Part:
    """What one call reads again: pieces of constants, by address and length in words of four bytes."""

    def __init__(self, pieces: Sequence[tuple[int, int, torch.Size]]) -> None:
        addresses, words, shapes = zip(*pieces, strict=True)
        self._count = len(pieces)
        self._addresses, self._words = (ctypes.c_void_p * self._count)(*addresses), (ctypes.c_int64 * self._count)(*words)
        self.shapes = ", or ".join(dict.fromkeys(f"shape {tuple(shape)}" for shape in shapes))

    def sum(self, team: Team) -> int:
        return int(team.sum(self._addresses, self._words, self._count))


def _parts(tensors: Sequence[torch.Tensor]) -> list[_Part]:
    parts: list[list[tuple[int, int, torch.Size]]] = []
    room = 0
    most = max(_PART_WORDS, 1 + sum(tensor.nbytes // 4 for tensor in tensors) // _MOST_PARTS)
    for tensor in tensors:
        for begin, words in _runs(tensor):
            at = 0
            while at < words:
                if not room:
                    parts.append([])
                    room = most
                length = min(room, words - at)
                parts[-1].append((begin + 4 * at, length, tensor.shape))
                at, room = at + length, room - length
    return [_Part(pieces) for pieces in parts]


def _runs(tensor: torch.Tensor) -> Iterator[tuple[int, int]]:
    """Where a tensor's numbers lie one behind the other: addresses, and lengths in words of four bytes."""
    dims = sorted((step, size) for size, step in zip(tensor.shape, tensor.stride(), strict=True) if size > 1 and step)
    length = 1
    outer: list[range] = []
    for step, size in dims:
        if step == length and not outer:
            length *= size
        else:
            outer.append(range(0, step * size, step))
    if tensor.numel():
        for offsets in product(*outer):
            yield tensor.data_ptr() + tensor.element_size() * sum(offsets), length * tensor.element_size() // 4


class NetworkCalls:
    """Calls a network with constants that may change."""

    def __init__(self, spec: NetworkSpec, team: Team, always: bool = False) -> None:
        self._its, self._team, self._held = spec, team, LoadedNetwork(spec, team, always)
        self._constants, self._numbers = Constants(()), Numbers((), team)

    def __call__(self, *given: torch.Tensor) -> list[torch.Tensor]:
        fixed = [given[at] for at in self._its.fixed]
        with self._held.lock:
            if self._held.kept is None or not self._constants.same(fixed) or not self._numbers.same():
                self._pack(fixed)
            return self._held.run([given[at] for at in self._its.live])

    def again(self, *live: torch.Tensor) -> list[torch.Tensor]:
        """The same from the same constants as in the last call, of which only the arguments that differ are given.

        Raises UnlikeConstantsError where they are not.

        A call's many tensors are not even touched: what a network of a tenth of a millisecond does leaves none of them in a near cache.
        """
        with self._held.lock:
            if not self._constants.unchanged() or not self._numbers.same():
                if not self._constants.still_alike():
                    raise UnlikeConstantsError
                self._pack(self._constants.tensors)
            return self._held.run(live)

    def frozen(self) -> LoadedNetwork:
        """What runs with the constants of the last call for good, and holds nothing of the caller's."""
        with self._held.lock:
            frozen = LoadedNetwork(self._its, self._team, self._held.always)
            frozen.keep(there(self._held.kept))
            return frozen

    def _pack(self, fixed: Sequence[torch.Tensor]) -> None:
        kept = packed(self._its, fixed)
        self._constants, self._numbers = Constants(fixed), Numbers(fixed, self._team)
        self._held.keep(kept)


def _version(tensor: torch.Tensor) -> int:
    """How often a tensor was written; torch does not count that for one that was made in inference mode."""
    return -1 if tensor.is_inference() else tensor._version


def packed(its: NetworkSpec, fixed: Sequence[torch.Tensor]) -> torch.Tensor:
    kept = aligned(its.kept_elements)
    pack(its.recipes, dict(zip(its.wanted, its.constants(fixed), strict=True)), kept)
    return kept


def _middle(tensor: torch.Tensor) -> int:
    """The position in memory of an element in the middle of a tensor."""
    index = [size // 2 for size in tensor.shape]
    return sum(at * step for at, step in zip(index, tensor.stride(), strict=True))


Placed = tuple[list[int], int]  # offsets, and the arena's length, in bytes


def lowest(problem: PlaceProblem) -> Placed:
    """Offsets, and the arena's length, in bytes, for buffers none of which is fixed. The time grows with the square of their number."""
    size, start, end = (each.tolist() for each in (problem.size_bytes, problem.start, problem.end))
    keys = (
        lambda buffer: -size[buffer],
        lambda buffer: -size[buffer] * (end[buffer] - start[buffer]),
        lambda buffer: start[buffer] - end[buffer],
    )
    orders = [sorted(range(problem.buffer_count), key=key) for key in keys]
    return min((_stacked(problem, order) for order in orders), key=lambda placed: placed[1])


def _stacked(problem: PlaceProblem, order: Sequence[int]) -> Placed:
    size, start, end, align = (each.tolist() for each in (problem.size_bytes, problem.start, problem.end, problem.align_bytes))
    offsets = [0] * len(size)
    done: list[int] = []
    for buffer in order:
        beside = [other for other in done if start[other] < end[buffer] and start[buffer] < end[other]]
        at = 0  # the lowest gap that is wide enough
        for begin, end_bytes in sorted((offsets[other], offsets[other] + size[other]) for other in beside):
            if at + size[buffer] <= begin:
                break
            at = max(at, -(-end_bytes // align[buffer]) * align[buffer])
        offsets[buffer] = at
        done.append(buffer)
    return offsets, max((offset + nbytes for offset, nbytes in zip(offsets, size, strict=True)), default=0)


_MOST_BUFFERS = 2000  # that are placed without a search
_MOST_BYTES = 2**33  # of a buffer: 2**31 elements, which no index of a kernel comes near


def network_bytes(region: Region, placing: Placing) -> int:
    """What a region's network will hold on this machine: `LoadedNetwork.nbytes`. Raises NativeError, FormatError."""
    its = network_of(StagedBody.of(region.body, region.fixed, target()), region.joined, placing)
    return 4 * (its.arena_bytes // 4 + _SLACK_ELEMENTS + its.kept_elements)


def loaded_region(region: Region, placing: Placing, constants: Sequence[torch.Tensor]) -> LoadedNetwork:
    """What runs a region with these constants, and keeps nothing of the region. Raises NativeError, FormatError."""
    its = network_of(StagedBody.of(region.body, region.fixed, target()), region.joined, placing)
    spec = ready(its, network(its.source), region.fixed, partial(watched, its.constants))
    loaded = LoadedNetwork(replace(spec, recipes=(), wanted=(), constants=list), team())
    loaded.keep(packed(spec, constants))
    return loaded


def ready(its: Network, opened: tuple[int, object], fixed: tuple[int, ...], constants: Callable[[Sequence[Any]], list[Any]]) -> NetworkSpec:
    """A network whose function and library are `opened`, as what runs it knows it."""
    wanted = its.constants.outputs
    return NetworkSpec(*opened, its.arena_bytes, its.kept_elements, its.recipes, its.live, fixed, wanted, constants, its.results)


def target() -> Target:
    """This machine, for as many threads as there are now. Raises NativeError."""
    return replace(team().target, threads=torch.get_num_threads())


def placing_as(offsets: Sequence[int]) -> Placing:
    """Places buffers at offsets that were found before, in bytes, if these are right for them; else finds others."""

    def placed(problem: PlaceProblem) -> tuple[Sequence[int], int]:
        if problem.size_bytes.max(initial=0) >= _MOST_BYTES:
            raise FormatError(f"expected buffers of less than {_MOST_BYTES} bytes, got {problem.size_bytes.max()}")
        pairs = zip(offsets, problem.size_bytes.tolist(), strict=False)
        arena_bytes = max((offset + size for offset, size in pairs), default=0)
        try:
            check_placement(problem, offsets, arena_bytes)
        except CheckError:  # as for a machine with other vectors, or for other threads
            if problem.buffer_count <= _MOST_BUFFERS:
                return lowest(problem)
            search: Placing = import_module("lowtide.cpu.networks").placed  # which takes more memory than most networks
            return search(problem)
        return offsets, arena_bytes

    return placed
