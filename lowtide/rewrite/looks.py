"""New tensors made of sizes, in place of one whose looks they were to have.

    flags = empty_like(probabilities)       flags = empty((2, 12, 256, 256), dtype=float32)

`empty_like` and its kin ask a tensor for its size alone, but have to wait for it all the same. So the random numbers of a dropout come
after what they are applied to, and no loop over parts can hold both sides of it. Of sizes, the tensor can be made at any time. Exact.
"""

from __future__ import annotations

from dataclasses import replace

from lowtide.ir.graph import Arg, Atom, Graph, Node, Value
from lowtide.ir.sizes import contiguous_stride
from lowtide.rewrite.base import Rewritten, replace_nodes

_OF_SIZES = {
    "aten.empty_like.default": "aten.empty.memory_format",
    "aten.zeros_like.default": "aten.zeros.default",
    "aten.ones_like.default": "aten.ones.default",
    "aten.full_like.default": "aten.full.default",
}


def make_of_sizes(graph: Graph) -> Rewritten:
    """Every such tensor that lies in memory row by row, as one that is made of sizes does."""
    return replace_nodes(graph, {node: (_of_sizes(node, node.outputs[0]),) for node in graph.nodes if _is_plain(node)})


def _is_plain(node: Node) -> bool:
    made = node.outputs[0] if node.op in _OF_SIZES else None
    return made is not None and made.stride == contiguous_stride(made.shape) and "pin_memory" not in _asked(node)


def _asked(node: Node) -> dict[str, Arg]:
    """Keywords that ask for more than what the result shows."""
    return {
        name: arg for name, arg in node.kwargs if name not in ("dtype", "device", "layout", "memory_format") and arg not in (None, False)
    }


def _of_sizes(node: Node, made: Value | None) -> Node:
    assert made is not None
    kwargs = (("dtype", Atom("dtype", made.dtype)), ("device", Atom("device", made.storage.device)))
    return replace(node, op=_OF_SIZES[node.op], args=(tuple(made.shape), *node.args[1:]), kwargs=kwargs, inplace=())
