"""Rules of lowtide's own operators: masks as bits, which are packed in blocks of the memory's order.

A mask can be cut between blocks alone: along the first dimension, in units that hold whole blocks, where elements lie as they count.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd

from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.axes.axis import Axis
from lowtide.ir.operators.axes.builders import Rule
from lowtide.ir.sizes import contiguous_stride, product

_BLOCK = 2**16  # elements, as kernels pack them


def masked(node: Node) -> Iterator[Axis]:
    """x, bits, ...: what x is where its flags are set."""
    given, bits = node.args[0], node.args[1]
    units = _units(given) if isinstance(bits, Value) and not node.kwargs else 1
    if units > 1:
        yield Axis(units, (((0,), 0), ((1,), 0)), tuple(0 for _ in node.results))


def packed(node: Node) -> Iterator[Axis]:
    """x: its flags."""
    units = _units(node.args[0])
    if units > 1:
        yield Axis(units, (((0,), 0),), tuple(0 for _ in node.results))


def _units(given: object) -> int:
    """Into how many parts of whole blocks a tensor can be cut along its first dimension."""
    if not isinstance(given, Value) or not given.shape or given.stride != contiguous_stride(given.shape):
        return 1
    elements, first = product(given.shape), given.shape[0]
    if not isinstance(elements, int) or not isinstance(first, int) or elements % _BLOCK:
        return 1
    return gcd(first, elements // _BLOCK)


RULES: dict[str, Rule] = {
    "lowtide.masked": masked,
    "lowtide.masked_mul": masked,
    "lowtide.pack_bits": packed,
    "lowtide.pack_positive": packed,
}
