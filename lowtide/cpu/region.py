"""A region compiled for this machine, with constants that it has for good.

Offsets for a few hundred buffers without a search: where the room `placement` would take more memory than the network itself.

Each buffer, in turn, goes to the lowest gap beside those that it lives with; of some orders the one is taken whose arena is least.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch

from lowtide.cpu.executable import LoadedNetwork, NetworkSpec, packed
from lowtide.cpu.library import network, team
from lowtide.cpu.network import Network, Placing, StagedBody, network_of
from lowtide.cpu.recipes import Target
from lowtide.errors import CheckError, FormatError
from lowtide.ir.bodies import Region
from lowtide.lower.interpreter import watched
from lowtide.problems.placement import PlaceProblem, check_placement

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
        taken = sorted((offsets[other], offsets[other] + size[other]) for other in beside)
        offsets[buffer] = _gap(taken, size[buffer], align[buffer])
        done.append(buffer)
    return offsets, max((offset + nbytes for offset, nbytes in zip(offsets, size, strict=True)), default=0)


def _gap(taken: Iterable[tuple[int, int]], nbytes: int, align: int) -> int:
    """The lowest offset with so many free bytes behind it."""
    at = 0
    for begin, end in taken:
        if at + nbytes <= begin:
            break
        at = max(at, -(-end // align) * align)
    return at


_MOST_BUFFERS = 2000  # that are placed without a search
_MOST_BYTES = 2**33  # of a buffer: 2**31 elements, which no index of a kernel comes near


def loaded_region(region: Region, constants: Sequence[torch.Tensor], placing: Placing) -> LoadedNetwork:
    """What runs a region with these constants, and keeps nothing of the region. Raises NativeError, FormatError."""
    its = network_of(StagedBody.of(region.body, region.fixed, target()), region.joined, placing)
    described = ready(its, network(its.source), region.fixed, partial(watched, its.constants))
    loaded = LoadedNetwork(replace(described, recipes=(), wanted=(), constants=list), team())
    loaded.keep(packed(described, constants))
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
            return lowest(problem) if problem.buffer_count <= _MOST_BUFFERS else _searched(problem)
        return offsets, arena_bytes

    return placed


def _searched(problem: PlaceProblem) -> tuple[Sequence[int], int]:
    place: Placing = import_module("lowtide.cpu.networks").placed  # which takes more memory than most networks
    return place(problem)
