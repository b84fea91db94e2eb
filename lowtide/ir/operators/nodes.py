"""The table of operators, one row each, and what a node does by its operator's row.

1. What an overload's row leaves out is said by the operator's.
2. The in-place form of x is x_, and what is not said of x_ is said of x.
3. Other operators of aten, arithmetic on numbers, copies to the host, loops and lowtide's own do nothing that a column knows of;
   of other people's operators it is not known whether they draw random numbers.
4. An operator whose name speaks of linear algebra may fail for some matrices.

A node draws random numbers, gives views, copies to the host, runs in parts, can be repeated. And it has a part in what the processes of a
group do together, and makes integers between bounds, or reads such without error.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace

from lowtide.errors import FormatError
from lowtide.ir.graph import Arg, Graph, Kind, Node, Storage, Value
from lowtide.ir.operators import elementwise, layers, lookups, own, products, views
from lowtide.ir.operators.axes import Axis
from lowtide.ir.operators.row import ARITHMETIC, DROP, LOAD, LOOP, REGION, SAVE, STORE, Bounds, Collective, Draws, Operator, below, up_to
from lowtide.ir.sizes import product

_FAMILIES = (elementwise, products, layers, lookups, views, own)
ROWS: dict[str, Operator] = {row.name: row for family in _FAMILIES for row in family.ROWS}

_OWN = ("aten", "py", "host", "fission", "fuse", "lowtide")
_NOTHING = {each.name: each.default for each in fields(Operator) if each.name != "name"}
# A library's operator and its overload, or arithmetic on Python numbers: nothing that Python could look up by such a name.
_OPERATOR = re.compile(r"(?!py\.|host\.|fission\.|fuse\.)[A-Za-z_]\w*(\.[A-Za-z_]\w*){2}|py\.[a-z_]+", re.ASCII)


@functools.cache
def row_of(op: str) -> Operator:
    """What is known of the operator of a node: "aten.add.Tensor"."""
    base, written = _base(op), functional_base(op)
    names = dict.fromkeys((op, f"{written}.{op.rpartition('.')[2]}", base, written))
    rows = [ROWS[name] for name in names if name in ROWS]
    unknown = Operator(name=base, draws=Draws.NEVER if op.split(".")[0] in _OWN else Draws.UNKNOWN)
    row = functools.reduce(_completed, rows) if rows else unknown
    name = base.rpartition(".")[2]
    factorises = "linalg" in name or "cholesky" in name or name.startswith(("lu_", "_lu_"))
    return replace(row, factorises=True) if factorises else row


def forms_of(op: str) -> Operator:
    """The row of this very overload, which names its other forms: one in place has none of these."""
    return ROWS.get(op) or Operator(name=op)


def _completed(row: Operator, by: Operator) -> Operator:
    """A row with what it leaves out as another one says."""
    return replace(row, **{name: getattr(by, name) for name, default in _NOTHING.items() if getattr(row, name) == default})


def functional_base(op: str) -> str:
    """The name of the operator that computes what `op` does and writes nothing, by torch's naming; its own where it is none in place.

    "aten.relu" of "aten.relu_.default", "aten.__or__" of "aten.__ior__.Tensor" and of "aten.__or__.Tensor".
    """
    namespace, _, name = _base(op).partition(".")
    if name.startswith("__") and name.endswith("__"):
        return f"{namespace}.__{name[3:]}" if name.startswith("__i") else f"{namespace}.{name}"
    return f"{namespace}.{name.removesuffix('_')}"


def writes_in_place(op: str) -> bool:
    """Whether an operator writes in place by torch's naming: "aten.relu_.default", "aten.__ior__.Tensor", but not "aten.__or__.Tensor"."""
    return functional_base(op) != _base(op)


def _base(op: str) -> str:
    """The operator's name without its overload: "aten.add"."""
    return ".".join(op.split(".")[:2])


def check_operators(graph: Graph) -> None:
    """Whether every operator of a graph has a name that an operator can have. Raises FormatError naming the node."""
    pending = [graph]
    while pending:
        for index, node in enumerate(pending.pop().nodes):
            for name in (node.op, *(overload for _, overload in node.inplace)):
                if not _OPERATOR.fullmatch(name) and name not in (STORE, SAVE, DROP, LOAD, LOOP, REGION):
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
    return node.op in (STORE, SAVE, DROP, LOAD)


def homes_of(graph: Graph) -> frozenset[Storage]:
    """What lies on the host before the step, or after it."""
    return frozenset(value.storage for value in (*graph.inputs, *graph.outputs) if value.storage.kind is Kind.HOST)


def offloaded_storages(graph: Graph) -> frozenset[Storage]:
    """What is offloaded, state that the caller lends: the inputs of the caller's that are stored on the host.

    Such a storage lives from the start to its drop, and what the last load makes of it is kept: that is the caller's again.
    """
    given = {value.storage for value in graph.inputs}
    return frozenset(value.storage for node in graph.nodes if node.op == STORE for value in node.inputs if value.storage in given)


def is_view(node: Node) -> bool:
    """Whether a node only looks at the storages of its inputs in other ways: it makes no bytes and writes none."""
    if node.writes:
        return False
    given, exists = [value.storage for value in node.inputs], False
    for value in node.outputs:  # in a loop, as planning asks it of each node many times
        if value is not None:
            if value.dtype == "scalar" or value.storage not in given:
                return False
            exists = True
    return exists


def repeatable(node: Node) -> Node | None:
    """A node that computes the same results once more and does nothing else; None where there is none.

    An operator that is random, that writes, that copies to the host or back or that is a collective cannot be repeated, but for loads of
    what ranks hold parts of; batch normalisation can, without the update of its statistics, unless it is these that make it compute in
    full precision.
    """
    once = row_of(node.op).once or is_random(node) or is_transfer(node) or (is_collective(node) and not loads_parts(node))
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
    return () if rule is None or node.body is not None or is_random(node) or not node.results else tuple(rule(node))


def is_collective(node: Node) -> bool:
    """Whether a node begins or ends what the processes of a group do together: once, and in one order on all of them."""
    return row_of(node.op).collective is not Collective.NONE


def begins_collective(node: Node) -> bool:
    """Whether a node begins it: what it makes is whole, and may be read, only behind the node that ends it."""
    return row_of(node.op).collective is Collective.BEGINS


def loads_parts(node: Node) -> bool:
    """Whether a node makes whole what the processes hold parts of, from begin to end: as good a second time."""
    return row_of(node.op).collective is Collective.LOADS


def serving_collectives(nodes: Sequence[Node]) -> Iterator[int]:
    """By index: collectives, what is done to a gradient for one (scaled, put together, filled up), and parts cut out of what came of it,
    or summed.

    Each lets go at least as much as it makes, as soon as it has run: early, as an update is that makes nothing. Not so loads.
    """
    makers: dict[Value, int] = {value: index for index, node in enumerate(nodes) for value in node.results}
    stack = [index for index, node in enumerate(nodes) if (is_collective(node) and not loads_parts(node)) or node.op in _PARTS]
    seen = set(stack)
    while stack:
        before = {makers[value] for value in nodes[stack.pop()].inputs if value in makers}
        preparing = {index for index in before - seen if nodes[index].op in _PREPARING or row_of(nodes[index].op).view}
        seen |= preparing
        stack.extend(preparing)
    yield from sorted(seen)


_PARTS = frozenset({"lowtide.own_part.default", "lowtide.sum_parts.default"})
_PREPARING = frozenset({"aten.mul.Scalar", "aten.mul.Tensor", "aten.cat.default", "aten.constant_pad_nd.default"})


HOLDS: dict[str, Bounds] = {
    "bool": (0, 1), "uint8": (0, 2**8 - 1), "int8": (-(2**7), 2**7 - 1), "int16": (-(2**15), 2**15 - 1), "int32": (-(2**31), 2**31 - 1),
}  # fmt: skip
CONVERTS = "aten._to_copy.default"


def made_within(node: Node, value: Value) -> Bounds | None:
    """The bounds of an integer result by the operator that makes it; None where that says nothing."""
    given, row = node.args[0] if node.args else None, row_of(node.op)
    if not isinstance(given, Value):
        return None
    if node.op == CONVERTS:
        return HOLDS.get(given.dtype)
    if row.planes:
        return up_to(product(given.shape[-row.planes :]))
    if row.indices is None or node.outputs[row.indices.result] is not value:
        return None
    position, default = row.indices.dimension, row.indices.default
    dimension = dict(node.kwargs).get("dim", node.args[position] if position < len(node.args) else default)
    return below(given, dimension) if isinstance(dimension, int) else up_to(product(given.shape))


def refused_beyond(node: Node, value: Value) -> Bounds | None:
    """The bounds outside of which a node that reads integers raises; None where it takes all."""
    rule = row_of(node.op).refuses
    return None if rule is None else rule(node, value)
