"""The machine that is planned for: what a program's operators need and take there, as candidates for planning."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.metadata import version

import torch

from lowtide.api.stages import Say, Stages
from lowtide.capture.program import Captured
from lowtide.cost.bodies import workspaces_within
from lowtide.cost.device import Device
from lowtide.cost.lab.laboratory import Laboratory, Listener
from lowtide.cost.timings import device_here, measure_timings
from lowtide.cost.workspaces import measure_workspaces
from lowtide.ir.graph import Graph, Node
from lowtide.plan.plan import Provenance
from lowtide.planning.algebra import Rewriting, rewritings
from lowtide.planning.candidate import Candidate, equal_graphs
from lowtide.planning.fission.search import split_graphs

_SPLIT_MOST = 3  # of what algebra has made: split as far as that pays, and into fewer parts
_CUDA_GRANULE_BYTES = 512  # torch's caching allocator rounds every request up to this


@dataclass(frozen=True)
class Machine:
    """This machine, or one that is simulated."""

    device: torch.device  # of the model
    simulated: Device | None  # where that is not this one
    tries: bool  # operators may be tried: their temporaries, and their times where these matter
    swap: bool  # tensors may be sent to the host and back, where the device has memory of its own
    stages: Stages

    def laboratory(self, gradients: bool) -> Laboratory:
        """Where operators are tried; where they may not be, it only remembers."""
        return Laboratory(gradients=gradients, tries=self.tries and self.simulated is None)

    def name(self, captured: Captured) -> str:
        """The device that a program is planned for: "cpu", "cuda:0", "rtx3090"."""
        if self.simulated is not None:
            return self.simulated.name
        return max((value.storage.device for value in captured.graph.inputs), default=str(self.device))

    def granule_bytes(self, captured: Captured) -> int:
        """What its allocator rounds every request up to."""
        if self.simulated is not None:
            return self.simulated.granule_bytes
        return _CUDA_GRANULE_BYTES if self._is_gpu(captured) else 1

    def _is_gpu(self, captured: Captured) -> bool:
        return self.name(captured).startswith("cuda")

    def provenance(self, captured: Captured) -> Provenance:
        """With what a plan is made."""
        return Provenance(version("lowtide"), torch.__version__, self.name(captured), platform.python_version(), torch.get_num_threads())

    def links(self, captured: Captured) -> Device | None:
        """The device over whose links to a host tensors may be swapped; None where there is nowhere to swap to."""
        if not self.swap or (self.simulated is None and not self._is_gpu(captured)):
            return None
        device = self.simulated or device_here(self.name(captured))
        return device if device.can_swap else None

    def candidates(self, captured: Captured, laboratory: Laboratory, *, exact: bool, limited: bool) -> tuple[Candidate, ...]:
        """The captured graph and those that compute the same, with what each operator needs beside its arguments and results.

        Unless they are to be `exact`, those are among them that compute the same up to rounding; where there will be a limit (`limited`),
        also part by part, and what takes longer.
        """
        graphs, held = equal_graphs(captured.graph), captured.gradients
        algebra = {each.graph: each for each in self.rewritings(graphs[-1], captured, laboratory, exact=exact, limited=limited)}
        rounded = _split(graphs[-1], algebra.values()) if limited and not exact else {}
        first, *others = self._with_workspaces([*graphs, *algebra, *rounded], laboratory)
        known = algebra | rounded
        return replace(first, held_by_eager=held), *(_knowing(each, known.get(each.graph)) for each in others)

    def rewritings(self, graph: Graph, captured: Captured, laboratory: Laboratory, *, exact: bool, limited: bool) -> Iterator[Rewriting]:
        """The graph as algebra rewrites it, where it is known what that costs in time."""
        if self.simulated is None and not self.tries and not limited:
            return

        rates = self._rates(captured)

        def times_of(nodes: Sequence[Node], among: Sequence[Node]) -> Sequence[float]:
            if self.simulated is not None or not self.tries:
                return [rates().node_us(node) for node in nodes]
            with self.stages.stage("measure", "measuring what rules of algebra replace") as say:
                laboratory.listener = _share(say)
                return measure_timings(nodes, rates, among=among, laboratory=laboratory).us

        yield from (each for each in rewritings(graph, times_of, exact=exact) if limited or not each.costs_time)

    def _with_workspaces(self, graphs: Sequence[Graph], laboratory: Laboratory) -> list[Candidate]:
        if not self.tries or self.simulated is not None:
            return [Candidate(graph, workspaces_within(graph.nodes)) for graph in graphs]
        with self.stages.stage("measure", "measuring operators' temporaries") as say:
            laboratory.listener = _share(say)
            found = {graph: measure_workspaces(graph.nodes, laboratory=laboratory) for graph in graphs}
        # An equal graph whose operators give results that lie otherwise than it says is none.
        return [Candidate(graph, found[graph].nbytes) for graph in graphs if graph is graphs[0] or not found[graph].unlike]

    def _rates(self, captured: Captured) -> Callable[[], Device]:
        """The machine as numbers, which are measured only where a time has to be told by them."""
        return cache(lambda: self.simulated or device_here(self.name(captured)))

    def timed(self, captured: Captured, candidates: Sequence[Candidate], laboratory: Laboratory) -> tuple[Candidate, ...]:
        """The candidates with microseconds of each node: measured where operators may be run, else by roofline."""
        if self.simulated is not None:
            return tuple(each.timed(self.simulated.graph_us(each.graph)) for each in candidates)
        with self.stages.stage("measure", "measuring operators' times") as say:
            laboratory.listener = _share(say)
            rates = self._rates(captured)
            if not self.tries:
                return tuple(each.timed(rates().graph_us(each.graph)) for each in candidates)
            return tuple(each.timed(measure_timings(each.graph.nodes, rates, laboratory=laboratory).us) for each in candidates)


def _split(graph: Graph, algebra: Iterable[Rewriting]) -> dict[Graph, Rewriting]:
    """Few graphs that are split, as a search shares its effort: of what exact rules made, which is the leanest, and the quickest."""
    plain = Rewriting(graph, (), exact=False)
    ruled = next((each for each in algebra if each.exact), None)
    chosen = [(plain, each) for each in split_graphs(graph)[-(_SPLIT_MOST if ruled is None else 1) :]]
    chosen += [(ruled, each) for each in split_graphs(ruled.graph)[-_SPLIT_MOST:]] if ruled is not None else []
    return {each: replace(of, graph=each, exact=False) for of, each in chosen}


def _knowing(candidate: Candidate, rewriting: Rewriting | None) -> Candidate:
    """The candidate with what algebra did to it."""
    if rewriting is None:
        return candidate
    return replace(candidate, exact=rewriting.exact, costs_time=rewriting.costs_time, deeds=rewriting.deeds)


def _share(say: Say) -> Listener:
    """Says which share is done."""
    return lambda share: say(f"{share:.0%} done")
