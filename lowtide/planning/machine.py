"""The machine that is planned for: what a program's operators need and take there, as candidates for planning."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from lowtide.base.messages import Say, Stages
from lowtide.cost.bodies import workspaces_within
from lowtide.cost.device import Device
from lowtide.cost.laboratory import Laboratory, TrialListener, provenance_here
from lowtide.cost.timings import device_here, measure_timings
from lowtide.cost.workspaces import measure_workspaces
from lowtide.cpu.networks import networked
from lowtide.ir.graph import Graph, Node
from lowtide.plan.plan import Provenance
from lowtide.planning.candidate import Candidate, Captured, equal_graphs
from lowtide.planning.replan import found_like
from lowtide.regions.compilation import as_compiled, compiled_as, compiled_graphs, compiled_like, compiled_ns
from lowtide.regions.recomputation import as_recomputed, leaner_graphs
from lowtide.rewrite.rewritings import Rewriting, TimesOf, aligned, aligned_as, rewritings
from lowtide.split.search import FoundGraph, MeasuredGraph, found_graphs, prepared, worth_parting

_AS_FAST = 0.01  # of two steps whose times differ by this share none is faster: kernels are measured no better
_CUDA_GRANULE_BYTES = 512  # torch's caching allocator rounds every request up to this


@dataclass(frozen=True)
class Machine:
    device: str  # of the model
    simulated: Device | None  # where that is not this one
    tries: bool  # operators may be tried: their temporaries, and their times where these matter
    swap: bool  # tensors may be sent to the host and back, where the device has memory of its own
    stages: Stages
    links_bytes_per_s: float = 0.0  # to the other ranks, where that was tried
    variants: int = 24  # of generated kernels that may be measured for a region

    def laboratory(self, gradients: bool) -> Laboratory:
        """Where operators are tried; where they may not be, it only remembers."""
        return Laboratory(gradients=gradients, tries=self.tries and self.simulated is None)

    def name(self, captured: Captured) -> str:
        """The device that a program is planned for: "cpu", "cuda:0", "rtx3090"."""
        if self.simulated is not None:
            return self.simulated.name
        return max((value.storage.device for value in captured.graph.inputs), default=self.device)

    def granule_bytes(self, captured: Captured) -> int:
        """What its allocator rounds every request up to."""
        if self.simulated is not None:
            return self.simulated.granule_bytes
        return _CUDA_GRANULE_BYTES if self._is_gpu(captured) else 1

    def _is_gpu(self, captured: Captured) -> bool:
        return self.name(captured).startswith("cuda")

    def provenance(self, captured: Captured) -> Provenance:
        return provenance_here(self.name(captured))

    def links(self, captured: Captured) -> Device | None:
        """The device over whose links to a host tensors may be swapped; None where there is nowhere to swap to."""
        if not self.swap or (self.simulated is None and not self._is_gpu(captured)):
            return None
        device = self.simulated or device_here(self.name(captured))
        return device if device.can_swap else None

    def candidates(
        self,
        captured: Captured,
        laboratory: Laboratory,
        *,
        exact: bool,
        limited: bool,
        kernels: str = "auto",
        like: Sequence[Candidate] = (),
    ) -> tuple[Candidate, ...]:
        """The captured graph and those that compute the same, with what each operator needs beside its arguments and results.

        Unless they are to be `exact`, those are among them that compute the same up to rounding; where there will be a limit (`limited`),
        also part by part, and what takes longer. `like` are the candidates of a program that begins alike: what runs in parts there does
        so here, and what is compiled there is compiled here. `kernels` are as `Run` has them: of "compiled" ones regions are
        among what is offered.
        """
        graphs, held_storages = equal_graphs(captured.graph), captured.held_storages
        equal = {graph: Rewriting(graph, (), exact=True) for graph in graphs}
        algebra = {each.graph: each for each in self.rewritings(graphs[-1], captured, laboratory, exact=exact, limited=limited)}
        known, roots = equal | algebra, dict[Graph, int]()
        if limited and not exact:
            known, roots = self._in_parts(captured, known, laboratory, like)
        generated: list[Graph | None] = []
        if kernels == "compiled":
            generated = self._compiled_as(captured, like) if like else self._compiled(captured, laboratory, limited)
        elif kernels == "auto" and not exact and not limited:
            generated = [self.networked(captured)]
        first, *others = self._with_workspaces(captured, [*known, *(each for each in generated if each is not None)], laboratory)
        equal_ones = (_knowing(each, known.get(each.graph), each.graph in generated) for each in others)
        return replace(first, held_by_eager=held_storages), *(replace(each, root=roots.get(each.graph, -1)) for each in equal_ones)

    def networked(self, captured: Captured, chosen: Graph | None = None) -> Graph | None:
        """The captured graph with what this machine's compiler makes kernels for, where it can run here; as `chosen` before."""
        if self.simulated is not None or not self.tries or self.name(captured) != "cpu":
            return None
        with self.stages.stage("kernels", "generating and compiling kernels, or loading them"):
            return networked(captured.graph, chosen, self.variants)

    def _compiled(self, captured: Captured, laboratory: Laboratory, limited: bool) -> list[Graph | None]:
        """The captured graph with what inductor makes kernels for: as it is, and as it is where the backward pass computes again.

        Where there will be a limit all are offered; without one that which takes least time, by what is measured of all, and of those that
        are as fast the one that holds least.
        """
        plain = equal_graphs(captured.graph)[-1]
        whole = aligned(plain, self._times_of(captured, laboratory))
        graphs = [*leaner_graphs(whole, on_gpu=self._is_gpu(captured)), whole]
        if limited and whole is not plain:  # which holds less
            graphs.append(plain)
        compiled = [each for each in self.compiled(graphs) if each is not None]
        if limited or len(compiled) < 2:
            return list(compiled)
        us = self._compared(captured, compiled, laboratory)
        return [next(graph for graph, its_us in zip(compiled, us, strict=True) if its_us <= (1 + _AS_FAST) * min(us))]

    def _compared(self, captured: Captured, graphs: Sequence[Graph], laboratory: Laboratory) -> list[float]:
        """What each of some graphs takes, in microseconds: what is in all of them by the device's rates, the rest measured."""
        shared = frozenset(graphs[0].nodes).intersection(*(graph.nodes for graph in graphs[1:]))
        with self.stages.stage("measure", "measuring what is computed again") as say:
            laboratory.listener = _share(say)
            rates = self._rates(captured)()
            shared_us = sum(rates.node_us(node) for node in shared)
            return [shared_us + self._sum_us(captured, graph, shared, laboratory) for graph in graphs]

    def _sum_us(self, captured: Captured, graph: Graph, without: Collection[Node], laboratory: Laboratory) -> float:
        nodes = [node for node in graph.nodes if node not in without]
        ns = [compiled_ns(node) for node in nodes]
        others = [node for node, known in zip(nodes, ns, strict=True) if known is None]
        us = measure_timings(others, self._rates(captured), among=graph.nodes, laboratory=laboratory).us
        return sum(us) + sum(each / 1e3 for each in ns if each is not None)

    def _compiled_as(self, captured: Captured, like: Sequence[Candidate]) -> list[Graph | None]:
        """The captured graph with the regions of the candidates of a program like it."""
        if not self._compiles:
            return []
        return [compiled_like(_made_as(captured, each.graph), each.graph) for each in like if each.generated]

    def compiled_as_chosen(self, captured: Captured, chosen: Graph) -> Graph | None:
        """The captured graph with the regions that a graph of it has which was chosen before."""
        return compiled_as(_made_as(captured, chosen), chosen) if self._compiles else None

    def compiled(self, graphs: Sequence[Graph]) -> list[Graph | None]:
        """Graphs that compute the same, each with what inductor makes kernels for, where it can run here."""
        if not self._compiles:
            return []
        with self.stages.stage("kernels", "compiling regions, or loading them") as say:
            return compiled_graphs(graphs, _share(say))

    @property
    def _compiles(self) -> bool:
        return self.simulated is None and self.tries

    def _in_parts(
        self, captured: Captured, known: Mapping[Graph, Rewriting], laboratory: Laboratory, like: Sequence[Candidate]
    ) -> tuple[dict[Graph, Rewriting], dict[Graph, int]]:
        """Of all that compute the same up to rounding, also part by part, what is worth a search, which shares its effort among all."""
        whole = {prepared(each.graph): each for each in worth_parting(known.values())}
        unsplit = {graph: replace(each, graph=graph, exact=False) for graph, each in whole.items()} | dict(known)
        graphs = [*known, *(graph for graph in whole if graph not in known)]
        split = found_like(graphs, like) or self._found(captured, graphs, whole, laboratory)
        rewritten = {
            each.graph: unsplit.get(each.graph) or replace(unsplit[graphs[each.of]], graph=each.graph, exact=False) for each in split
        }
        return {graphs[0]: known[graphs[0]]} | rewritten, {each.graph: each.of for each in split}

    def _found(self, captured: Captured, graphs: Sequence[Graph], whole: Collection[Graph], laboratory: Laboratory) -> list[FoundGraph]:
        """What a search over graphs finds, of which some may be split."""
        measured = self.timed(captured, self._with_workspaces(captured, graphs, laboratory), laboratory)
        of = {each.graph: each for each in measured}  # without those that are no equal graph after all
        given = [MeasuredGraph(graph, of[graph].node_us, of[graph].workspace_bytes, graph in whole) for graph in graphs if graph in of]
        with self.stages.stage("split", f"looking for what of {len(graphs[0].nodes)} operators to run in parts"):
            searched = found_graphs(given, self._rates(captured)(), self.granule_bytes(captured), self.links(captured))
        return [replace(each, of=graphs.index(given[each.of].graph)) for each in searched]

    def rewritings(self, graph: Graph, captured: Captured, laboratory: Laboratory, *, exact: bool, limited: bool) -> Iterator[Rewriting]:
        """The graph as algebra rewrites it, where it is known what that costs in time."""
        if self.simulated is None and not self.tries and not limited:
            return
        times_of = self._times_of(captured, laboratory)
        yield from (each for each in rewritings(graph, times_of, exact=exact) if limited or not each.costs_time)

    def _times_of(self, captured: Captured, laboratory: Laboratory) -> TimesOf:
        """What tells how long nodes take here, measured where operators may be run."""
        rates = self._rates(captured)

        def times_of(nodes: Sequence[Node], among: Sequence[Node]) -> Sequence[float]:
            if self.simulated is not None or not self.tries:
                return [rates().node_us(node) for node in nodes]
            with self.stages.stage("measure", "measuring what rules of algebra replace") as say:
                laboratory.listener = _share(say)
                return measure_timings(nodes, rates, among=among, laboratory=laboratory).us

        return times_of

    def _with_workspaces(self, captured: Captured, graphs: Sequence[Graph], laboratory: Laboratory) -> list[Candidate]:
        if not self.tries or self.simulated is not None:
            granule_bytes = self.granule_bytes(captured)
            return [Candidate(graph, workspaces_within(graph.nodes, round_to=granule_bytes)) for graph in graphs]
        with self.stages.stage("measure", "measuring operators' temporaries") as say:
            laboratory.listener = _share(say)
            workspaces = {graph: measure_workspaces(graph.nodes, laboratory=laboratory) for graph in graphs}
        # An equal graph whose operators give results that lie otherwise than it says is none.
        return [Candidate(graph, workspaces[graph].nbytes) for graph in graphs if graph is graphs[0] or not workspaces[graph].unlike]

    def _rates(self, captured: Captured) -> Callable[[], Device]:
        """The machine as numbers, which are measured only where a time has to be told by them."""
        return cache(lambda: self.simulated or replace(device_here(self.name(captured)), peers_bytes_per_s=self.links_bytes_per_s))

    def timed(self, captured: Captured, candidates: Sequence[Candidate], laboratory: Laboratory) -> tuple[Candidate, ...]:
        """The candidates with microseconds of each node: measured where operators may be run, else by roofline."""
        if self.simulated is not None:
            return tuple(_by_rates(each, self.simulated) for each in candidates)
        with self.stages.stage("measure", "measuring operators' times") as say:
            laboratory.listener = _share(say)
            rates = self._rates(captured)
            if not self.tries:
                return tuple(_by_rates(each, rates()) for each in candidates)
            timings = [measure_timings(each.graph.nodes, rates, laboratory=laboratory) for each in candidates]
            pairs = zip(candidates, timings, strict=True)
            return tuple(each.timed(as_compiled(each.graph.nodes, its.us), its.issue_us) for each, its in pairs)


def _by_rates(candidate: Candidate, device: Device) -> Candidate:
    return candidate.timed(device.graph_us(candidate.graph), device.graph_issue_us(candidate.graph))


def _made_as(captured: Captured, chosen: Graph) -> Graph:
    """The captured graph as another one was made before its regions were compiled."""
    return as_recomputed(aligned_as(equal_graphs(captured.graph)[-1], chosen), chosen)


def _knowing(candidate: Candidate, rewriting: Rewriting | None, generated: bool = False) -> Candidate:
    """The candidate with what algebra did to it, or that its kernels are generated."""
    if rewriting is None:
        return replace(candidate, exact=not generated, generated=generated)
    return replace(candidate, exact=rewriting.exact, costs_time=rewriting.costs_time, applied_rules=rewriting.applied_rules)


def _share(say: Say) -> TrialListener:
    return lambda share: say(f"{share:.0%} done")
