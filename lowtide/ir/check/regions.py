"""Is a region right? What goes in and out is what its body takes and gives, which writes nothing and draws nothing."""

from __future__ import annotations

from lowtide.errors import CheckError
from lowtide.ir.check.verdict import Verdict, Where, refuse
from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.nodes import is_random
from lowtide.ir.regions import Region


def check_region(node: Node, where: Where) -> None:
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
    if len({value.storage for value in node.results}) != len(node.results) or {value.storage for value in node.results} & _given(node):
        refuse(Verdict.REGION_ENDS, f"{where}: results share memory")
    for inner_node in region.body.nodes:
        if inner_node.writes or is_random(inner_node) or inner_node.body is not None:
            refuse(Verdict.REGION_PURE, f"{where}: {inner_node.op}")


def _given(node: Node) -> set[object]:
    return {value.storage for value in node.inputs}
