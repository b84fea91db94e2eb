"""lowtide's own operators, as they are composed of torch's where no kernel of their own does it; and what processes do together.

Masks as bits are packed in blocks of the memory's order. A mask can be cut between blocks alone: along the first dimension, in units that
hold whole blocks, where elements lie as they count.

Rows of what processes do together: sums, broadcasts and gathers over a group, by torch's functional collectives.

One that begins (`all_reduce`) is given a tensor and the group's name, and goes on beside what follows; what it makes may be touched by
nobody but the `wait_tensor` that ends it, which hands the same memory on. One that works into memory apart from what it is given reads that
until it ends: it is ended by lowtide's own `wait_for`, which is given both.

What ranks hold parts of is loaded, as from a host: whole at once, and again where that is cheaper than to hold it. A plan's loads are begun
apart only once their places are known.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import gcd, prod

from lowtide.ir.graph import Node, Value
from lowtide.ir.operators.axes import Axis
from lowtide.ir.operators.layers import likelihood_backward
from lowtide.ir.operators.lookups import rows_added
from lowtide.ir.operators.row import Collective, Count, Operator, bytes_of, ints, read_bytes
from lowtide.ir.sizes import contiguous_stride, product

NAMESPACE = "_c10d_functional"
SUM, WAIT = f"{NAMESPACE}.all_reduce.default", f"{NAMESPACE}.wait_tensor.default"
WAIT_APART = "lowtide.wait_for.default"
GATHER, SCATTER = "lowtide.all_gather.default", f"{NAMESPACE}.reduce_scatter_tensor.default"
READING = frozenset({GATHER, SCATTER, "lowtide.exchange.default"})  # those that read what they are given until they end

_IN_PLACE = ("all_reduce", "broadcast")
_APART = (f"{NAMESPACE}.reduce_scatter_tensor", f"{NAMESPACE}.all_gather_into_tensor", "lowtide.all_gather", "lowtide.exchange")

_COLLECTIVES = (
    *(
        Operator(name=f"{NAMESPACE}.{name}", collective=Collective.BEGINS, in_memory_of=f"{NAMESPACE}.{name}_.default")
        for name in _IN_PLACE
    ),
    *(Operator(name=name, collective=Collective.BEGINS) for name in _APART),
    Operator(name=f"{NAMESPACE}.wait_tensor", collective=Collective.ENDS, in_memory_of=WAIT),
    Operator(name="lowtide.load_parts", collective=Collective.LOADS),
    Operator(name="lowtide.wait_for", collective=Collective.ENDS, in_memory_of=WAIT_APART),
)


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


def with_flags(passes: int, *, numbers: bool = False) -> Count:
    """What is read and written, and a byte for each element as often as flags go through memory; `numbers`: and factors made of them."""
    return lambda node: read_bytes(node, ()) + bytes_of(node.results) * (3 if numbers else 1) + passes * _elements(node)


def with_indices(position: int, passes: int) -> Count:
    """What is read and written, and as often eight bytes for each element of an argument."""
    return lambda node: read_bytes(node, ()) + bytes_of(node.results) + 8 * passes * prod(ints(node, node.args[position]))


def _elements(node: Node) -> int:
    """Of the largest tensor that a node reads or makes."""
    return max(prod(ints(node, value)) for value in (*node.inputs, *node.results))


def _with_sums(node: Node) -> int:
    """What is read, and results that are gone over three times."""
    return read_bytes(node, ()) + 3 * bytes_of(node.results)


ROWS = (
    *_COLLECTIVES,
    Operator(name="lowtide.pack_bits", axes=packed, launches=5, moved_bytes=with_flags(6)),
    Operator(name="lowtide.pack_positive", axes=packed, launches=6, moved_bytes=with_flags(7)),
    Operator(name="lowtide.unpack_bits", launches=3, moved_bytes=with_flags(4)),
    Operator(name="lowtide.masked", axes=masked, launches=3, moved_bytes=with_flags(4)),
    Operator(name="lowtide.masked_mul", axes=masked, launches=4, moved_bytes=with_flags(4, numbers=True)),
    Operator(name="lowtide.add_rows", axes=rows_added, moved_bytes=lambda node: read_bytes(node, ()) + bytes_of(node.results)),
    Operator(name="lowtide.own_part", moved_bytes=lambda node: 2 * bytes_of(node.results)),
    Operator(name="lowtide.pool_places", launches=2, moved_bytes=with_indices(0, 2)),
    Operator(name="lowtide.max_pool2d_backward", launches=3, moved_bytes=with_indices(1, 3)),
    Operator(name="lowtide.cross_entropy_backward", axes=likelihood_backward, launches=2, moved_bytes=_with_sums),
    Operator(name="lowtide.layer_norm_backward", launches=2, moved_bytes=_with_sums),
)
