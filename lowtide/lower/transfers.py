"""Stores, drops and loads as lines of a program, and where it waits for what it loads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from lowtide.ir.graph import Node, Storage, Value
from lowtide.ir.ops import DROP, LOAD, STORE, is_transfer, is_view
from lowtide.ir.plan import Plan
from lowtide.ir.summary import bytes_text


class Arrivals(NamedTuple):
    """The loaded values that a program waits for, by position in the order."""

    before: Mapping[int, tuple[Value, ...]]  # the first node that reads what lies there
    after: Mapping[int, tuple[Value, ...]]  # the load itself, where nobody reads it: its memory may not be let go before


def swaps(plan: Plan) -> bool:
    """Whether a plan's program copies to the host."""
    return any(map(is_transfer, plan.graph.nodes))


def arrivals(plan: Plan) -> Arrivals:
    """Where the program waits: as late as it can. Taking a view reads nothing."""
    loaded: dict[Storage, tuple[int, Value]] = {}
    before: dict[int, tuple[Value, ...]] = {}
    for position, index in enumerate(plan.order):
        node = plan.graph.nodes[index]
        for value in () if is_view(node) else node.inputs:
            if value.storage in loaded:
                before[position] = (*before.get(position, ()), loaded.pop(value.storage)[1])
        if node.op == LOAD:
            loaded[node.results[0].storage] = position, node.results[0]
    return Arrivals(before, {position: (value,) for position, value in loaded.values()})


def statements(node: Node, names: Mapping[Value, str]) -> Iterator[str]:
    """The line of a store, a drop or a load."""
    given = ", ".join(names[value] for value in node.inputs)
    if node.op == DROP:
        yield f"host.drop({given})"
        return
    result = node.results[0]
    assert isinstance(result.storage.nbytes, int)
    what, way = ("store", "to") if node.op == STORE else ("load", "from")
    yield f"{names[result]} = host.{what}({given})  # {bytes_text(result.storage.nbytes)} {way} the host"


def waits(values: tuple[Value, ...], names: Mapping[Value, str]) -> Iterator[str]:
    """The lines that wait for loaded values."""
    for value in values:
        yield f"host.arrived({names[value]})"
