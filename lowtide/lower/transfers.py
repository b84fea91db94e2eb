"""Stores, drops and loads as lines of a program, and where it waits for what it loads."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import NamedTuple

from lowtide.ir.graph import Graph, Node, Storage, Value
from lowtide.ir.operators.nodes import homes_of, is_transfer, is_view, offloaded_storages
from lowtide.ir.operators.row import DROP, LOAD, SAVE, STORE
from lowtide.ir.sizes import Size
from lowtide.plan.contents import Decision
from lowtide.plan.summary import bytes_text


class Offloaded(NamedTuple):
    """State that the caller lends: it stays the caller's tensor, which is emptied and filled again; and what lies on the host anyway."""

    storages: frozenset[Storage]  # of its values: the caller's own, and what loads make of it
    tensor: Mapping[Storage, Value]  # by storage on the host: the caller's tensor
    homes: frozenset[Storage]  # on the host between steps: tensors of the caller's

    @classmethod
    def of(cls, graph: Graph) -> Offloaded:
        offloaded = offloaded_storages(graph)
        stores = [node for node in graph.nodes if node.op == STORE and node.inputs[0].storage in offloaded]
        tensor = {node.results[0].storage: node.inputs[0] for node in stores}
        back = {node.results[0].storage for node in graph.nodes if node.op == LOAD and node.inputs[0].storage in tensor}
        return cls(offloaded | back, tensor, homes_of(graph))


class Arrivals(NamedTuple):
    """The loaded values that a program waits for, by position in the order."""

    before: Mapping[int, tuple[Value, ...]]  # the first node that reads what lies there
    after: Mapping[int, tuple[Value, ...]]  # the load itself, where nobody reads it: its memory may not be let go before


def swaps(plan: Decision) -> bool:
    """Whether a plan's program copies to the host."""
    return any(map(is_transfer, plan.graph.nodes))


def arrivals(plan: Decision, offloaded: Offloaded) -> Arrivals:
    """Where the program waits: as late as it can. Views read nothing. Offloaded state that nobody reads again is awaited at the end."""
    loaded: dict[Storage, tuple[int, Value]] = {}
    before: dict[int, tuple[Value, ...]] = {}
    for position, index in enumerate(plan.order):
        node = plan.graph.nodes[index]
        for value in () if is_view(node) else node.inputs:
            if value.storage in loaded:
                before[position] = (*before.get(position, ()), loaded.pop(value.storage)[1])
        if node.op == LOAD:
            loaded[node.results[0].storage] = position, node.results[0]
    unread = {position: (value,) for position, value in loaded.values() if value.storage not in offloaded.storages}
    return Arrivals(before, unread)


def statements(node: Node, names: Mapping[Value, str], offloaded: Offloaded) -> Iterator[str]:
    """The line of a store, a save, a drop or a load."""
    if node.op == LOAD:
        here, there = node.results[0], node.inputs[0]
    elif node.op == SAVE:
        here, there = node.inputs
    else:  # a drop makes no output, but a new version of the tensor that it empties
        here, there = node.inputs[0], node.results[0] if node.op == STORE else node.inputs[1]
    size, own = size_text(here.storage.nbytes), offloaded.tensor.get(there.storage)
    if there.storage in offloaded.homes:
        yield _between_steps(node, names, here, there, size)
    elif node.op == STORE:
        yield f"{names[there]} = host.store({names[here]})  # {size} to the host"
    elif node.op == DROP:
        yield f"host.drop({names[here]}, {names[there]})" if own is None else f"host.empty({names[here]}, {names[there]})  # frees {size}"
    elif own is None:
        yield f"{names[here]} = host.load({names[there]})  # {size} from the host"
    else:
        yield f"{names[here]} = host.refill({names[own]}, {names[there]})  # {size} from the host"


def _between_steps(node: Node, names: Mapping[Value, str], here: Value, there: Value, size: str) -> str:
    if node.op == LOAD:
        return f"{names[here]} = host.fetch({names[there]}, device({here.storage.device!r}))  # {size} from the host"
    if node.op == STORE:
        return f"{names[there]} = host.send({names[here]})  # {size} to the host"
    return f"host.save({names[here]}, {names[there]})  # {size} to the host" if node.op == SAVE else f"host.saved({names[here]})"


def waits(values: tuple[Value, ...], names: Mapping[Value, str]) -> Iterator[str]:
    for value in values:
        yield f"host.arrived({names[value]})"


def size_text(nbytes: Size) -> str:
    """Bytes for people, as a comment says them; of an expression all of it."""
    return bytes_text(nbytes) if isinstance(nbytes, int) else f"{nbytes} B"
