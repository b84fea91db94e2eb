"""What a node does, by its operator's row: draws random numbers, gives views, copies to the host, runs in parts, can be repeated."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from math import prod

from lowtide.errors import FormatError
from lowtide.ir.graph import Arg, Graph, Node, Storage, Value
from lowtide.ir.operators.axes.axis import Axis
from lowtide.ir.operators.collectives.nodes import is_collective, loads_parts
from lowtide.ir.operators.names import ARITHMETIC, DROP, LOAD, LOOP, REGION, STORE
from lowtide.ir.operators.nests import Access, Index, Nest, NestLoop
from lowtide.ir.operators.row import Draws, Fusion, Operator
from lowtide.ir.operators.shapes import ints
from lowtide.ir.operators.table import row_of

# A library's operator and its overload, or arithmetic on Python numbers: nothing that Python could look up by such a name.
_OPERATOR = re.compile(r"(?!py\.|host\.|fission\.|fuse\.)[A-Za-z_]\w*(\.[A-Za-z_]\w*){2}|py\.[a-z_]+", re.ASCII)


def check_operators(graph: Graph) -> None:
    """Whether every operator of a graph has a name that an operator can have. Raises FormatError naming the node."""
    pending = [graph]
    while pending:
        for index, node in enumerate(pending.pop().nodes):
            for name in (node.op, *(overload for _, overload in node.inplace)):
                if not _OPERATOR.fullmatch(name) and name not in (STORE, DROP, LOAD, LOOP, REGION):
                    raise FormatError(f"node {index}: expected the name of an operator such as 'aten.add.Tensor', got {name!r}")
            if node.body is not None:
                pending.append(node.body)


def is_random(node: Node) -> bool:
    return draws(row_of(node.op), node.args, dict(node.kwargs))


def draws(row: Operator, args: tuple[Arg, ...], kwargs: Mapping[str, Arg]) -> bool:
    """Whether a call of this operator draws from the generator, or may do so for all that is known."""
    if row.draws is Draws.WITH_PROBABILITY:
        return (args[row.probability] if row.probability < len(args) else kwargs.get("dropout_p", 0.0)) != 0
    return row.draws in (Draws.ALWAYS, Draws.UNKNOWN)


def is_arithmetic(node: Node) -> bool:
    """Whether a node computes with Python numbers alone, or ends the program by one."""
    return node.op.startswith(ARITHMETIC)


def is_transfer(node: Node) -> bool:
    """Whether a node begins, ends or needs a copy in the host's memory."""
    return node.op in (STORE, DROP, LOAD)


def offloaded_storages(graph: Graph) -> frozenset[Storage]:
    """What is offloaded, state that the caller lends: the inputs of the caller's that are stored on the host.

    Such a storage lives from the start to its drop, and what the last load makes of it is kept: that is the caller's again.
    """
    given = {value.storage for value in graph.inputs}
    return frozenset(value.storage for node in graph.nodes if node.op == STORE for value in node.inputs if value.storage in given)


def is_view(node: Node) -> bool:
    """Whether a node only looks at the storages of its inputs in other ways: it makes no bytes and writes none."""
    results = [value for value in node.outputs if value is not None]
    given = {value.storage for value in node.inputs}
    return bool(results) and not node.writes and all(value.storage in given and value.dtype != "scalar" for value in results)


def repeatable(node: Node) -> Node | None:
    """A node that computes the same results once more and does nothing else; None where there is none.

    An operator that is random, that writes, that copies to the host or back or that is a collective cannot be repeated, but for loads of
    what ranks hold parts of; batch normalisation can, without the update of its statistics, unless it is these that make it compute in
    full precision.
    """
    once = is_random(node) or is_transfer(node) or (is_collective(node) and not loads_parts(node))
    if once or not any(value is not None for value in node.outputs):
        return None
    if not node.writes:
        return node
    statistics = row_of(node.op).statistics
    positions = statistics.positions if statistics is not None and statistics.without else ()
    left_out = {node.args[position] for position in positions}
    args = tuple(None if position in positions else arg for position, arg in enumerate(node.args))
    if {before for before, _ in node.writes} - left_out or _dtypes(left_out) - _dtypes(args):
        return None
    return replace(node, op=statistics.without if statistics is not None else node.op, args=args, writes=())


def _dtypes(args: Iterable[Arg]) -> set[str]:
    return {arg.dtype for arg in args if isinstance(arg, Value)}


def axes_of(node: Node) -> tuple[Axis, ...]:
    """Along what a node can be run in parts; () where it cannot, or nobody knows."""
    rule = row_of(node.op).axes
    return () if rule is None or node.body is not None or is_random(node) else tuple(rule(node))


def nest_of(node: Node) -> Nest:
    """The loops around an operator. Raises CheckError where a shape is symbolic."""
    rule = row_of(node.op).nest
    found = None if rule is None else rule(node)
    return _by_shape(node) if found is None else found


def _by_shape(node: Node) -> Nest:
    """A loop for each dimension of the largest result or argument."""
    values = [value for value in node.outputs if value is not None] or list(node.inputs)
    shapes = [ints(node, value) for value in (*values, *node.inputs) if value.storage.kind.value not in ("parameter", "buffer")]
    largest = max(shapes, key=prod, default=())
    loops = tuple(NestLoop(f"d{dim}", extent) for dim, extent in enumerate(largest))
    made = node.outputs[0] if node.outputs and node.outputs[0] is not None else None
    if made is None or ints(node, made) != largest or row_of(node.op).fusion is not Fusion.ELEMENTWISE:
        return Nest(loops)
    return Nest(loops, tuple(Access(value, _broadcast(ints(node, value), len(largest))) for value in node.inputs))


def _broadcast(shape: tuple[int, ...], rank: int) -> tuple[Index, ...]:
    """Dimensions aligned at the end; what has an extent of 1 is no loop's."""
    return tuple(((f"d{rank - len(shape) + dim}", 1),) if extent != 1 else () for dim, extent in enumerate(shape))
