"""A saved plan for a program that was captured anew: whether it is of that program, and the plan on its graph. Nothing is solved again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence

from lowtide.errors import CheckError, FormatError
from lowtide.ir.graph import Graph
from lowtide.ir.operators.collectives.nodes import loads_parts
from lowtide.ir.text.graph_text import to_text
from lowtide.plan.plan import Plan
from lowtide.planning.candidate import equal_graphs
from lowtide.planning.final_check import checked
from lowtide.planning.splits import split_as
from lowtide.remat.write_out import rematerialise
from lowtide.rewrite.algebra.rewritings import rewritten_as
from lowtide.rewrite.loads import alike, begun_apart, taken_once
from lowtide.split.graphs import prepared


def replan(saved: Plan, graph: Graph) -> Plan:
    """A plan that was made for an equal graph, for this one. Raises CheckError."""
    return checked(dataclasses.replace(saved, graph=graph))


def as_saved(saved: Plan, graph: Graph, *, exact: bool, generated: Graph | None = None) -> Plan:
    """The saved plan for the captured graph, or the one that was made of it, that it is of; `generated` is that with regions.

    Raises FormatError where it is of none, and where its numbers are rounded otherwise although they are to be eager's (`exact`).
    """
    equal = equal_graphs(graph)
    ruled = rewritten_as(equal[-1], saved.algebra)
    found = _of_one(saved, [*equal, ruled.graph] if ruled.exact else equal)
    if found is None:
        graphs = [each for each in (generated, None if ruled.exact else ruled.graph) if each is not None]
        found = _of_one(saved, [*graphs, *_in_parts(ruled.graph if saved.algebra else equal[-1], saved)])
        if found is not None and exact:
            raise FormatError("the saved plan rounds otherwise than eager: say exact=False, or leave `plan` out to make a new one")
    if found is None:
        raise FormatError(
            "the saved plan was changed: its graph is not what the program was rewritten to; leave `plan` out to make a new one"
        )
    return found


def _in_parts(graph: Graph, saved: Plan) -> Iterator[Graph]:
    """What a graph is prepared to for splits, and in the parts of the saved plan."""
    whole = prepared(graph)
    yield whole
    in_parts = split_as(whole, saved.graph)
    if in_parts is not None:
        yield in_parts


def _of_one(saved: Plan, graphs: Sequence[Graph]) -> Plan | None:
    """The plan for the one of these graphs that it is of."""
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
