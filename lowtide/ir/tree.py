"""Nested Python structures as a list of leaves and a skeleton: batches come in as these, results go out as these."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

Rebuild: TypeAlias = Callable[[Iterator[Any]], Any]


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf and where it stands, written as Python would: "[0]['input_ids']"."""

    where: str
    value: Any


def flatten(tree: Any, where: str = "") -> tuple[list[Leaf], Rebuild]:
    """The leaves of tuples, lists, mappings and dataclasses, and a function that puts other leaves in their places.

    A mapping that is also a dataclass (the outputs of transformers) is rebuilt from its keys, so that both of its faces agree.
    """
    children, make = _open(tree)
    if children is None:
        return [Leaf(where, tree)], next
    parts = [flatten(child, f"{where}{step}") for step, child in children]
    leaves = [leaf for part, _ in parts for leaf in part]
    rebuilds = [rebuild for _, rebuild in parts]
    return leaves, lambda items: make([rebuild(items) for rebuild in rebuilds])


def unflatten(rebuild: Rebuild, leaves: Iterable[Any]) -> Any:
    """The structure that `rebuild` came from, with `leaves` in it."""
    return rebuild(iter(leaves))


def _open(tree: Any) -> tuple[list[tuple[str, Any]] | None, Callable[[list[Any]], Any]]:
    """The children of a container with their steps, and how to make it again; None for a leaf."""
    kind = type(tree)
    if isinstance(tree, Mapping):
        keys = list(tree)
        children = [(f"[{key!r}]", tree[key]) for key in keys]
        return children, lambda items: _remake_mapping(tree, dict(zip(keys, items, strict=True)))
    if isinstance(tree, tuple) and hasattr(tree, "_fields"):
        return [(f".{name}", item) for name, item in zip(tree._fields, tree, strict=True)], lambda items: kind(*items)
    if isinstance(tree, (tuple, list)):
        return [(f"[{index}]", item) for index, item in enumerate(tree)], kind
    if dataclasses.is_dataclass(tree) and not isinstance(tree, type):
        names = [field.name for field in dataclasses.fields(tree) if field.init]
        return [(f".{name}", getattr(tree, name)) for name in names], lambda items: dataclasses.replace(
            tree, **dict(zip(names, items, strict=True))
        )
    return None, lambda items: items[0]


def _remake_mapping(tree: Mapping[Any, Any], items: dict[Any, Any]) -> Any:
    """A mapping like `tree` with other values: by keywords if it is a dataclass too, else from the dictionary."""
    if dataclasses.is_dataclass(tree):
        return type(tree)(**items)
    if type(tree) is dict:
        return items
    data = getattr(tree, "data", None)
    if isinstance(data, dict):  # UserDict and its kin (transformers' BatchEncoding) take no bare dictionary of anything
        clone = tree.__class__.__new__(tree.__class__)
        clone.__dict__.update(tree.__dict__)
        clone.__dict__["data"] = items
        return clone
    return type(tree)(items)  # type: ignore[call-arg]
