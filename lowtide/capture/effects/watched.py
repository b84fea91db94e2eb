"""Containers that stand in for the caller's while a program runs, and note what it does to them.

Each is a copy, of a class derived from the container's own. It cannot know what the program would find there after other steps: so what
the program reads of a container that it changes has to be what the same step has put there.
"""

from __future__ import annotations

import collections
import functools
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError

KINDS = (list, dict, collections.defaultdict, collections.OrderedDict, collections.deque)  # no classes derived from them
_ALL = object()  # in place of a key
_classes: set[type] = set()  # of stand-ins
_ADDING = ("append", "appendleft", "extend", "extendleft", "__iadd__")
_CHANGING = (
    *_ADDING, "clear", "__setitem__", "insert", "pop", "popleft", "popitem", "remove", "sort", "reverse", "rotate", "__delitem__",
    "move_to_end", "__imul__", "__ior__",
)  # fmt: skip
_NOT_WATCHED = (
    "__new__", "__init__", "__class__", "__getattribute__", "__setattr__", "__delattr__", "__init_subclass__", "__subclasshook__",
    "__dir__", "__doc__", "__hash__", "__class_getitem__",
    "__sizeof__", "__getstate__", "__reduce__", "__reduce_ex__", "default_factory", "maxlen",
)  # fmt: skip


class LeavingError(CaptureError):
    """The program puts something outside, or wants a number that may be for that alone: a capture that follows it may know better."""


class StaleError(CaptureError):
    """What the program does follows from what earlier steps have left in a place that it changes."""


@dataclass
class EffectLog:
    """What the program did, in its order: containers, methods and their arguments."""

    events: list[tuple[Container, str, tuple[Any, ...]]] = field(default_factory=list)
    active: bool = False
    thread: int = field(default_factory=threading.get_ident)  # that captures: what others do is done to the caller's own containers


class _Earlier:
    """What earlier steps have left in a list, for functions of torch's, which read it without asking."""

    def __init__(self, container: Container) -> None:
        self.container = container

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Noted, and refused."""
        for each in (*args, *(kwargs or {}).values()):
            for item in each if isinstance(each, (list, tuple)) else (each,):
                if isinstance(item, cls):
                    item.container.read_at = users_line()
        raise StaleError("it reads what earlier steps leave")


class Container:
    """One container of the caller's, and its stand-in. What leads to it finds it again before and after each step."""

    def __init__(self, log: EffectLog, original: Any, way: Callable[[], Any], *, made: bool = False) -> None:
        """`made`: by the program, which did not find it."""
        self.log, self.original, self.kind, self.ways, self.made = log, original, type(original), [way], made
        options: tuple[Any, ...] = ()
        if isinstance(original, collections.deque):
            options = ((), original.maxlen)
        elif isinstance(original, collections.defaultdict):
            options = (original.default_factory,)
        self.stand_in: Any = _class_for(self.kind)(*options)  # type: ignore[arg-type]
        self.stand_in.kept = self
        self.items: Any = [] if self.kind is list else self.stand_in  # a list's own items are read by C without a word
        self.within: list[Container] = []
        self.changed, self.fresh, self.added = False, False, 0  # fresh: it was emptied; `added` at its end
        self.written: set[Any] = set()  # keys
        self.read_at, self.whole = "", ""  # where what the step had not put there was read; where all was, when there was nothing else
        self.show()

    @property
    def now(self) -> Any:
        return self.ways[0]()

    @property
    def changes(self) -> bool:
        """Whether the program changes it, or what it holds."""
        return self.changed or any(other.changes for other in self.within)

    @property
    def changes_itself(self) -> bool:
        """Whether the program changes which items it has."""
        return self.changed or any(other.made for other in self.within)

    def is_of_others(self) -> bool:
        """Whether another thread asks than the one that captures."""
        return threading.get_ident() != self.log.thread and self.original is not None

    def stale_at(self, as_a_whole: bool) -> str:
        """Where the program reads what earlier steps have left; "" where it does not. `as_a_whole`: with what it holds."""
        grown = not isinstance(self.items, dict) and self.kind.__len__(self.items) > 0
        return (self.read_at or (self.whole if grown else "")) if (self.changes if as_a_whole else self.changes_itself) else ""

    def holds(self) -> bool:
        """Whether it is there, and holds what the program relies on."""
        if self.made:
            return True
        try:
            now, *others = (way() for way in self.ways)
        except (LookupError, ValueError, TypeError):
            return False
        if type(now) is not self.kind or any(other is not now for other in others):
            return False
        return not self.whole or (now.keys() <= self.written if isinstance(now, dict) else not now)

    def read(self, key: Any = _ALL) -> None:
        if not self.log.active or self.fresh or (key is not _ALL and self._is_own(key)):
            return
        if key is _ALL and all(map(self._is_own, self._old_keys())):
            self.whole = self.whole or users_line()
        else:
            self.read_at = self.read_at or users_line()

    def change(self, method: str, args: tuple[Any, ...]) -> None:
        if not self.log.active:
            return
        self.changed = True
        if holds_stand_in(args):
            self.read_at = users_line()
            raise StaleError(f"it puts one container of its own into another, at {self.read_at}")
        if method == "clear":
            self.log.events[:] = [event for event in self.log.events if event[0] is not self]
            self.fresh = True
        elif method in _ADDING:
            self.added += len(args[0]) if "extend" in method else 1
        elif method == "__setitem__" and (isinstance(self.stand_in, dict) or self._is_position(args[0])):
            self.written.add(args[0])
        else:
            self.read()
        self.log.events.append((self, method, args))

    def adopt(self, key: Any, item: Any) -> Any:
        """The program has missed an item, and made one. An empty container is watched, anything else follows from its absence."""
        if type(item) not in KINDS or item or not self.log.active:
            self.read(key)
        else:
            kind = type(item)
            self.within.append(Container(self.log, item, lambda: _reached(self.now, key, kind), made=True))
            item = self.within[-1].stand_in
        self.kind.__setitem__(self.stand_in, key, item)
        return item

    def show(self) -> None:
        """What C finds in a list: what the step has put there, and nothing of use where there may be more."""
        if self.kind is list:
            list.__setitem__(self.stand_in, slice(None), self.items if self.fresh or not self.log.active else [_Earlier(self)])

    def forget(self) -> None:
        self.kind.clear(self.stand_in)
        self.kind.clear(self.items)
        self.original = None

    def _old_keys(self) -> list[Any]:
        return list(dict.keys(self.items)) if isinstance(self.items, dict) else list(range(self.kind.__len__(self.items) - self.added))

    def _is_own(self, key: Any) -> bool:
        """Whether the step has put there what lies under a key, or it is a container, which is watched itself."""
        if isinstance(self.stand_in, dict):
            return key in self.written or holds_stand_in(dict.get(self.stand_in, key))
        if not isinstance(key, int):
            return False
        within = self._is_position(key) and is_stand_in(self.kind.__getitem__(self.items, key))
        return key in self.written or within or (self.kind is list and 0 < -key <= self.added)

    def _is_position(self, key: Any) -> bool:
        """Whether it means the same item whatever is added on the right."""
        return isinstance(key, int) and not self.added and 0 <= key < self.kind.__len__(self.original)


def is_stand_in(item: Any) -> bool:
    return type(item) in _classes


def holds_stand_in(item: Any) -> bool:
    """Whether there is a stand-in in what a program hands on."""
    if is_stand_in(item):
        return True
    items = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else ()
    return any(map(holds_stand_in, items))


def _reached(table: Any, key: Any, kind: Any) -> Any:
    return table[key] if isinstance(table, collections.defaultdict) else table.setdefault(key, kind())


@functools.cache
def _class_for(kind: Any) -> Any:
    """A class like one of `KINDS` whose methods tell of their calls."""
    methods = {name: _watched(kind, name, getattr(kind, name)) for name in dir(kind) if name not in _NOT_WATCHED}
    kept = {"kept": None, "__class__": property(lambda self: kind), "__hash__": None, "__reduce_ex__": _reduced}
    made = type(kind.__name__, (kind,), {**methods, **kept})
    _classes.add(made)
    return made


def _watched(kind: Any, name: str, method: Any) -> Any:
    is_table = issubclass(kind, dict)

    def changing(self: Any, *args: Any, **options: Any) -> Any:
        if self.kept.is_of_others():
            return method(self.kept.original, *args, **options)
        if name == "__setitem__" and args[0] == slice(None):  # all of a list
            self.clear()
            return self.extend(args[1])
        if "extend" in name or name == "__iadd__":
            args = (list(args[0]),)
        self.kept.change("extend" if name == "__iadd__" else name, args)
        items = self.kept.items
        result = method(items, *args, **options)
        self.kept.show()
        return self if result is items else result

    def reading(self: Any, *args: Any, **options: Any) -> Any:
        if self.kept.is_of_others():
            return method(self.kept.original, *args, **options)
        if name not in _OF_A_KEY or (name == "__contains__" and not is_table) or isinstance(args[0], slice):
            self.kept.read()
        elif name != "__getitem__" or not is_table or dict.__contains__(self, args[0]):  # what misses a key says so itself
            self.kept.read(args[0])
        return method(self.kept.items, *args, **options)

    return _OWN.get(name, changing if name in _CHANGING else reading) if is_table else changing if name in _CHANGING else reading


def _reduced(self: Any, protocol: Any) -> tuple[Any, tuple[Any, ...]]:
    """What `copy` and `pickle` make it of: a copy is no stand-in."""
    if self.kept.is_of_others():
        return self.kept.original.__reduce_ex__(protocol)  # type: ignore[no-any-return]
    self.kept.read()
    kind, items = self.kept.kind, self.kept.items
    plain = dict(dict.items(items)) if isinstance(items, dict) else list(kind.__iter__(items))
    if kind is collections.defaultdict:
        return kind, (self.default_factory, plain)
    return kind, (plain, self.maxlen) if kind is collections.deque else (plain,)


def _update(self: Any, *args: Any, **named: Any) -> None:
    if self.kept.is_of_others():
        self.kept.original.update(*args, **named)
        return
    for key, item in dict(*args, **named).items():
        self[key] = item


def _missing(self: Any, key: Any) -> Any:
    if self.kept.is_of_others():
        return self.kept.original[key]
    if getattr(self, "default_factory", None) is None:
        self.kept.read(key)
        raise KeyError(key)
    return self.kept.adopt(key, self.default_factory())


def _set_default(self: Any, key: Any, default: Any = None) -> Any:
    if self.kept.is_of_others():
        return self.kept.original.setdefault(key, default)
    if dict.__contains__(self, key):
        return self[key]
    return self.kept.adopt(key, default)


_OF_A_KEY = ("__getitem__", "get", "__contains__")
_OWN = {"update": _update, "setdefault": _set_default, "__missing__": _missing}
