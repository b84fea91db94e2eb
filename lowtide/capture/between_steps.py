"""Optimizer state that lies on the host between steps: what a captured step does of it as copies that stand in its graph.

A step loads such state right before it first touches it, and saves what it has written of it back to where it lay. State that a step makes
anew is stored, and the copy is what the optimizer gets. All of it is nodes: an order may begin a load earlier and wait for a copy later.

What is small stays where it is, as a copy would take longer than it makes room; so does what is no tensor alone on memory of its own.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from lowtide.capture.optimizers.optimizer import LEAST_BYTES
from lowtide.capture.trace import CapturedStep
from lowtide.ir.graph import Graph, Kind, Node, Storage, Value, arguments
from lowtide.ir.operators.row import DROP, LOAD, SAVE, STORE
from lowtide.ir.result_specs import is_gapless
from lowtide.ir.sizes import ITEM_BYTES, product


def on_the_host(captured: CapturedStep) -> CapturedStep:
    """The same step for state that lies on the host before and after it. Eager's own memory is still that of state on the device."""
    graph, slots = captured.graph, captured.slots
    device = max((value.storage.device for value in graph.inputs), default="cpu")
    given = Counter(value.storage for value in graph.inputs)
    returned = Counter(value.storage for value in graph.outputs)
    ends = {after.storage: after for node in graph.nodes for _, after in node.writes}
    own = (value for value, slot in zip(graph.inputs, slots, strict=True) if slot.table == "state" and _goes(value, device))
    alone = (value for value in own if given[value.storage] == 1 and value.storage not in returned)
    loaded = {value: home for value in alone if (home := _Home.of(value, ends.get(value.storage))) is not None}
    assigned = graph.outputs[len(graph.outputs) - len(captured.assigned) :]
    of_state = {value for value, slot in zip(assigned, captured.assigned, strict=True) if slot.table == "state"}
    stored = {each for each in of_state if each.storage not in given and returned[each.storage] == 1 and _goes(each, device)}
    if not loaded and not stored:
        return captured
    eager = captured.eager if captured.eager.program is not None else replace(captured.eager, program=graph)
    return replace(captured, graph=_with_copies(graph, loaded, stored), eager=eager)


def _goes(value: Value, device: str) -> bool:
    """Whether a tensor of the device is large, alone on its storage and all of it, without gaps."""
    nbytes = value.storage.nbytes
    if not isinstance(nbytes, int) or nbytes < LEAST_BYTES or value.storage.device != device:
        return False
    return is_gapless(value.shape, value.stride) and value.offset == 0 and product(value.shape) * ITEM_BYTES[value.dtype] == nbytes


@dataclass(frozen=True, eq=False)
class _Home:
    """One state tensor: where it lies, what a step loads of it, and what it leaves, on its old storage; None where it writes nothing."""

    there: Value
    here: Value
    end: Value | None

    @classmethod
    def of(cls, value: Value, end: Value | None) -> _Home | None:
        """None where the step does not leave it as the whole tensor that it was."""
        storage = value.storage
        if end is not None and (end.shape, end.stride, end.offset) != (value.shape, value.stride, value.offset):
            return None
        here = replace(value, name=f"{value.name}_here", storage=replace(storage, name=f"{storage.name}_here"))
        there = replace(value, storage=replace(storage, device="cpu", kind=Kind.HOST))
        return cls(there, here, end)


def _with_copies(graph: Graph, loaded: Mapping[Value, _Home], stored: set[Value]) -> Graph:
    home_of_storage = {value.storage: home for value, home in loaded.items()}
    new: dict[Value, Value] = {value: home.here for value, home in loaded.items()}
    homes = {value: Storage(f"{value.name}_home", value.storage.nbytes, "cpu", Kind.HOST) for value in stored}
    kept = {value: replace(value, name=home.name, storage=home) for value, home in homes.items()}

    def moved(value: Value) -> Value:
        home = home_of_storage.get(value.storage)
        return value if home is None else new.setdefault(value, replace(value, storage=home.here.storage))

    nodes: list[Node] = []
    became: dict[Node, Node] = {}
    begun: set[_Home] = set()
    for node in graph.nodes:
        values = (*node.inputs, *(before for before, _ in node.writes))
        touched = dict.fromkeys(home_of_storage[each.storage] for each in values if each.storage in home_of_storage)
        for home in touched:
            if home not in begun:
                begun.add(home)
                nodes.append(Node(LOAD, (home.there,), (home.here,), source=node.source))
        copy = _moved(node, became, moved) if touched or not became.keys().isdisjoint(node.after) else node
        if copy is not node:
            became[node] = copy
        nodes.append(copy)
        nodes += (each for home in touched if home.end in node.results for each in _saved(home, moved))
        for value in node.outputs:
            if value in kept:
                nodes.append(Node(STORE, (value,), (kept[value],), source=node.source))
                nodes.append(Node(DROP, (value, kept[value]), (), source=node.source))
    inputs = tuple(loaded[value].there if value in loaded else value for value in graph.inputs)
    return replace(graph, inputs=inputs, nodes=tuple(nodes), outputs=tuple(kept.get(value, value) for value in graph.outputs))


def _saved(home: _Home, moved: Callable[[Value], Value]) -> Iterator[Node]:
    """Copy what was written over what lay on the host, and wait for that."""
    assert home.end is not None, "asked for where it is written"
    now, there = moved(home.end), home.there
    saved = replace(there, name=f"{there.name}_saved", version=there.version + 1)
    yield Node(SAVE, (now, there), (), writes=((there, saved),))
    yield Node(DROP, (now, saved), ())


def _moved(node: Node, became: Mapping[Node, Node], moved: Callable[[Value], Value]) -> Node:
    """A node that reads and writes what was loaded."""
    return replace(
        node,
        **arguments(node, moved),
        outputs=tuple(None if value is None else moved(value) for value in node.outputs),
        writes=tuple((moved(before), moved(after)) for before, after in node.writes),
        after=tuple(became.get(other, other) for other in node.after),
        inplace=tuple((moved(value), overload) for value, overload in node.inplace),
    )
