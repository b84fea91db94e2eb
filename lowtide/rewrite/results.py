"""Letting a backward operator read what its forward operator made instead of what that had read.

The gradient of a clamp needs to know where the input was inside, and the output says so as well: it is at a bound exactly where the
input was not inside. So the input, or the copy of it that autograd keeps when the clamp works in place, need not live until the backward
pass; the output usually does so anyway, for the operator after it. The bits are the same, as long as both operators mean the same
bound: in half precision the forward kernel rounds it to the tensor's dtype, and the backward kernel compares in float32. A bound
that the dtype does not hold is therefore left alone.

Splitting an operator that computes several independent results into one node for each. A convolution's backward pass gives the gradient of
its input, on which the rest of the backward pass waits, and the gradient of its weight, which only the optimizer needs. Apart, the second
can wait until the activations of earlier layers are gone: the peak of small batches falls by up to the largest weight. Backends compute the
two by separate kernels (bias and weight by one), so that the split costs one more call and changes no bit. The table of `ir.operators` says
which operators can be taken apart so.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping
from dataclasses import replace
from typing import TypeAlias

from lowtide.errors import of_kind
from lowtide.ir.graph import Arg, Graph, Node, Value
from lowtide.ir.operators.nodes import ROWS, row_of
from lowtide.ir.operators.row import CLONE
from lowtide.rewrite.base import Rewritten, layout, replace_nodes


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
    chosen = tuple(bool(flag) and index in group for index, flag in enumerate(of_kind(tuple, mask)))
    args = (*node.args[:position], chosen, *node.args[position + 1 :])
    outputs = tuple(output if index in group else None for index, output in enumerate(node.outputs))
    return replace(node, args=args, outputs=outputs)


Makers: TypeAlias = Mapping[Value, Node]


# The rules of the table, by the forward operator.
_RULES = {row.reads_result.forward: row.reads_result for row in ROWS.values() if row.reads_result is not None}


def read_results(graph: Graph) -> Rewritten:
    """Every backward operator of the table reads its forward operator's output, and copies that nobody reads any more are gone."""
    makers = {value: node for node in graph.nodes for value in node.outputs if value is not None}
    outputs = {_key(node): node.outputs[0] for node in graph.nodes if node.op in _RULES}
    instead = {node: (_reading(node, result),) for node in graph.nodes if (result := _result(node, makers, outputs)) is not None}
    unread = _unread_copies(graph, instead, makers)
    return replace_nodes(graph, instead | dict.fromkeys(unread, ()))


def _result(node: Node, makers: Makers, outputs: Mapping[tuple[object, ...], Value | None]) -> Value | None:
    """What the backward operator `node` can read instead of its input; None where it is none, or there is nothing."""
    rule, saved = row_of(node.op).reads_result, node.args[1] if len(node.args) > 1 else None
    if rule is None or not isinstance(saved, Value):
        return None
    parameters = node.args[2 : 2 + len(rule.defaults)]
    slope = None if rule.rising is None else parameters[rule.rising]
    if rule.rising is not None and not (isinstance(slope, (int, float)) and slope > 0):
        return None
    if rule.bounds and not all(_holds(saved.dtype, bound) for bound in parameters):
        return None
    result = outputs.get((rule.forward, _copied(saved, makers), *parameters))
    return result if result is not None and layout(result) == layout(saved) else None


def _holds(dtype: str, number: Arg) -> bool:
    """Whether forward and backward kernel round `number` alike for tensors of `dtype`: always in full precision."""
    if not isinstance(number, (int, float)) or dtype not in ("float16", "bfloat16"):
        return dtype in ("float32", "float64")
    try:
        if dtype == "float16":
            return bool(struct.unpack("e", struct.pack("e", number))[0] == number)
        packed = struct.pack(">f", number)
    except OverflowError:
        return False
    return bool(packed[2:] == b"\0\0" and struct.unpack(">f", packed)[0] == number)


def _key(node: Node) -> tuple[object, ...]:
    """What a forward operator does: itself, its input and its parameters, with those that were left out."""
    return (node.op, node.args[0], *node.args[1:], *_RULES[node.op].defaults[len(node.args) - 1 :])


def _copied(value: Value, makers: Makers) -> Value:
    maker = makers.get(value)
    while maker is not None and maker.op == CLONE and isinstance(maker.args[0], Value):
        value, maker = maker.args[0], makers.get(maker.args[0])
    return value


def _reading(node: Node, result: Value) -> Node:
    saved = node.args[1]
    inplace = tuple((result if value is saved else value, overload) for value, overload in node.inplace)
    return replace(node, args=(node.args[0], result, *node.args[2:]), inplace=inplace)


def _unread_copies(graph: Graph, instead: Mapping[Node, tuple[Node, ...]], makers: Makers) -> set[Node]:
    """The copies that only rewritten operators had read."""
    read = set(graph.outputs)
    for node in graph.nodes:
        for new in instead.get(node, (node,)):
            read.update(new.inputs)
    copies = {makers[value] for node in instead for value in node.inputs if value in makers and value not in read}
    return {node for node in copies if node.op == CLONE}
