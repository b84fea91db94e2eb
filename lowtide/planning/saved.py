"""A saved plan for a program that was captured anew: whether it is of that program, and the plan on its graph. Nothing is solved again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from lowtide.errors import CheckError, FormatError
from lowtide.ir.graph import Graph
from lowtide.ir.text.graph_text import to_text
from lowtide.plan.plan import Plan
from lowtide.planning.checked import checked
from lowtide.remat.write_out import rematerialise


def replan(saved: Plan, graph: Graph) -> Plan:
    """A plan that was made for an equal graph, for this one. Raises CheckError."""
    return checked(dataclasses.replace(saved, graph=graph))


def as_saved(saved: Plan, graphs: Sequence[Graph]) -> Plan:
    """The saved plan for the one of these graphs, which compute the same, that it is of. Raises FormatError where it is of none."""
    text = to_text(saved.graph, sources=False)
    for graph in graphs:
        written = graph
        if saved.cost_report is not None:
            try:
                written = rematerialise(graph, saved.cost_report.runs).graph
            except (CheckError, IndexError):  # a sequence of another graph's nodes
                continue
        if to_text(written, sources=False) == text:
            return replan(saved, written)
    raise FormatError("the saved plan was changed: its graph is not what the program was rewritten to; leave `plan` out to make a new one")
