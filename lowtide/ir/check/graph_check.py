"""Is a graph right, is an order of its nodes? The simple way: run it with nothing in memory but names and versions, and look.

A graph in normal form is right when a machine can run it in program order that knows of each value only whether it exists, and of each
storage only its current version; an order is right when the same machine can run the nodes in that order. Shares no code with what it
checks: not with `edges` or `text`, not with the cost model, not with any scheduler. Every refusal is a CheckError that starts with a
`Verdict`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from lowtide.ir.bodies import is_loop, is_region
from lowtide.ir.check.bodies import check_loop, check_region, layout
from lowtide.ir.check.transfers import check_collectives, check_host_copies
from lowtide.ir.check.verdict import NodeLocation, Verdict, refuse
from lowtide.ir.graph import Graph, Kind, Node, Storage, Value
from lowtide.ir.operators.nodes import row_of
from lowtide.ir.operators.row import LOAD
from lowtide.ir.sizes import ITEM_BYTES, Size

__all__ = ["Verdict", "check_graph", "check_order", "check_reuses"]


def check_graph(graph: Graph) -> None:
    """Whether a graph, and each body within it, makes sense in program order and is in normal form.

    Raises CheckError: verdict, node, operator, source line.
    """
    pending, loops, regions = [(graph, "")], list[tuple[Node, NodeLocation]](), list[tuple[Node, NodeLocation]]()
    while pending:
        current, within = pending.pop()
        _check_one(current, within)
        for index, node in enumerate(current.nodes):
            if node.body is not None:
                pending.append((node.body, f", in the body of {NodeLocation(index, node, within)}"))
            if is_loop(node):
                loops.append((node, NodeLocation(index, node, within)))
            if is_region(node):
                regions.append((node, NodeLocation(index, node, within)))
    for node, where in loops:  # their bodies are right graphs
        check_loop(node, where)
    for node, where in regions:
        check_region(node, where)


def check_order(graph: Graph, order: Sequence[int]) -> None:
    """Whether running a right graph's nodes in `order`, indices into `graph.nodes`, keeps every data, hazard and control edge.

    Raises CheckError: verdict, step, node, operator, source line.
    """
    if sorted(order) != list(range(len(graph.nodes))):
        refuse(Verdict.NOT_A_PERMUTATION, f"expected each of {len(graph.nodes)} nodes once, got {_strays(order, len(graph.nodes))}")
    machine = _Machine.of(graph)
    for step, index in enumerate(order):
        node = graph.nodes[index]
        machine.run(node, NodeLocation(index, node, f", at step {step}"), _IN_ORDER)


def _strays(order: Sequence[int], count: int) -> str:
    """What is wrong with something that is no permutation."""
    missing = set(range(count)) - set(order)
    extra = set(order) - set(range(count))
    if len(order) != count:
        return f"{len(order)} entries"
    return f"{min(extra)}, which is none" if extra else f"none of {min(missing)}"


@dataclass(frozen=True, slots=True)
class _Sentences:
    """What a machine says when it cannot run a node."""

    missing: Verdict
    stale: Verdict
    control: Verdict


_IN_PROGRAM = _Sentences(Verdict.READ_BEFORE_MADE, Verdict.STALE, Verdict.CONTROL_LATE)
_IN_ORDER = _Sentences(Verdict.ORDER_DATA, Verdict.ORDER_HAZARD, Verdict.ORDER_CONTROL)


@dataclass(slots=True)
class _Machine:
    """What exists while a program runs."""

    values: set[Value]
    version: dict[Storage, int]
    done: set[Node] = field(default_factory=set)

    @classmethod
    def of(cls, graph: Graph) -> _Machine:
        return cls(set(graph.inputs), {value.storage: value.version for value in graph.inputs})

    def run(self, node: Node, where: NodeLocation, say: _Sentences) -> None:
        for value in _touched(node):
            if value not in self.values:
                refuse(say.missing, f"{where} reads {value.name}")
            if self.version[value.storage] != value.version:
                refuse(say.stale, f"{where} reads {value.name}, version {value.version}; now at {self.version[value.storage]}")
        for other in node.after:
            if other not in self.done:
                refuse(say.control, f"{where} comes after {other.op}, which has not run")
        for _, after in node.writes:
            self.version[after.storage] = after.version
        for value in node.results:
            self.version.setdefault(value.storage, value.version)
            self.values.add(value)
        self.done.add(node)


def _touched(node: Node) -> tuple[Value, ...]:
    return (*node.inputs, *(before for before, _ in node.writes))


def _check_one(graph: Graph, within: str) -> None:
    _check_names(graph, within)
    _check_inputs(graph, within)
    inside = set(graph.nodes)
    loaded = (value for node in graph.nodes if node.op == LOAD for value in node.results)  # of offloaded state
    owned = {value.storage for value in (*graph.inputs, *loaded) if value.storage.kind.caller_owned}
    owned |= {value.storage for value in graph.inputs if value.storage.kind is Kind.HOST}  # of which `check_host_copies` says who writes
    machine = _Machine.of(graph)
    for index, node in enumerate(graph.nodes):
        where = NodeLocation(index, node, within)
        _check_edges(node, inside, machine.done, where)
        _check_writes(node, owned, where)
        existing = {value.storage for value in node.outputs if value is not None and value.storage in machine.version}
        machine.run(node, where, _IN_PROGRAM)
        _check_outputs(node, existing, machine.version, where)
    for value in graph.outputs:
        if value not in machine.values:
            refuse(Verdict.READ_BEFORE_MADE, f"the graph returns {value.name}{within}")
    check_host_copies(graph, within)
    check_collectives(graph, within)


def _check_names(graph: Graph, within: str) -> None:
    """Each value is made once, and no two values or storages are named alike."""
    values: dict[str, Value] = {}
    storages: dict[str, Storage] = {}
    for value, where in _made(graph, within):
        if value.name in values:
            verdict = Verdict.MADE_TWICE if values[value.name] is value else Verdict.DUPLICATE_NAME
            refuse(verdict, f"{where} makes {value.name}")
        if storages.setdefault(value.storage.name, value.storage) is not value.storage:
            refuse(Verdict.DUPLICATE_NAME, f"{where} makes {value.name}, on another storage named {value.storage.name}")
        values[value.name] = value


def _made(graph: Graph, within: str) -> Iterator[tuple[Value, NodeLocation | str]]:
    for value in graph.inputs:
        yield value, f"the graph's head{within}"
    for index, node in enumerate(graph.nodes):
        for value in node.results:
            yield value, NodeLocation(index, node, within)


def _check_inputs(graph: Graph, within: str) -> None:
    version: dict[Storage, int] = {}
    for value in graph.inputs:
        _check_layout(value, f"the graph's head{within}")
        if version.setdefault(value.storage, value.version) != value.version:
            refuse(Verdict.INPUT_VERSIONS, f"input {value.name}{within} is of version {value.version}, not {version[value.storage]}")


def _check_edges(node: Node, inside: set[Node], done: set[Node], where: NodeLocation) -> None:
    """What a node says about other nodes and about its inputs."""
    if node in done:
        refuse(Verdict.NODE_TWICE, where)
    for other in node.after:
        if other not in inside:
            refuse(Verdict.CONTROL_OUTSIDE, f"{where} comes after {other.op}")
    for value, _ in node.inplace:
        if value not in node.inputs:
            refuse(Verdict.INPLACE_NOT_READ, f"{where} may take over {value.name}")


def _check_writes(node: Node, owned: set[Storage], where: NodeLocation) -> None:
    """A write makes the next version, one version only, of a storage of the caller's."""
    stepped: set[Storage] = set()
    for before, after in node.writes:
        if before.storage not in owned:
            refuse(Verdict.WRITE_NOT_OWNED, f"{where} writes {before.storage.name}")
        steps = max(1, after.version - before.version) if is_loop(node) or is_region(node) else 1  # checked with the body
        expected = replace(before, name=after.name, version=before.version + steps)
        if _fields(after) != _fields(expected) or before.storage in stepped:
            refuse(Verdict.WRITE_STEP, f"{where} leaves {before.name}, version {before.version}, as {after.name}, version {after.version}")
        stepped.add(before.storage)


def _fields(value: Value) -> tuple[object, ...]:
    return value.storage, value.dtype, value.shape, value.stride, value.offset, value.version


def _check_outputs(node: Node, existing: set[Storage], version: Mapping[Storage, int], where: NodeLocation) -> None:
    """What a node returns lies on storages that it makes, at version 0, or views storages that it reads or writes, as they are now."""
    for value in node.outputs:
        if value is None:
            continue
        _check_layout(value, where)
        if value.storage not in existing:
            if row_of(node.op).view:
                refuse(Verdict.VIEW_APART, f"{where} makes {value.name} on {value.storage.name}")
            if value.version != 0:
                refuse(Verdict.MADE_AT_VERSION, f"{where} makes {value.name}, version {value.version}")
        elif not any(read.storage is value.storage for read in _touched(node)):
            refuse(Verdict.REMADE, f"{where} makes {value.name} on {value.storage.name}")
        elif value.version != version[value.storage]:
            refuse(Verdict.OTHER_VERSION, f"{where} makes {value.name}, version {value.version}; now at {version[value.storage]}")


def _check_layout(value: Value, where: NodeLocation | str) -> None:
    """A value lies within its storage, as far as the sizes are known."""
    if value.dtype not in ITEM_BYTES:
        refuse(Verdict.UNKNOWN_DTYPE, f"{where} makes {value.name} of dtype {value.dtype!r}; known are {', '.join(ITEM_BYTES)}")
    sizes = (*value.shape, *value.stride, value.offset, value.storage.nbytes)
    if len(value.shape) != len(value.stride) or any(_is_negative(size) for size in sizes):
        sizes_text = f"shape {value.shape}, strides {value.stride}, offset {value.offset}, in {value.storage.nbytes} bytes"
        refuse(Verdict.MALFORMED, f"{where} makes {value.name}: {sizes_text}")
    reach_bytes = _reach_bytes(value)
    if _is_negative(value.storage.nbytes - reach_bytes):
        refuse(Verdict.OUTSIDE_STORAGE, f"{where} makes {value.name}, {reach_bytes} bytes long, within {value.storage.nbytes} bytes")


def _reach_bytes(value: Value) -> Size:
    """The bytes from the start of the storage to the end of the value's last element."""
    if 0 in value.shape:
        return 0
    last = value.offset
    for extent, stride in zip(value.shape, value.stride, strict=True):
        last = last + (extent - 1) * stride
    return (last + 1) * ITEM_BYTES[value.dtype]


def _is_negative(size: Size) -> bool:
    """Whether a size is known to be negative; that of a symbolic one may depend on what its dimensions will be."""
    return size < 0 if isinstance(size, int) else size.is_negative is True


def check_reuses(graph: Graph, order: Sequence[int], reuses: Sequence[int]) -> None:
    """Whether, in a right order of a right graph, node i may take over its candidate `inplace[reuses[i]]` (-1: it takes over none).

    Raises CheckError: verdict, node, operator, source line.
    """
    if len(reuses) != len(graph.nodes):
        refuse(Verdict.REUSE_COUNT, f"expected {len(graph.nodes)}, got {len(reuses)}")
    uses = _Uses.of(graph, order)
    for index, (node, slot) in enumerate(zip(graph.nodes, reuses, strict=True)):
        if slot == -1:
            continue
        if not 0 <= slot < len(node.inplace):
            refuse(Verdict.REUSE_NOT_LISTED, f"{NodeLocation(index, node)} lists {len(node.inplace)}, got index {slot}")
        _check_reuse(index, node, node.inplace[slot][0], uses)


@dataclass(frozen=True, slots=True)
class _Uses:
    """How the storages of a graph are used in an order."""

    step: dict[Node, int]
    last: dict[Storage, int]  # step of the last node that has to do with it
    maker: dict[Storage, Node]
    owned: frozenset[Storage]
    kept: frozenset[Storage]

    @classmethod
    def of(cls, graph: Graph, order: Sequence[int]) -> _Uses:
        step: dict[Node, int] = {}
        last: dict[Storage, int] = {}
        maker: dict[Storage, Node] = {}
        given = {value.storage for value in graph.inputs}
        for position, index in enumerate(order):
            node = graph.nodes[index]
            step[node] = position
            for value in (*node.inputs, *node.results):
                last[value.storage] = position
            for value in node.results:
                if value.storage not in given:
                    maker.setdefault(value.storage, node)
        owned = frozenset(storage for storage in given if storage.kind.caller_owned)
        return cls(step, last, maker, owned, frozenset(value.storage for value in graph.outputs))


def _check_reuse(index: int, node: Node, taken: Value, uses: _Uses) -> None:
    """One node that works in the memory of one of its inputs."""
    result, storage = node.outputs[0] if node.outputs else None, taken.storage
    where = f"{NodeLocation(index, node)} takes over {taken.name}"
    if result is None or uses.maker.get(result.storage) is not node:
        refuse(Verdict.REUSE_FOR_NOTHING, where)
    if storage in uses.owned:
        refuse(Verdict.REUSE_OWNED, where)
    if storage in uses.kept:
        refuse(Verdict.REUSE_KEPT, where)
    if storage.nbytes != result.storage.nbytes or storage.device != result.storage.device:
        sizes = f"{storage.nbytes} bytes on {storage.device}, needs {result.storage.nbytes} on {result.storage.device}"
        refuse(Verdict.REUSE_UNFIT, f"{where}: {sizes}")
    for other in node.inputs:
        if other.storage is storage and layout(other) != layout(taken):
            refuse(Verdict.REUSE_ALIASED, f"{where} and reads {other.name}")
    if uses.last[storage] > uses.step[node]:
        refuse(Verdict.REUSE_ALIVE, f"{where} at step {uses.step[node]}; last used at step {uses.last[storage]}")
