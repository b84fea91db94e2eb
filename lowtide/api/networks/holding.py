"""A region compiled for this machine, with constants that it has for good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import import_module
from typing import Any

import torch

from lowtide.api.networks.lowest import lowest
from lowtide.errors import CheckError, FormatError
from lowtide.fuse.network import Bare, Network, Placing, network_of
from lowtide.ir.packed import Target
from lowtide.ir.regions import Region
from lowtide.lower.watched import watched
from lowtide.problems.placement import PlaceProblem
from lowtide.problems.placement_check import check_placement
from lowtide.runtime.networks.built import network, team
from lowtide.runtime.networks.running import LoadedNetwork, NetworkSpec, packed

_MOST_BUFFERS = 2000  # that are placed without a search
_MOST_BYTES = 2**33  # of a buffer: 2**31 elements, which no index of a kernel comes near


def held(region: Region, constants: Sequence[torch.Tensor], placing: Placing) -> LoadedNetwork:
    """What runs a region with these constants, and keeps nothing of the region. Raises NativeError, FormatError."""
    its = network_of(Bare.of(region.body, region.fixed, target()), region.joined, placing)
    described = ready(its, network(its.source), region.fixed, partial(watched, its.constants))
    found = LoadedNetwork(replace(described, recipes=(), wanted=(), constants=list), team())
    found.keep(packed(described, constants))
    return found


def ready(its: Network, found: tuple[int, object], fixed: tuple[int, ...], constants: Callable[[Sequence[Any]], list[Any]]) -> NetworkSpec:
    """A network whose function and library were `found`, as what runs it knows it."""
    wanted = its.constants.outputs
    return NetworkSpec(*found, its.arena_bytes, its.kept_elements, its.recipes, its.live, fixed, wanted, constants, its.results)


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
    found: Placing = import_module("lowtide.api.networks.placing").placed  # which takes more memory than most networks
    return found(problem)
