"""Are nodes with bodies right, loops over parts and regions? A check that shares no code with what writes or runs them.

What a loop is given and what it makes is what the body takes, part by part. Each part finds what the caller had, not what other parts have
left: a result is written by one node and read by none but the one that adds to it, and what the loop writes of the caller's is cut, and
touched in no other way. Nothing is computed more than once (MAGIS, section 4.2): every node but views makes something that differs from
part to part. That a set is convex shows in the graph around it, where the loop is one node.

What goes in and out of a region is what its body takes and gives, which draws nothing, and writes nothing. But for one by another compiler:
that may write the caller's, as its node says, through one view of each.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterator

import sympy

from lowtide.errors import CheckError, of_kind
from lowtide.ir.bodies import Region
from lowtide.ir.check.verdict import NodeLocation, Verdict, refuse
from lowtide.ir.graph import Graph, Kind, Node, Storage, Value
from lowtide.ir.operators.nodes import is_arithmetic, is_random, is_transfer, is_view, row_of
from lowtide.ir.operators.row import LOOP
from lowtide.ir.sizes import Size

# How results are put together, and the operators that do so: those that read what parts before have left.
_PUT_TOGETHER = {
    "sum": ("aten.add_.Tensor", "aten.addmm_.default", "aten.baddbmm_.default", "aten.index_add_.default"),
    "product": ("aten.mul_.Tensor",),
    "max": ("aten.maximum.out",), "min": ("aten.minimum.out",), "any": ("aten.logical_or_.default",),
    "all": ("aten.logical_and_.default",), "same": ("aten.copy_.default",),
}  # fmt: skip


_READ_WHAT_IS_THERE = tuple(op for how, ops in _PUT_TOGETHER.items() for op in ops if how != "same")


def check_loop(node: Node, where: NodeLocation) -> None:
    """Whether a node of `fission.loop` with a body that is a right graph is a right loop. Raises CheckError: verdict, node, source line."""
    options, body = dict(node.kwargs), node.body
    along, into, extent, part = (options.get(name) for name in ("along", "into", "extent", "part"))
    if body is None or len(options) != 4 or not isinstance(along, tuple) or not isinstance(into, tuple) or not isinstance(part, int):
        refuse(Verdict.LOOP_FORM, where)
    if not isinstance(extent, (int, sympy.Expr)) or len(body.dimensions) != 1 or None in node.outputs:
        refuse(Verdict.LOOP_FORM, where)
    dimension = body.dimensions[0]
    if dimension.least != 1 or dimension.most != part or (isinstance(extent, int) and part > extent):
        refuse(Verdict.LOOP_FORM, f"{where}: parts of {part}, {dimension}, of {extent}")
    if len(node.args) != len(along) or len(node.outputs) != len(into) or len(body.inputs) != len(along) + len(into):
        refuse(Verdict.LOOP_ENDS, f"{where}: {len(node.args)} arguments, {len(node.outputs)} results, {len(body.inputs)} in the body")
    whole = [*node.args, *node.outputs]
    for value, inner, dim in zip(whole, body.inputs, (*along, *into), strict=True):
        value = of_kind(Value, value)
        _check_end(value, inner, dim if isinstance(dim, int) else None, extent, dimension.symbol, where)
    _check_results(body.inputs[len(along) :], into, body, where)
    _check_written(node, body, along, where)
    _check_taken(node, body, (along, into), where)
    _check_once(body, set(_cut(body, (*along, *into))), dimension.name, where)


def _cut(body: Graph, dims: tuple[object, ...]) -> Iterator[Value]:
    return (value for value, dim in zip(body.inputs, dims, strict=True) if isinstance(dim, int) and not isinstance(dim, bool))


def _check_end(value: Value, inner: Value, dim: int | None, extent: Size, part: sympy.Expr, where: NodeLocation) -> None:
    """What the body takes looks like a part of what there is: as long, along the dimension that is cut, as its share."""
    wanted = list(value.shape)
    if dim is not None:
        if not 0 <= dim < len(wanted):
            refuse(Verdict.LOOP_ENDS, f"{where}: {value.name} has no dimension {dim}")
        share = sympy.cancel(sympy.sympify(wanted[dim]) / sympy.sympify(extent))
        if sympy.denom(share) != 1:
            refuse(Verdict.LOOP_ENDS, f"{where}: {value.name} is {wanted[dim]} long, which is no multiple of {extent}")
        wanted[dim] = share * part
    same = len(wanted) == len(inner.shape) and all(sympy.sympify(a) == sympy.sympify(b) for a, b in zip(wanted, inner.shape, strict=True))
    if not same or (value.dtype, value.stride, value.storage.device) != (inner.dtype, inner.stride, inner.storage.device):
        refuse(Verdict.LOOP_ENDS, f"{where}: {value.name} is {inner.name} in the body")
    if inner.storage.kind is not (Kind.SCALAR if value.dtype == "scalar" else Kind.ARGUMENT):
        refuse(Verdict.LOOP_ENDS, f"{where}: {inner.name} is {inner.storage.kind.value} in the body")


def _check_results(results: tuple[Value, ...], into: tuple[object, ...], body: Graph, where: NodeLocation) -> None:
    """Every result is written, once, and read by nothing but what puts it together."""
    for result, how in zip(results, into, strict=True):
        writers = [node for node in body.nodes if any(before.storage is result.storage for before, _ in node.writes)]
        if len(writers) != 1 or writers[0].writes[0][0] is not result:
            refuse(Verdict.LOOP_RESULT, f"{where}: {result.name}, by {len(writers)} nodes")
        writer = writers[0]
        if isinstance(how, str) and writer.op not in _PUT_TOGETHER.get(how, ()):
            refuse(Verdict.LOOP_RESULT, f"{where}: {result.name} is {how!r} by {writer.op}")
        if not isinstance(how, str) and writer.op in _READ_WHAT_IS_THERE:
            refuse(Verdict.LOOP_RESULT, f"{where}: {result.name} lies part by part, by {writer.op}")
        if any(value.storage is result.storage for node in body.nodes if node is not writer for value in node.inputs):
            refuse(Verdict.LOOP_RESULT, f"{where}: {result.name} is read by another")


def _check_written(node: Node, body: Graph, along: tuple[object, ...], where: NodeLocation) -> None:
    """What is written of the caller's is cut, all of it alike, and left at the version that the loop says."""
    inner = dict(zip(node.args, body.inputs, strict=False))
    written: dict[Storage, Value] = {}
    steps: dict[Storage, int] = {}
    results = {value.storage for value in body.inputs[len(along) :]}
    for before, _ in ((before, after) for each in body.nodes for before, after in each.writes):
        if before.storage not in results:
            written.setdefault(before.storage, before)
            steps[before.storage] = steps.get(before.storage, 0) + 1
    cut = {value: dim for value, dim in zip(body.inputs, along, strict=False) if isinstance(dim, int)}
    versions = {inner[before].storage: after.version - before.version for before, after in node.writes if before in inner}
    if versions != steps or len(versions) != len(node.writes):
        refuse(Verdict.LOOP_WRITES, f"{where}: {sorted(storage.name for storage in steps)}")
    layouts = {value.storage: layout(value) for value in cut if value.storage in written}
    if layouts.keys() != written.keys():
        refuse(Verdict.LOOP_SHARES, where)
    touched = (value for each in body.nodes for value in (*each.inputs, *each.results, *(before for before, _ in each.writes)))
    for value in (*body.inputs, *touched):
        if value.storage in layouts and layout(value) != layouts[value.storage]:
            refuse(Verdict.LOOP_SHARES, f"{where}: {value.name}")
        if value.storage in layouts and any(stride == 0 and size != 1 for size, stride in zip(value.shape, value.stride, strict=True)):
            refuse(Verdict.LOOP_SHARES, f"{where}: {value.name} holds an element several times")


def _check_taken(node: Node, body: Graph, dims: tuple[tuple[object, ...], tuple[object, ...]], where: NodeLocation) -> None:
    """What a loop may leave its first result in is cut as that is, lies so, and is read no more once a part of the result is there."""
    along, into = dims
    for taken, op in node.inplace:
        here = f"{where}: {taken.name}"
        if op != LOOP or taken not in node.args or not node.outputs:
            refuse(Verdict.LOOP_TAKES, here)
        index, result = node.args.index(taken), node.outputs[0]
        if result is None or not isinstance(into[0], int) or along[index] != into[0] or layout(taken) != layout(result):
            refuse(Verdict.LOOP_TAKES, here)
        if taken.storage.nbytes != result.storage.nbytes or [value.storage for value in node.inputs].count(taken.storage) != 1:
            refuse(Verdict.LOOP_TAKES, here)
        place, part = body.inputs[len(along)].storage, body.inputs[index].storage
        since = next(at for at, each in enumerate(body.nodes) if any(before.storage is place for before, _ in each.writes))
        over = {value for value, _ in body.nodes[since].inplace}
        late = {value for value in body.nodes[since].inputs if value not in over}
        late.update(value for each in body.nodes[since + 1 :] for value in each.inputs)
        if any(value.storage is part for value in late):
            refuse(Verdict.LOOP_TAKES, here)


def layout(value: Value) -> tuple[Hashable, ...]:
    return value.dtype, value.shape, value.stride, value.offset


def _check_once(body: Graph, differing: set[Value], part: str, where: NodeLocation) -> None:
    """Every node but views reads, or makes, what differs from part to part; and nothing in it is for once alone."""
    for index, node in enumerate(body.nodes):
        here = NodeLocation(index, node, f", in the body of {where}")
        if is_random(node) or is_transfer(node) or is_arithmetic(node) or row_of(node.op).statistics is not None:
            refuse(Verdict.LOOP_ONCE, here)
        sized = any(isinstance(size, sympy.Expr) and part in map(str, size.free_symbols) for value in node.results for size in value.shape)
        if sized or any(value in differing for value in node.inputs):
            differing.update(node.results)
        elif not is_view(node):
            refuse(Verdict.LOOP_AGAIN, here)


def check_region(node: Node, where: NodeLocation) -> None:
    """Whether a node of `fuse.region` with a body that is a right graph is a right region. Raises CheckError."""
    try:
        region = Region.of(node)
    except CheckError as error:
        refuse(Verdict.REGION_FORM, f"{where}: {error}")
    outside, inside = (*node.args, *node.outputs), (*region.body.inputs, *region.body.outputs)
    if len(node.args) != len(region.body.inputs) or len(outside) != len(inside):
        refuse(Verdict.REGION_ENDS, where)
    for value, inner in zip(outside, inside, strict=True):
        if not isinstance(value, Value) or (value.dtype, value.shape, value.stride) != (inner.dtype, inner.shape, inner.stride):
            refuse(Verdict.REGION_ENDS, f"{where}: {inner.name}")
    storages = [value.storage for value in node.outputs if value is not None]
    if len(set(storages)) != len(storages) or set(storages) & {value.storage for value in node.inputs}:
        refuse(Verdict.REGION_ENDS, f"{where}: results share memory")
    for inner_node in region.body.nodes:
        if is_random(inner_node) or inner_node.body is not None or (inner_node.writes and not region.by):
            refuse(Verdict.REGION_PURE, f"{where}: {inner_node.op}")
    _check_region_writes(node, region, where)


def _check_region_writes(node: Node, region: Region, where: NodeLocation) -> None:
    """What the body writes is what the node says, and seen by it in one way alone."""
    inner = {value: own for value, own in zip(node.args, region.body.inputs, strict=True) if isinstance(value, Value)}
    left = {after.storage: after.version for each in region.body.nodes for _, after in each.writes}
    versions = {inner[before].storage: after.version for before, after in node.writes if before in inner}
    if versions != left or len(versions) != len(node.writes):
        refuse(Verdict.REGION_PURE, f"{where}: writes {sorted(storage.name for storage in left)}")
    for before, _ in node.writes:
        if sum(value.storage is before.storage for value in node.inputs) != 1:
            refuse(Verdict.REGION_PURE, f"{where}: {before.storage.name} is seen in two ways")
