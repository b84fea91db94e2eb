"""May a set be split? What the paper asks for (MAGIS, section 4.2), and what writes and random numbers ask for beyond that."""

from __future__ import annotations

from collections.abc import Hashable

from lowtide.ir.graph import Node, Storage, Value
from lowtide.ir.operators.nodes import is_arithmetic, is_random, is_transfer, is_view
from lowtide.ir.operators.table import row_of
from lowtide.rewrite.fission.roles import Roles, Split, refuse


def check_set(wanted: Split, roles: Roles) -> None:
    """Raises CheckError naming a node that is in the way. That the set is convex is seen where its place in the graph is sought."""
    for node in wanted.nodes:
        if is_random(node):
            refuse(node, "nothing that draws random numbers, which would be others")
        if is_transfer(node) or is_arithmetic(node):
            refuse(node, "operators on tensors, got arithmetic on numbers or a copy to the host")
        if row_of(node.op).statistics is not None:
            refuse(node, "no statistics over the batch, which parts do not know")
        if wanted.axes[node] is None and not is_view(node):
            refuse(node, "results that are cut or put together, got some that each part would compute as a whole")
        for before, _ in node.writes:
            if before not in roles.dims:
                refuse(node, f"what is written to be cut, got {before.name}, which parts would share")
    _check_written(wanted, roles)
    _check_connected(wanted, roles)


def _check_written(wanted: Split, roles: Roles) -> None:
    """What the set writes it reads, at whatever version, only as it is written: each part then meets its own elements alone."""
    written: dict[Storage, tuple[Hashable, ...]] = {}
    for node in wanted.nodes:
        for before, _ in node.writes:
            if written.setdefault(before.storage, _look(before, roles)) != _look(before, roles):
                refuse(node, f"every write of {before.storage.name} to be cut alike")
            if any(stride == 0 and extent != 1 for extent, stride in zip(before.shape, before.stride, strict=True)):
                refuse(node, f"{before.name} to hold each element once")
    for node in wanted.nodes:
        for value in (*node.inputs, *node.results):
            if value.storage in written and _look(value, roles) != written[value.storage]:
                refuse(node, f"{value.name} to be read as it is written, since other parts write what lies beside it")


def _look(value: Value, roles: Roles) -> tuple[Hashable, ...]:
    return value.shape, value.stride, value.offset, value.dtype, roles.dims.get(value)


def _check_connected(wanted: Split, roles: Roles) -> None:
    """Whether tensors hold the set together; what is whole and comes from outside holds nothing."""
    leader = {node: node for node in wanted.nodes}

    def find(node: Node) -> Node:
        while leader[node] is not node:
            leader[node] = leader[leader[node]]
            node = leader[node]
        return node

    first: dict[Value, Node] = {}
    for node in wanted.nodes:
        for value in (*node.inputs, *node.results):
            if value in roles.dims or value not in roles.whole:
                leader[find(node)] = find(first.setdefault(value, node))
    groups = {find(node) for node in wanted.nodes if wanted.axes[node] is not None}
    if len(groups) > 1:
        refuse(min(groups, key=wanted.nodes.index), "a connected set, got several that have nothing to do with one another")
