"""A graph with regions, compiled for this machine, and what runs them."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from functools import lru_cache, partial

import torch

from lowtide.api.networks.faster import is_faster
from lowtide.fuse.network import Network, network_of
from lowtide.fuse.regions import with_regions
from lowtide.ir.graph import Graph
from lowtide.ir.packed import Target
from lowtide.ir.regions import Region, is_by_inductor, is_region
from lowtide.lower.python import lower
from lowtide.place import Portfolio, place
from lowtide.problems.placement import PlaceProblem
from lowtide.runtime.compiler import NativeError
from lowtide.runtime.networks.built import network, team
from lowtide.runtime.networks.running import Described, Running
from lowtide.runtime.program import Program

_MOST = 64  # networks whose libraries are kept open for other steps


def networked(graph: Graph, chosen: Graph | None = None) -> Graph | None:
    """The graph with regions that have been compiled; None where nothing is generated, with a warning where nothing can be.

    A region is generated where that is faster than torch's operators; where there is a graph that was `chosen` before, as it says.
    """
    regions = None if chosen is None else {node.body.outputs[0].name for node in chosen.nodes if is_region(node) and node.body is not None}
    try:
        return with_regions(graph, partial(_described, regions))
    except NativeError as error:
        _warn(error)
        return None


def runners(graph: Graph) -> Mapping[str, Running]:
    """What runs a graph's own regions, by the name of the first result. Raises NativeError."""
    return {region.node.results[0].name: _running(region.body, region.fixed) for region in _own(graph)}


def networks_of(graph: Graph) -> list[tuple[Region, Network]]:
    """A graph's own regions, each with its network. Raises NativeError."""
    return [(region, built(region.body, region.fixed)[0]) for region in _own(graph)]


def _own(graph: Graph) -> list[Region]:
    """Those that no other compiler runs."""
    return [Region.of(node) for node in graph.nodes if is_region(node) and not is_by_inductor(node)]


def _running(body: Graph, fixed: tuple[int, ...]) -> Running:
    its, address, library = built(body, fixed)
    constants = Program(lower(InOrder(its.constants)), gradients=False)
    described = Described(
        address, library, its.arena_bytes, its.kept_elements, its.recipes, its.live, fixed, its.constants.outputs, constants,
        its.results,
    )  # fmt: skip
    return Running(described, team())


def _described(chosen: Collection[str] | None, body: Graph, fixed: tuple[int, ...]) -> tuple[int, int] | None:
    if chosen is not None and body.outputs[0].name not in chosen:
        return None
    its, *_ = built(body, fixed)
    if chosen is None and not _is_faster(body, fixed, its):
        return None
    return its.arena_bytes, its.kept_elements * 4


def _is_faster(body: Graph, fixed: tuple[int, ...], its: Network) -> bool:
    torchs = Program(lower(InOrder(body)), gradients=False)
    running = _running(body, fixed)
    return is_faster(body, its.source, lambda given: running(*given), torchs)


def built(body: Graph, fixed: tuple[int, ...]) -> tuple[Network, int, object]:
    """A body's network, its function and the library that has it, for as many threads as there are now. Raises NativeError."""
    return _built(body, fixed, replace(team().target, threads=torch.get_num_threads()))


@lru_cache(_MOST)
def _built(body: Graph, fixed: tuple[int, ...], target: Target) -> tuple[Network, int, object]:
    its = network_of(body, fixed, target, _placed)
    address, library = network(its.source)
    return its, address, library


def _placed(problem: PlaceProblem) -> tuple[list[int], int]:
    found = place(problem, Portfolio())
    return [int(offset) for offset in found.offsets], int(found.arena_bytes)


class InOrder:
    """A graph that runs as it is written."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.order = tuple(range(len(graph.nodes)))
        self.reuses = (-1,) * len(graph.nodes)


@lru_cache
def _warn_once(sentence: str) -> None:
    warnings.warn(sentence, RuntimeWarning, stacklevel=8)


def _warn(error: NativeError) -> None:
    _warn_once(f"lowtide generates no kernels, torch's operators run: {error}")
