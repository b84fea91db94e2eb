"""May nodes work in the memory of their inputs as told? A check that shares no code with what decides it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lowtide.ir.check.verdict import NodeLocation, Verdict, refuse
from lowtide.ir.graph import Graph, Node, Storage, Value


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
        if other.storage is storage and _layout(other) != _layout(taken):
            refuse(Verdict.REUSE_ALIASED, f"{where} and reads {other.name}")
    if uses.last[storage] > uses.step[node]:
        refuse(Verdict.REUSE_ALIVE, f"{where} at step {uses.step[node]}; last used at step {uses.last[storage]}")


def _layout(value: Value) -> tuple[object, ...]:
    return value.dtype, value.shape, value.stride, value.offset
