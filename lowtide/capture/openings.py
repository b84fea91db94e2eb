"""Kinds of containers that torch has been told of: what `torch.utils._pytree` can open, `ir.tree` can."""

from __future__ import annotations

from typing import Any

from torch.utils import _pytree as pytree

from lowtide.ir import tree


@tree.open_with
def registered(item: Any) -> tree.Opened | None:
    """An object whose class is in torch's registry, opened as its owner has said there."""
    if type(item) not in pytree.SUPPORTED_NODES:
        return None
    found, spec = pytree.tree_flatten(item, is_leaf=lambda piece: piece is not item)
    return tree.Opened([(f"[{index}]", piece) for index, piece in enumerate(found)], lambda items: pytree.tree_unflatten(items, spec))
