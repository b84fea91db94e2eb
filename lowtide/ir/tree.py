"""Nested Python structures as a list of leaves and a skeleton: batches come in as these, results go out as these.

Containers and dataclasses are opened always, other objects where their attributes hold tensors (transformers' caches, torch's
distributions), however deep. Nothing of what was opened is kept in the skeleton, so that it keeps no tensor alive.
"""

from __future__ import annotations

import collections
import dataclasses
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

from lowtide.base.places import slots_of
from lowtide.errors import CaptureError

Rebuild: TypeAlias = Callable[[Any], Any]  # an iterator of leaves -> the structure


@dataclasses.dataclass(frozen=True, slots=True)
class Leaf:
    """One leaf and where it stands, written as Python would: "[0]['input_ids']"."""

    where: str
    value: Any


@dataclasses.dataclass(frozen=True, slots=True)
class OpenedContainer:
    """What a container holds, each with the step that leads to it, and how one like it is made of other children."""

    children: list[tuple[str, Any]]
    make: Callable[[list[Any]], Any]


Own: TypeAlias = "Callable[[Any], Callable[[], Any] | None]"  # what gives a container that is handed on as it is; None for others
Opener: TypeAlias = Callable[[Any], "OpenedContainer | None"]
_openers: list[Opener] = []


def open_with(opener: Opener) -> Opener:
    """Have objects of kinds that are not known here opened by `opener`, which gives None for those that it does not know either."""
    _openers.append(opener)
    return opener


class Sharing:
    """What several structures have in common: a container that lies in two places is made once, and some are handed on as they are."""

    def __init__(self, own: Own, opened: Mapping[int, tuple[int, Any]] | None = None) -> None:
        """`opened`: by id a number, and what was opened, so that no other gets its id."""
        self.own, self._opened = own, dict(opened or {})

    def copy(self) -> Sharing:
        return Sharing(self.own, self._opened)

    def open(self, item: Any) -> tuple[int, bool]:
        """Its number, and whether it has been opened before."""
        known = id(item) in self._opened
        return self._opened.setdefault(id(item), (len(self._opened), item))[0], known


class _Filling:
    """Other leaves for several structures, and the containers that were made with them so far, by number."""

    def __init__(self, leaves: Iterable[Any], containers: dict[int, Any]) -> None:
        self._leaves, self.containers = iter(leaves), containers

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        return next(self._leaves)


def flatten(tree: Any, sharing: Sharing | None = None) -> tuple[list[Leaf], Rebuild]:
    """The leaves of a nested structure, and a function that puts other leaves in their places.

    A mapping that is also a dataclass (the outputs of transformers) is rebuilt from its keys, so that both of its faces agree.
    `sharing`: with the structures that were flattened before; a container that it knows has no leaves here.
    Raises CaptureError for a structure that holds itself.
    """
    return _flatten(tree, "", frozenset(), sharing)


def unflatten(rebuild: Rebuild, leaves: Iterable[Any], containers: dict[int, Any] | None = None) -> Any:
    """`containers`: those that were made so far, which structures that were flattened with one `Sharing` have in common."""
    return rebuild(iter(leaves) if containers is None else _Filling(leaves, containers))


def holds_tensors(item: Any) -> bool:
    """Whether there is a tensor in an object, or in what it refers to by items or attributes."""
    return holds(item, _is_tensor)


def holds(item: Any, is_wanted: Callable[[Any], bool], is_closed: Callable[[Any], bool] = lambda part: False) -> bool:
    """Whether there is one of these in an object, or in what it refers to by items or attributes, but for those that are closed."""
    seen: set[int] = set()
    waiting = [item]
    while waiting:
        part = waiting.pop()
        if is_wanted(part):
            return True
        if type(part) not in _PLAIN and id(part) not in seen and not is_closed(part):
            seen.add(id(part))
            waiting.extend(pieces(part))
    return False


def _flatten(tree: Any, where: str, above: frozenset[int], sharing: Sharing | None) -> tuple[list[Leaf], Rebuild]:
    if sharing is not None and type(tree) not in _PLAIN and (own := sharing.own(tree)) is not None:
        return [], lambda items: own()
    opened = None if type(tree) in _PLAIN else _open(tree)
    if opened is None:
        return [Leaf(where, tree)], next
    if id(tree) in above:
        raise CaptureError(f"the {type(tree).__name__} at {where or 'the root'} holds itself: pass and return structures without circles")
    number, is_known = (0, False) if sharing is None else sharing.open(tree)
    if is_known:
        return [], lambda items: items.containers[number]
    within, make = above | {id(tree)}, opened.make
    pieces = [_flatten(child, f"{where}{step}", within, sharing) for step, child in opened.children]
    leaves = [leaf for piece, _ in pieces for leaf in piece]
    rebuilds = [rebuild for _, rebuild in pieces]
    if sharing is None:
        return leaves, lambda items: make([rebuild(items) for rebuild in rebuilds])

    def shared(items: Any) -> Any:
        items.containers[number] = new = make([rebuild(items) for rebuild in rebuilds])
        return new

    return leaves, shared


_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes})
_CLOSED = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, types.MethodType, types.CodeType, types.FrameType)
_PLACES = ("named_parameters", "add_param_group", "as_value", "_sympy_")  # where tensors live, and what numbers of a capture follow from


def _is_tensor(item: Any) -> bool:
    """Told by a method, as torch is not imported here."""
    return hasattr(type(item), "untyped_storage")


def _is_closed(item: Any) -> bool:
    kind = type(item)
    return kind in _PLAIN or isinstance(item, _CLOSED) or _is_tensor(item) or any(hasattr(kind, name) for name in _PLACES)


def pieces(item: Any) -> list[Any]:
    """What an object refers to by items and attributes."""
    if _is_closed(item):
        return []
    if isinstance(item, Mapping):
        return [*item.values(), *attributes_of(item).values()]
    if isinstance(item, (tuple, list, set, frozenset, collections.deque)):
        return [*iter(item), *attributes_of(item).values()]  # not by `len`, which a class may have for another purpose
    opened = next((opened for opener in _openers if (opened := opener(item)) is not None), None)
    return list(attributes_of(item).values()) if opened is None else [child for _, child in opened.children]


def _open(tree: Any) -> OpenedContainer | None:
    """What a container holds; None for a leaf."""
    if _is_closed(tree):
        return None
    if isinstance(tree, Mapping):
        return _open_mapping(tree)
    if isinstance(tree, (tuple, list)):
        return _open_sequence(tree)
    for opener in _openers:
        if (opened := opener(tree)) is not None:
            return opened
    if dataclasses.is_dataclass(tree):
        return _open_object(tree, [field.name for field in dataclasses.fields(tree) if hasattr(tree, field.name)])
    if not holds(tree, lambda item: _is_tensor(item) or hasattr(type(item), "as_value") or hasattr(type(item), "_sympy_")):
        return None
    if isinstance(tree, (set, frozenset)):
        return OpenedContainer([(f"[{index}]", item) for index, item in enumerate(tree)], type(tree))
    return _open_object(tree, list(attributes_of(tree)))


def _open_mapping(tree: Mapping[Any, Any]) -> OpenedContainer:
    """A mapping from its values; one that is a dataclass too is made by keywords, so that both of its faces agree."""
    kind: Any = type(tree)
    keys = list(tree)
    children = [(f"[{key!r}]", tree[key]) for key in keys]
    if dataclasses.is_dataclass(tree):
        return OpenedContainer(children, lambda items: kind(**dict(zip(keys, items, strict=True))))
    if kind is dict:
        return OpenedContainer(children, lambda items: dict(zip(keys, items, strict=True)))
    if isinstance(tree, (dict, collections.UserDict)):  # a class of its own may take other arguments than a dictionary
        return _with_attributes(tree, children, _maker_of_dict(tree, keys))
    return OpenedContainer(children, lambda items: kind(dict(zip(keys, items, strict=True))))


def _maker_of_dict(tree: Any, keys: list[Any]) -> Callable[[list[Any]], Any]:
    kind: Any = type(tree)
    base: Any = collections.OrderedDict if isinstance(tree, collections.OrderedDict) else dict
    factory = tree.default_factory if isinstance(tree, collections.defaultdict) else None

    def make(items: list[Any]) -> Any:
        new = kind.__new__(kind)
        if isinstance(new, collections.UserDict):
            new.data = dict(zip(keys, items, strict=True))
            return new
        if factory is not None:
            new.default_factory = factory
        for key, item in zip(keys, items, strict=True):
            base.__setitem__(new, key, item)
        return new

    return make


def _open_sequence(tree: Any) -> OpenedContainer:
    kind = type(tree)
    names = getattr(tree, "_fields", None) if isinstance(tree, tuple) else None
    children = [(f"[{index}]" if names is None else f".{names[index]}", item) for index, item in enumerate(tree)]
    if kind in (tuple, list):
        return OpenedContainer(children, kind)
    if names is not None:
        return _with_attributes(tree, children, kind._make)
    if isinstance(tree, list):
        return _with_attributes(tree, children, lambda items: _filled_list(kind, items))
    try:
        tuple.__new__(kind)
    except TypeError:
        return OpenedContainer(children, kind)  # of C, as torch.Size is and what torch.max returns
    return _with_attributes(tree, children, lambda items: tuple.__new__(kind, items))


def _filled_list(kind: Any, items: list[Any]) -> Any:
    new = kind.__new__(kind)
    list.extend(new, items)
    return new


def _with_attributes(tree: Any, children: list[tuple[str, Any]], make: Callable[[list[Any]], Any]) -> OpenedContainer:
    """A container of a class of its own: attributes that hold tensors are children too, others are handed on as they are."""
    child_ids = {id(child) for _, child in children}
    of_tree = {name: item for name, item in attributes_of(tree).items() if not (name == "data" and isinstance(tree, collections.UserDict))}
    opened = [name for name, item in of_tree.items() if id(item) not in child_ids and holds_tensors(item)]
    linked = {name: [id(child) for _, child in children].index(id(item)) for name, item in of_tree.items() if id(item) in child_ids}
    own = {name: item for name, item in of_tree.items() if name not in opened and name not in linked}

    def make_all(items: list[Any]) -> Any:
        new = make(items[: len(items) - len(opened)])
        attributes = {**own, **{name: items[at] for name, at in linked.items()}}
        _set_attributes(new, {**attributes, **dict(zip(opened, items[len(items) - len(opened) :], strict=True))})
        return new

    return OpenedContainer([*children, *((f".{name}", of_tree[name]) for name in opened)], make_all)


def _open_object(tree: Any, names: list[str]) -> OpenedContainer | None:
    """An object from its attributes, made without its class's `__init__`; None where it is more than its attributes."""
    kind: Any = type(tree)
    blank = types.SimpleNamespace if isinstance(tree, types.SimpleNamespace) else object
    try:
        blank.__new__(kind)
    except TypeError:
        return None

    def make(items: list[Any]) -> Any:
        new = blank.__new__(kind)
        _set_attributes(new, dict(zip(names, items, strict=True)))
        return new

    return OpenedContainer([(f".{name}", getattr(tree, name)) for name in names], make)


def attributes_of(item: Any) -> dict[str, Any]:
    """An object's own attributes, in its dictionary and in slots."""
    attributes = {name: getattr(item, name) for name in slots_of(item) if hasattr(item, name)}
    own = getattr(item, "__dict__", None)
    return attributes | own if isinstance(own, dict) and own is not item else attributes


def _set_attributes(new: Any, attributes: dict[str, Any]) -> None:
    own, slots = getattr(new, "__dict__", None), slots_of(new)
    for name, item in attributes.items():
        if isinstance(own, dict) and name not in slots:
            own[name] = item
        else:
            object.__setattr__(new, name, item)  # also where the class is frozen
