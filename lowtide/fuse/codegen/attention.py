"""Attention, batched products and softmax as C++: calls of the templates in attention.hpp."""

from __future__ import annotations

from lowtide.fuse.codegen.text import ElementOffsets, flag, listed
from lowtide.fuse.layout import Lay
from lowtide.fuse.stages import Attention, Batched, RowReduction


def attention(stage: Attention, addresses: ElementOffsets) -> str:
    b, h, q, d = stage.query.shape
    places = [stage.query, stage.key, stage.value, stage.mask or stage.query, stage.out]
    extents = (b, h, q, stage.key.shape[3], d, stage.value.shape[3], flag(stage.is_causal), flag(stage.mask is not None))
    steps = [f"Steps<{listed(_moving(place))}>" for place in places]
    pointers = ", ".join(addresses.of(place) for place in places)
    return f"attention<{listed((*extents, *steps))}>(run, {pointers}, {stage.scale!r}f)"


def batched(stage: Batched, addresses: ElementOffsets) -> str:
    n, m, k = stage.a.shape
    arguments = (n, m, k, stage.other.shape[2], *_moving(stage.a), *_moving(stage.other)[:2])
    pointers = ", ".join([addresses.of(stage.a), addresses.of(stage.other), "e", addresses.of(stage.out), str(stage.out_step)])
    return f"batched<{listed(arguments)}>(run, {pointers})"


def softmax(stage: RowReduction, addresses: ElementOffsets) -> str:
    arguments = (stage.rows, stage.a.shape[-1], stage.a_step, flag(stage.kind == "safe"))
    return f"softmax_rows<{listed(arguments)}>(run, {addresses.of(stage.a)}, e, {addresses.of(stage.out)}, {stage.out_step})"


def _moving(lay: Lay) -> list[int]:
    """Steps along all dimensions; none along those of one element."""
    return [0 if size == 1 else step for size, step in zip(lay.shape, lay.stride, strict=True)]
