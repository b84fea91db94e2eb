"""A region compiled for this machine, with constants that it has for good."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from lowtide.fuse.network import Bare, Network, network_of
from lowtide.ir.packed import Target
from lowtide.ir.regions import Region
from lowtide.lower.watched import watched
from lowtide.place import Portfolio, place
from lowtide.problems.placement import PlaceProblem
from lowtide.runtime.networks.built import network, team
from lowtide.runtime.networks.running import Described, Held, packed


def held(region: Region, constants: Sequence[torch.Tensor]) -> Held:
    """What runs a region with these constants, and keeps nothing of the region. Raises NativeError, FormatError."""
    its = network_of(Bare.of(region.body, region.fixed, target()), region.joined, placed)
    described = ready(its, network(its.source), region.fixed, partial(watched, its.constants))
    found = Held(replace(described, recipes=(), wanted=(), constants=list), team())
    found.keep(packed(described, constants))
    return found


def ready(its: Network, found: tuple[int, object], fixed: tuple[int, ...], constants: Callable[[Sequence[Any]], list[Any]]) -> Described:
    """A network whose function and library were `found`, as what runs it knows it."""
    wanted = its.constants.outputs
    return Described(*found, its.arena_bytes, its.kept_elements, its.recipes, its.live, fixed, wanted, constants, its.results)


def target() -> Target:
    """This machine, for as many threads as there are now. Raises NativeError."""
    return replace(team().target, threads=torch.get_num_threads())


def placed(problem: PlaceProblem) -> tuple[list[int], int]:
    """Where buffers of an arena lie, and its bytes."""
    found = place(problem, Portfolio())
    return [int(offset) for offset in found.offsets], int(found.arena_bytes)
