"""Whether a graph that came from a file may be run: the graph is data, and what runs is generated from it.

takes   a graph that a text said, and the order of its nodes
leaves  nothing: a FormatError where it breaks a rule

1. It is a right graph, in a right order, of numbers and tensors on a CPU, that writes nothing.
2. Torch runs operators of which it is known that they only compute (`operators`), kernels are generated for what they are known for, and by
   shapes that follow from what the region is given (`cpu.checks`).
3. What a region takes for constant are stored tensors.

What torch makes between regions is compared with the graph when the function is loaded (`lower.interpreter`).
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from lowtide.api.saved.operators import check_call, check_value, check_view
from lowtide.cpu.checks.regions import check_region, following, is_constant
from lowtide.errors import CheckError, FormatError
from lowtide.ir.check.graph_check import check_graph, check_order
from lowtide.ir.graph import Graph, Node, Value
from lowtide.ir.operators.nodes import check_operators, is_view
from lowtide.ir.regions import Region, is_by_inductor, is_region


def check(graph: Graph, order: Sequence[int], stored: Collection[Value]) -> None:
    """Raises FormatError. `stored` are the inputs whose tensors the file has."""
    check_operators(graph)
    try:
        check_graph(graph)
        check_order(graph, order)
        regions = [Region.of(node) for node in graph.nodes if is_region(node)]
    except CheckError as error:
        raise FormatError(f"expected a right graph: {error}") from error
    if graph.dimensions or any(not value.storage.kind.caller_owned for value in graph.inputs):
        raise FormatError("expected a graph of tensors of one shape each that the caller gives or the file has")
    for node in graph.nodes:
        _check_node(node, stored)
    for region in regions:
        _check_constants(region)


def _check_node(node: Node, stored: Collection[Value]) -> None:
    if node.writes:
        raise FormatError(f"{node.op}: expected a node that writes nothing")
    for value in (*node.inputs, *node.results):
        check_value(value)
    if not is_region(node):
        if node.body is not None:
            raise FormatError(f"{node.op}: expected a node without a body")
        check_call(node)
        return
    region = Region.of(node)
    if is_by_inductor(node) or any(node.args[at] not in stored for at in region.fixed):
        raise FormatError(f"{region.name}: expected a region of generated kernels, whose constants are stored tensors")
    for inner in region.body.nodes:
        for value in (*inner.inputs, *inner.results):
            check_value(value)
    check_region(region)
    for inner in region.body.nodes:
        if is_view(inner):
            check_view(inner)


def _check_constants(region: Region) -> None:
    """What prepares constants is run by torch, too."""
    fixed = following(region.body, region.constants)
    for node in region.body.nodes:
        if is_constant(node, fixed):
            check_call(node)
