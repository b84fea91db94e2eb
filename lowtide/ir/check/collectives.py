"""Do the processes of a group meet? Collectives begin in one order, and nobody touches what one of them still fills."""

from __future__ import annotations

from lowtide.ir.check.verdict import NodeLocation, Verdict, refuse
from lowtide.ir.graph import Graph, Node, Storage, Value
from lowtide.ir.operators.collectives.nodes import begins_collective
from lowtide.ir.operators.collectives.rows import GATHER, READING
from lowtide.ir.operators.row import Collective
from lowtide.ir.operators.table import row_of


def check_collectives(graph: Graph, within: str) -> None:
    """Raises CheckError for a collective whose place among the others is free, and for one whose result is used before it is whole."""
    last: Node | None = None
    filled: dict[Storage, NodeLocation] = {}  # storages that a collective fills, and where it began
    read_by: dict[Value, tuple[Value, ...]] = {}  # by what a collective makes apart: what it reads meanwhile
    for index, node in enumerate(graph.nodes):
        where, part = NodeLocation(index, node, within), row_of(node.op).collective
        for value in (*node.inputs, *(before for before, _ in node.writes)):
            if value.storage in filled and part is not Collective.ENDS:
                refuse(Verdict.COLLECTIVE_TOUCHED, f"{where} uses {value.name}, which {filled[value.storage]} makes")
        if part is Collective.ENDS and not all(given in node.inputs for value in node.inputs for given in read_by.get(value, ())):
            refuse(Verdict.COLLECTIVE_TOUCHED, f"{where} does not hold what the collective reads until then")
        if part is not Collective.BEGINS:
            continue
        if node.op in READING:
            read_by |= dict.fromkeys(node.results, node.inputs)
        if not (node.op == GATHER and not any(begins_collective(before) for before in node.after)):  # a load's place is the plan's
            if last is not None and last not in node.after:
                refuse(Verdict.COLLECTIVE_FREE, f"{where} does not come after {last.op}")
            last = node
        filled.update((value.storage, where) for value in node.outputs if value is not None)
    for value in graph.outputs:
        if value.storage in filled:
            refuse(Verdict.COLLECTIVE_TOUCHED, f"the graph returns {value.name}{within}")
