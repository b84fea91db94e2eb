"""Splitting an operator that computes several independent results into one node for each.

A convolution's backward pass gives the gradient of its input, on which the rest of the backward pass waits, and the gradient of its
weight, which only the optimizer needs. Apart, the second can wait until the activations of earlier layers are gone: the
peak of small batches falls by up to the largest weight. Backends compute the two by separate kernels (bias and weight by one), so
that the split costs one more call and changes no bit. The table of `ir.operators` says which operators can be taken apart so.
"""

from __future__ import annotations

from dataclasses import replace

from lowtide.ir.graph import Arg, Graph, Node
from lowtide.ir.operators.table import row_of
from lowtide.rewrite.base import Rewritten, replace_nodes


def split_results(graph: Graph) -> Rewritten:
    """Every operator of the table that makes results of more than one group becomes a node for each group."""
    return replace_nodes(graph, {node: pieces for node in graph.nodes if len(pieces := _pieces(node)) > 1})


def _pieces(node: Node) -> tuple[Node, ...]:
    """The nodes that `node` can be split into; itself alone if it cannot."""
    split = row_of(node.op).split
    if split is None:
        return (node,)
    mask = node.args[split.mask]
    wanted = [group for group in split.groups if isinstance(mask, tuple) and any(mask[index] for index in group)]
    return tuple(_piece(node, split.mask, mask, group) for group in wanted) if len(wanted) > 1 else (node,)


def _piece(node: Node, position: int, mask: Arg, group: tuple[int, ...]) -> Node:
    assert isinstance(mask, tuple)
    chosen = tuple(bool(flag) and index in group for index, flag in enumerate(mask))
    args = (*node.args[:position], chosen, *node.args[position + 1 :])
    outputs = tuple(output if index in group else None for index, output in enumerate(node.outputs))
    return replace(node, args=args, outputs=outputs)
