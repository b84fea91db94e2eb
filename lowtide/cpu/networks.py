"""A graph with regions, compiled for this machine, and what runs them."""

from __future__ import annotations

from collections.abc import Mapping
from functools import lru_cache, partial

from lowtide.base.files import warn_once
from lowtide.cpu.comparison import is_faster
from lowtide.cpu.executable import NetworkCalls, ready, target
from lowtide.cpu.network import Network, StagedBody, network, network_of, team
from lowtide.cpu.recipes import Target
from lowtide.cpu.regions import BodyDescription, with_regions
from lowtide.cpu.trial import tuned
from lowtide.ir.bodies import Region, is_by_inductor, is_region
from lowtide.ir.graph import Graph
from lowtide.lower.python import lower
from lowtide.placement import Portfolio, place
from lowtide.plan.contents import Decision
from lowtide.problems.placement import PlaceProblem
from lowtide.runtime.libraries import NativeError
from lowtide.runtime.program import Program


def placed(problem: PlaceProblem) -> tuple[list[int], int]:
    """Offsets, and the arena's length, in bytes."""
    placement = place(problem, Portfolio())
    return [int(offset) for offset in placement.offsets], int(placement.arena_bytes)


def offsets_of(region: Region, staged: StagedBody) -> list[int]:
    """The offsets of a region's buffers, in bytes."""
    lowest: list[int] = []

    def noted(problem: PlaceProblem) -> tuple[list[int], int]:
        offsets, arena_bytes = placed(problem)
        lowest.extend(offsets)
        return offsets, arena_bytes

    network_of(staged, region.joined, noted)
    return lowest


_MOST = 64  # networks whose libraries are kept open for other steps


def networked(graph: Graph, chosen: Graph | None = None, most: int = 0) -> Graph | None:
    """The graph with regions that have been compiled; None where nothing is generated, with a warning where nothing can be.

    A region is generated where that is faster than torch's operators; where there is a graph that was `chosen` before, as it says.
    At most so many variants of kernels are measured, which the model cannot tell apart.
    """
    regions = None if chosen is None else {region.name: region.joined for region in _own(chosen)}
    try:
        return with_regions(graph, partial(_described, regions, most))
    except NativeError as error:
        sentence = f"lowtide generates no kernels, torch's operators run: {error}"
        warn_once(sentence, sentence)
        return None


def runners(graph: Graph) -> Mapping[str, NetworkCalls]:
    """What runs a graph's own regions, by the name of the first result. Raises NativeError."""
    return {region.node.results[0].name: running(region.body, region.fixed, region.joined) for region in _own(graph)}


def networks_of(graph: Graph) -> list[tuple[Region, Network]]:
    """A graph's own regions, each with its network. Raises NativeError."""
    return [(region, built(region.body, region.fixed, region.joined)[0]) for region in _own(graph)]


def placements(graph: Graph) -> list[list[int]]:
    """Where the buffers of a graph's own regions lie, in bytes. Raises NativeError."""
    return [offsets_of(region, staged_body(region.body, region.fixed)) for region in _own(graph)]


def _own(graph: Graph) -> list[Region]:
    return [Region.of(node) for node in graph.nodes if is_region(node) and not is_by_inductor(node)]


def running(body: Graph, fixed: tuple[int, ...], joined: tuple[int, ...]) -> NetworkCalls:
    """What runs a body with these blocks. Raises NativeError."""
    its, address, library = built(body, fixed, joined)
    return NetworkCalls(ready(its, (address, library), fixed, Program(lower(Decision.in_order(its.constants)), gradients=False)), team())


def _described(chosen: Mapping[str, tuple[int, ...]] | None, most: int, body: Graph, fixed: tuple[int, ...]) -> BodyDescription | None:
    if chosen is not None and body.outputs[0].name not in chosen:
        return None
    joined = tuned(staged_body(body, fixed), most, placed) if chosen is None else chosen[body.outputs[0].name]
    its, *_ = built(body, fixed, joined)
    if chosen is None and not _is_faster(body, fixed, joined, its):
        return None
    return BodyDescription(its.arena_bytes, its.kept_elements * 4, joined)


def _is_faster(body: Graph, fixed: tuple[int, ...], joined: tuple[int, ...], its: Network) -> bool:
    torchs = Program(lower(Decision.in_order(body)), gradients=False)
    generated = running(body, fixed, joined)
    return is_faster(body, its.source, lambda given: generated(*given), torchs)


def built(body: Graph, fixed: tuple[int, ...], joined: tuple[int, ...]) -> tuple[Network, int, object]:
    """A body's network, its function and the library that has it, for as many threads as there are now. Raises NativeError."""
    return _built(body, fixed, target(), joined)


def staged_body(body: Graph, fixed: tuple[int, ...]) -> StagedBody:
    """A body as stages, for as many threads as there are now. Raises NativeError."""
    return _staged_body(body, fixed, target())


_staged_body = lru_cache(_MOST)(StagedBody.of)


@lru_cache(_MOST)
def _built(body: Graph, fixed: tuple[int, ...], target: Target, joined: tuple[int, ...]) -> tuple[Network, int, object]:
    its = network_of(_staged_body(body, fixed, target), joined, placed)
    address, library = network(its.source)
    return its, address, library
