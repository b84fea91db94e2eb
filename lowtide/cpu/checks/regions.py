"""Is a region's body one that kernels may be made of? Each node that they do is known, and has the results that torch's operator has.

    takes   a region of a graph in normal form, as `ir.check` looks at that
    leaves  nothing: a FormatError that names the operator, what was expected and what came

What follows from constants alone is torch's work, and is computed, not told: `runtime` compares what comes of it.
"""

from __future__ import annotations

from collections.abc import Collection
from math import prod

from lowtide.cpu.checks.shapes import check_generated
from lowtide.cpu.known import is_plain
from lowtide.errors import FormatError
from lowtide.ir.graph import Graph, Node, Value
from lowtide.ir.regions import Region

_MOST_ELEMENTS = 2**31


def check_region(region: Region) -> None:
    """Raises FormatError for a body that no kernels may be made of."""
    body, constants = region.body, set(region.constants)
    fixed = following(body, constants)
    for value in (*body.inputs, *body.outputs):
        if value not in constants and not _is_plain_block(value):
            raise FormatError(f"{region.name}: expected tensors of float32 on a CPU at the ends of generated kernels, got {value.name}")
    if any(value in fixed for value in body.outputs) or not body.outputs:
        raise FormatError(f"{region.name}: expected results that follow from the batch, got constants")
    for node in body.nodes:
        if node.inplace or node.after or node.writes or node.body is not None:
            raise FormatError(f"{node.op}: expected a node of a region without writes, order or body of its own")
        if not is_constant(node, fixed):
            check_generated(node, fixed)


def following(body: Graph, given: Collection[Value]) -> set[Value]:
    found = set(given)
    for node in body.nodes:
        if all(value in found for value in node.inputs):
            found.update(node.results)
    return found


def is_constant(node: Node, fixed: Collection[Value]) -> bool:
    """Whether a node follows from constants."""
    return all(value in fixed for value in node.inputs)


def _is_plain_block(value: Value) -> bool:
    """A tensor that kernels read, and of which each element lies at a place of its own, or is repeated whole."""
    return is_plain(value) and prod(int(size) for size in value.shape) < _MOST_ELEMENTS and _is_apart(value)


def _is_apart(value: Value) -> bool:
    reach = 1
    for step, size in sorted((int(step), int(size)) for step, size in zip(value.stride, value.shape, strict=True) if size != 1 and step):
        if step < reach:
            return False
        reach += (size - 1) * step
    return reach < _MOST_ELEMENTS
