"""A gradient of looked-up rows added straight to what it would be added to.

The gradient of an embedding is as large as its table, and zero but for the rows that were looked up. Where the table serves twice, as that
of words does at both ends of a language model, it is made only to be added to the other gradient:

    rows = embedding_dense_backward(gradient, indices, 50257, -1, False)        numbers = arange(50257)
    total = add(other, rows)                                                    total = add_rows(other, numbers, indices, gradient)

which may work in the other's memory, and with some of the numbers does so for these rows of it: so that neither gradient is ever whole.
The rows of one word are then added one by one to what is there, not first to one another: not exact.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lowtide.ir.graph import Atom, Graph, Kind, Node, Storage, Value
from lowtide.ir.sizes import ITEM_BYTES, contiguous_stride, product
from lowtide.rewrite.base import Rewritten, replace_nodes

ROWS, _ADD = "aten.embedding_dense_backward.default", "aten.add.Tensor"


def add_into_sums(graph: Graph) -> Rewritten:
    """Every such sum of two gradients whose rows nobody else reads."""
    makers = {value: node for node in graph.nodes for value in node.outputs if value is not None and node.op == ROWS}
    readers: dict[Value, int] = dict.fromkeys(graph.outputs, 2)
    for node in graph.nodes:
        readers |= {value: readers.get(value, 0) + 1 for value in node.inputs if value in makers}
    instead: dict[Node, tuple[Node, ...]] = {}
    for node in graph.nodes:
        for place in (0, 1) if node.op == _ADD and not node.kwargs and len(node.args) == 2 else ():
            rows, other = node.args[place], node.args[1 - place]
            if isinstance(rows, Value) and isinstance(other, Value) and readers.get(rows) == 1 and _fits(makers, rows, other):
                instead |= {makers[rows]: (), node: _added(makers[rows], node, other)}
                break
    return replace_nodes(graph, instead)


def _fits(makers: Mapping[Value, Node], rows: Value, other: Value) -> bool:
    maker = makers.get(rows)
    if (
        maker is None
        or rows is other
        or not isinstance(rows.shape[0], int)
        or (rows.dtype, rows.shape, rows.stride) != (other.dtype, other.shape, other.stride)
    ):
        return False
    return can_add_rows(maker) and not maker.after


def can_add_rows(maker: Node) -> bool:
    """Whether the rows that a gradient of an embedding is made of can be added one by one: all count, as they are."""
    gradient, indices, _, padding, scaled = maker.args
    if not isinstance(gradient, Value) or not isinstance(indices, Value) or not isinstance(padding, int):
        return False
    dense = all(value.stride == contiguous_stride(value.shape) for value in (gradient, indices))
    return dense and padding < 0 and not scaled and not maker.kwargs


def rows_of(maker: Node, name: str) -> tuple[Node, Node]:
    """The views of a gradient's rows, and of the numbers of the rows of the table that they belong to."""
    gradient, indices = maker.args[:2]
    assert isinstance(gradient, Value)
    assert isinstance(indices, Value)
    count, width = product(indices.shape), gradient.shape[-1]
    flat = replace(indices, name=f"{name}_indices", shape=(count,), stride=(1,))
    rows = replace(gradient, name=f"{name}_rows", shape=(count, width), stride=(width, 1))
    return (
        Node("aten.view.default", (indices, (count,)), (flat,), source=maker.source),
        Node("aten.view.default", (gradient, (count, width)), (rows,), source=maker.source),
    )


def _added(maker: Node, node: Node, other: Value) -> tuple[Node, ...]:
    """The nodes that add the gradient's rows to the other gradient."""
    name = node.results[0].name
    views, numbers = rows_of(maker, name), _numbers(other, name)
    args = (other, numbers.outputs[0], *(view.outputs[0] for view in views))
    return numbers, *views, replace(node, op="lowtide.add_rows.default", args=args, inplace=((other, "lowtide.add_rows_.default"),))


def _numbers(table: Value, name: str) -> Node:
    """What makes the numbers of a table's rows, one after another."""
    count = table.shape[0]
    assert isinstance(count, int)
    dtype = "int32" if count <= 2**31 else "int64"
    storage = Storage(f"{name}_numbers", count * ITEM_BYTES[dtype], table.storage.device, Kind.ACTIVATION)
    looks = (("dtype", Atom("dtype", dtype)), ("device", Atom("device", storage.device)))
    return Node("aten.arange.default", (count,), (Value(storage.name, storage, dtype, (count,), (1,)),), looks)
