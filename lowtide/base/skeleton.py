"""Lists, dictionaries, plain objects and tensors made of tensors, within one another: what optimizers keep, walked, copied, made anew."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

Keys = tuple[Any, ...]  # texts and numbers; of an object, its attributes
_KINDS: tuple[type[Any], ...] = (list, tuple, dict, OrderedDict)
_LIBRARIES = ("torch.", "numpy.", "builtins.")  # whose classes keep more than attributes


@dataclass(frozen=True)
class Skeleton:
    """One without its entries: what kind it is, and where in it there is something."""

    kind: type[Any]
    keys: Keys
    beside: tuple[Any, ...] = field(default=(), compare=False)  # what a tensor that is made of others is told beside those

    @classmethod
    def of(cls, item: Any) -> Skeleton | None:
        """None for what is no container, or has other keys than texts and numbers."""
        kind = type(item)
        if hasattr(kind, "__tensor_flatten__"):
            parts, context = item.__tensor_flatten__()
            return cls(kind, tuple(parts), (context, item.shape, item.stride()))
        if kind not in _KINDS:
            return cls(kind, tuple(vars(item))) if is_plain_object(item) else None
        keys = tuple(item) if isinstance(item, dict) else tuple(range(len(item)))
        return cls(kind, keys) if all(type(key) in (str, int, float) for key in keys) else None

    def entries(self, item: Any) -> Iterator[tuple[Any, Any]]:
        """What lies in one of this kind, by key."""
        for key in self.keys:
            yield key, entry(item, key)

    def filled(self, entries: Sequence[Any]) -> Any:
        """A new one."""
        if self.beside:
            return self.kind.__tensor_unflatten__(dict(zip(self.keys, entries, strict=True)), *self.beside)
        if self.kind not in _KINDS:
            new = object.__new__(self.kind)
            vars(new).update(zip(self.keys, entries, strict=True))
            return new
        return self.kind(zip(self.keys, entries, strict=True)) if issubclass(self.kind, dict) else self.kind(entries)


def built(items: Iterator[Any]) -> Any:
    """The next thing: after a skeleton come the things that it holds."""
    item = next(items)
    return item.filled([built(items) for _ in item.keys]) if isinstance(item, Skeleton) else item


def is_plain_object(item: Any) -> bool:
    """Whether it is of a class written in Python, and all that it holds are its attributes."""
    kind: Any = type(item)
    if type(kind) is not type or not hasattr(item, "__dict__") or isinstance(item, (Enum, *_KINDS)) or callable(item):
        return False
    bases = [each for each in kind.__mro__ if each is not object]
    slots = all("__dict__" in vars(each) or "__slots__" not in vars(each) for each in bases)
    makes: Any = kind.__new__
    return slots and makes is object.__new__ and not any(f"{each.__module__}.".startswith(_LIBRARIES) for each in bases)


def mapped(function: Callable[[Keys, Any], Any], item: Any, path: Keys = ()) -> Any:
    """The same containers around what `function` makes of each thing in them, given where it lies."""
    if (skeleton := Skeleton.of(item)) is None:
        return function(path, item)
    return skeleton.filled([mapped(function, each, (*path, key)) for key, each in skeleton.entries(item)])


def copied(item: Any) -> Any:
    """Containers of their own around the same things."""
    return mapped(lambda _, leaf: leaf, item)


def leaves(item: Any, path: Keys = ()) -> Iterator[tuple[Keys, Any]]:
    """What lies in containers, and where."""
    if (skeleton := Skeleton.of(item)) is None:
        yield path, item
        return
    for key, each in skeleton.entries(item):
        yield from leaves(each, (*path, key))


def entry(item: Any, key: Any) -> Any:
    """What lies there. Raises KeyError, IndexError or TypeError where nothing does."""
    if isinstance(item, dict) and key not in item:  # which a defaultdict would put there
        raise KeyError(key)
    return item[key] if isinstance(item, _KINDS) else getattr(item, key) if hasattr(item, "__tensor_flatten__") else vars(item)[key]


def at(item: Any, path: Sequence[Any]) -> Any:
    """The same of a way through several containers."""
    for key in path:
        item = entry(item, key)
    return item


def put(item: Any, path: Sequence[Any], new: Any) -> None:
    """Have something lie there from now on."""
    holder = at(item, path[:-1])
    (holder if isinstance(holder, _KINDS) else vars(holder))[path[-1]] = new
