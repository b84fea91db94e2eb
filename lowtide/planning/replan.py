"""A saved plan for a program that was captured anew: whether it is of that program, and the plan on its graph. Nothing is solved again.

Splits are made again by what their loops tell: which nodes they are of, along what, in how many parts. A saved plan is recognised by that.
What was found for the program that most steps run is done to the others of the step in the same way.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from lowtide.errors import CheckError, FormatError
from lowtide.ir.bodies import Loop, is_loop
from lowtide.ir.graph import Graph, Node, Value
from lowtide.ir.operators.nodes import loads_parts
from lowtide.ir.text.graph_text import to_text
from lowtide.plan.contents import Provenance
from lowtide.plan.plan import Plan
from lowtide.planning.candidate import Candidate, equal_graphs
from lowtide.planning.planner import checked
from lowtide.planning.request import Budget
from lowtide.remat.write_out import rematerialise
from lowtide.rewrite.loads import alike, begun_apart, taken_once
from lowtide.rewrite.rewritings import rewritten_as
from lowtide.split.rewrite import Loops
from lowtide.split.search import FoundGraph, prepared
from lowtide.split.sets import SplitSet

_WHOLE = "_whole_v1"  # what a body calls its place in a result


@dataclass(frozen=True)
class SavedStep:
    """The plan of a step as it was saved, with those of an optimizer's first steps: of which programs they are, and what others keep to."""

    plan: Plan

    @property
    def is_limited(self) -> bool:
        return self.plan.cost_report is not None

    @property
    def budget(self) -> Budget:
        """What the programs beside that of the plan keep to: its peak, where it was made under a limit."""
        return Budget(self.plan.peak_bytes, host_bytes=self.plan.host_bytes) if self.is_limited else Budget()

    def plan_of(self, graph: Graph, torch: str, granule_bytes: int) -> Plan | None:
        """What was saved for a captured program."""
        program = Candidate(graph, ()).program(torch, granule_bytes)
        return next((plan for plan in (self.plan, *self.plan.first_steps) if plan.program == program != ""), None)

    def refusal(self, here: Provenance) -> FormatError:
        """Why it is of no use for programs that nothing was saved for."""
        return of_another_program(self.plan.provenance.torch, self.plan.provenance.device, here)


def of_another_program(torch: str, device: str, here: Provenance) -> FormatError:
    """That what was saved with these is of another program than the one that is here."""
    return FormatError(
        "the saved plan is of another program: other model, batch, optimizer settings or versions "
        f"(made with torch {torch} for {device}; here are torch {here.torch} and {here.device}); leave `plan` out to make a new one"
    )


def split_as(graph: Graph, saved: Graph) -> Graph | None:
    """The graph with the sets in parts that run so in a graph that was made of one that looks like it; None where it has no such sets."""
    loops = Loops(graph)
    makers = {value.name: place for place, node in enumerate(graph.nodes) for value in node.results}
    parts: dict[SplitSet, int] = {}
    seen: set[frozenset[int]] = set()
    for node in saved.nodes:
        if is_loop(node):
            loop = Loop.of(node)
            places = frozenset(makers[name] for name in _made(loop.body) if name in makers)
            if places not in seen and isinstance(loop.extent, int):
                seen.add(places)
                region = next(_regions(loops, loop.body, makers, places), None)
                if region is None:
                    return None
                parts[region] = -(-loop.extent // loop.part)
    try:
        return loops.graph_of(parts)
    except CheckError:
        return None


def found_like(graphs: Sequence[Graph], like: Sequence[Candidate]) -> list[FoundGraph]:
    """Of these graphs what candidates are that were found for another program; nothing where that had none, or looks otherwise."""
    alike: list[FoundGraph] = []
    for each in like[1:]:
        graph = graphs[each.root] if 0 <= each.root < len(graphs) else None
        split = None if graph is None else split_as(graph, each.graph) if any(map(is_loop, each.graph.nodes)) else graph
        if split is None:
            return []
        alike.append(FoundGraph(split, each.root))
    return alike


def _made(body: Graph) -> Iterator[str]:
    """What the nodes of a body make, by the names that it has outside."""
    return (value.name.removesuffix(_WHOLE) for node in body.nodes for value in node.results)


def _regions(loops: Loops, body: Graph, makers: dict[str, int], places: frozenset[int]) -> Iterator[SplitSet]:
    """The regions of just these nodes, along what a body is cut along."""
    for node in body.nodes:
        for value, dim in _cut(node):
            name = value.name.removesuffix(_WHOLE)
            results = loops.graph.nodes[makers[name]].results if name in makers else ()
            for anchor in (each for each in results if each.name == name and len(each.shape) == len(value.shape)):
                region = loops.regions.around(anchor, dim, sorted(places))
                if region is not None and region.places == places:
                    yield region


def _cut(node: Node) -> Iterator[tuple[Value, int]]:
    return ((value, dim) for value in node.results for dim, size in enumerate(value.shape) if not isinstance(size, int))


def replan(saved: Plan, graph: Graph) -> Plan:
    """A plan that was made for an equal graph, for this one. Raises CheckError."""
    return checked(dataclasses.replace(saved, graph=graph))


def as_saved(saved: Plan, graph: Graph, *, exact: bool, generated: Graph | None = None) -> Plan:
    """The saved plan for the captured graph, or the one that was made of it, that it is of; `generated` is that with regions.

    Raises FormatError where it is of none, and where its numbers are rounded otherwise although they are to be eager's (`exact`).
    """
    equal = equal_graphs(graph)
    ruled = rewritten_as(equal[-1], saved.algebra)
    plan = _of_one(saved, [*equal, ruled.graph] if ruled.exact else equal)
    if plan is None:
        graphs = [each for each in (generated, None if ruled.exact else ruled.graph) if each is not None]
        plan = _of_one(saved, [*graphs, *_in_parts(ruled.graph if saved.algebra else equal[-1], saved)])
        if plan is not None and exact:
            raise FormatError("the saved plan rounds otherwise than eager: say exact=False, or leave `plan` out to make a new one")
    if plan is None:
        raise FormatError(
            "the saved plan was changed: its graph is not what the program was rewritten to; leave `plan` out to make a new one"
        )
    return plan


def _in_parts(graph: Graph, saved: Plan) -> Iterator[Graph]:
    """What a graph is prepared to for splits, and in the parts of the saved plan."""
    whole = prepared(graph)
    yield whole
    in_parts = split_as(whole, saved.graph)
    if in_parts is not None:
        yield in_parts


def _of_one(saved: Plan, graphs: Sequence[Graph]) -> Plan | None:
    text = to_text(saved.graph, sources=False)
    for graph in graphs:
        written = graph
        if saved.cost_report is not None:
            try:
                written = rematerialise(graph, saved.cost_report.runs).graph
            except (CheckError, IndexError):  # a sequence of another graph's nodes
                continue
        for each in _with_loads(written, saved):
            if to_text(each, sources=False) == text:
                return replan(saved, each)
    return None


def _with_loads(graph: Graph, saved: Plan) -> Iterator[Graph]:
    """A graph as it is, and with its loads from other ranks as the saved plan has them."""
    yield graph
    if any(map(loads_parts, graph.nodes)):
        there = {value.name for node in saved.graph.nodes for value in node.results}
        once = taken_once(graph, {name for node in alike(graph) if (name := node.results[0].name) not in there}).graph
        yield from (once, begun_apart(once).graph)
