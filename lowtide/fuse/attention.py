"""Heads of what both sides of a product differ from call to call: attention as one kernel, batched products, softmax."""

from __future__ import annotations

from math import prod

from lowtide.base.narrow import of_kind, there
from lowtide.fuse.layout import Lay, fresh, in_rows, stepped
from lowtide.fuse.stages import Attention, Batched, Epilogue, RowReduction, Stage
from lowtide.fuse.staging import Head, Staging
from lowtide.ir.graph import Node, Value
from lowtide.ir.packed import Norm


def attention(staging: Staging, node: Node) -> Head:
    """Queries, keys, values [B, H, rows, features]; scores are in no buffer. Keys are copied so that they lie side by side."""
    query, key, value = (staging.place(each) for each in node.args[:3] if isinstance(each, Value))
    said, made = dict(node.kwargs), node.results[0]
    causal = said.get("is_causal", node.args[4] if len(node.args) > 4 else False)
    scale, mask = said.get("scale"), said.get("attn_mask")
    keys = staging.copied(key.permuted((0, 1, 3, 2)), in_rows(f"{made.name}_keys", [key.shape[dim] for dim in (0, 1, 3, 2)]))
    values = _side_by_side(staging, value, f"{made.name}_values")
    b, h, q, _ = query.shape
    seen = _mask(staging, mask, (b, h, q, key.shape[2])) if isinstance(mask, Value) else None
    factor = float(scale) if isinstance(scale, (int, float)) else query.shape[3] ** -0.5

    def make(out: Lay, epilogue: Epilogue, norm: Norm | None, nodes: tuple[Node, ...]) -> Stage:
        return Attention(query, keys, values, seen, causal is True, factor, out, nodes)

    return Head(node, made, _heads_together(made.name, (b, h, q, value.shape[3])), make, alone=True)


def _heads_together(name: str, shape: tuple[int, ...]) -> Lay:
    """Where results go: rows of all heads' features, as what reads them usually wants."""
    b, h, q, v = shape
    whole = fresh(name, (b * q, h * v)).viewed((b, q, h, v))
    whole = there(whole)
    return whole.permuted((0, 2, 1, 3))


def _mask(staging: Staging, mask: Value, shape: tuple[int, ...]) -> Lay:
    """What is added to scores, by keys side by side, or one number for all keys."""
    whole = staging.place(mask).broadcast(shape)
    whole = there(whole)
    if whole.shape[3] == 1 or whole.stride[3] in (0, 1):
        return whole
    return staging.copied(whole, in_rows(f"{mask.name}_rows", shape))


def _side_by_side(staging: Staging, lay: Lay, name: str) -> Lay:
    """A matrix, or several, whose columns lie side by side in the arena, where reading behind a row does no harm."""
    lies_so = lay.buffer.is_own and (lay.stride[-1] == 1 or lay.shape[-1] == 1)
    return lay if lies_so else staging.copied(lay, in_rows(name, lay.shape))


def batched(staging: Staging, node: Node) -> Head:
    """Products [B, M, K] by [B, K, N]."""
    a, other = (staging.place(each) for each in node.args[:2] if isinstance(each, Value))
    made = node.results[0]
    columns = _side_by_side(staging, other, f"{made.name}_columns")
    lay = in_rows(made.name, (a.shape[0], a.shape[1], other.shape[2]))

    def make(out: Lay, epilogue: Epilogue, norm: Norm | None, nodes: tuple[Node, ...]) -> Stage:
        return Batched(a, columns, out, out.rows() or stepped(out.shape[2]), epilogue, nodes)

    return Head(node, made, lay, make)


def softmax(staging: Staging, node: Node) -> Head:
    made, given = node.results[0], node.args[0]
    given = of_kind(Value, given)
    read = staging.in_rows(given)
    kind = "safe" if "_safe_" in node.op else "softmax"

    def make(out: Lay, epilogue: Epilogue, norm: Norm | None, nodes: tuple[Node, ...]) -> Stage:
        columns = read.shape[-1]
        step = out.rows() or stepped(columns)
        return RowReduction(kind, read, read.rows() or 0, 1, prod(read.shape[:-1]), out, step, epilogue, nodes=nodes)

    return Head(node, made, in_rows(made.name, read.shape), make)
