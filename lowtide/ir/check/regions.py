"""Is a region right? What goes in and out is what its body takes and gives, which draws nothing, and writes nothing.

But for one by another compiler: that may write the caller's, as its node says, through one view of each.
"""

from __future__ import annotations

from lowtide.errors import CheckError
from lowtide.ir.check.verdict import NodeLocation, Verdict, refuse
from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.nodes import is_random
from lowtide.ir.regions import Region


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
    made = [value.storage for value in node.outputs if value is not None]
    if len(set(made)) != len(made) or set(made) & _given(node):
        refuse(Verdict.REGION_ENDS, f"{where}: results share memory")
    for inner_node in region.body.nodes:
        if is_random(inner_node) or inner_node.body is not None or (inner_node.writes and not region.by):
            refuse(Verdict.REGION_PURE, f"{where}: {inner_node.op}")
    _check_written(node, region, where)


def _check_written(node: Node, region: Region, where: NodeLocation) -> None:
    """What the body writes is what the node says, and seen by it in one way alone."""
    inner = {value: own for value, own in zip(node.args, region.body.inputs, strict=True) if isinstance(value, Value)}
    left = {after.storage: after.version for each in region.body.nodes for _, after in each.writes}
    said = {inner[before].storage: after.version for before, after in node.writes if before in inner}
    if said != left or len(said) != len(node.writes):
        refuse(Verdict.REGION_PURE, f"{where}: writes {sorted(storage.name for storage in left)}")
    for before, _ in node.writes:
        if sum(value.storage is before.storage for value in node.inputs) != 1:
            refuse(Verdict.REGION_PURE, f"{where}: {before.storage.name} is seen in two ways")


def _given(node: Node) -> set[object]:
    return {value.storage for value in node.inputs}
