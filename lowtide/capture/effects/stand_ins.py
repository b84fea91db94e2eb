"""Copies of the caller's containers that stand in their places while a program runs, of classes derived from the containers' own.

Each tells its `kept` (`containers.py`) what the program does to it.
"""

from __future__ import annotations

import collections
import copy
import functools
from typing import Any, NoReturn

import torch

from lowtide.base.places import ABSENT
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError
from lowtide.ir import tree

# no classes derived from them
KINDS = (list, dict, collections.defaultdict, collections.OrderedDict, collections.Counter, collections.deque)
_READS = "it reads what earlier steps leave"
_classes: set[type] = set()  # of stand-ins
ADDING = ("append", "appendleft", "extend", "extendleft", "__iadd__")
_CHANGING = (
    *ADDING, "clear", "__setitem__", "insert", "pop", "popleft", "popitem", "remove", "sort", "reverse", "rotate", "__delitem__",
    "move_to_end", "__imul__", "__ior__",
)  # fmt: skip
_NOT_WATCHED = (
    "__new__", "__init__", "__class__", "__getattribute__", "__setattr__", "__delattr__", "__init_subclass__", "__subclasshook__",
    "__dir__", "__doc__", "__hash__", "__class_getitem__",
    "__sizeof__", "__getstate__", "__reduce__", "__reduce_ex__", "default_factory", "maxlen",
)  # fmt: skip


SHOWS_A_SIZE = "a text shows a size that differs from batch to batch, which a captured step would not: keep the number itself"
SHOWS_A_TENSOR = "a text shows a tensor that the program computes, which a captured step would not: keep the tensor itself"


class LeavingError(CaptureError):
    """The program puts something outside, or wants a number that may be for that alone: a capture that follows it may know better."""

    def __init__(self, text: str, *, converts: bool = False) -> None:
        """`converts`: it wants it as Python's own number."""
        super().__init__(text)
        self.converts = converts


class DrawnError(LeavingError):
    """The program draws from Python's or NumPy's generator: a capture that follows what it puts outside follows that as well."""


class StaleError(CaptureError):
    """What the program does follows from what earlier steps have left in a place that it changes."""


class EarlierItem:
    """What earlier steps have left in a list: it can be taken away, and not looked at. Functions of torch's read without asking."""

    def __init__(self, container: Any) -> None:
        self.container = container

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for each in (*args, *(kwargs or {}).values()):
            for item in each if isinstance(each, (list, tuple)) else (each,):
                if isinstance(item, cls):
                    item.container.read_at = users_line()
        raise StaleError(_READS)

    def _refuse(self, *_: Any) -> NoReturn:
        self.container.read_at = self.container.read_at or users_line()
        raise StaleError(_READS)


for _name in (
    "bool", "float", "int", "index", "iter", "len", "getitem", "eq", "ne", "lt", "le", "gt", "ge", "hash", "str", "repr", "format",
    "getattr", "add", "radd", "sub", "rsub", "mul", "rmul", "truediv", "rtruediv", "neg", "call",
):  # fmt: skip
    setattr(EarlierItem, f"__{_name}__", EarlierItem._refuse)


def is_stand_in(item: Any) -> bool:
    return type(item) in _classes


def own_of(item: Any) -> Any:
    """The caller's own for a stand-in, and for a tuple with some; anything else as it is."""
    if type(item) is tuple and any(map(is_stand_in, item)):
        return tuple(map(own_of, item))
    return item.kept.original if is_stand_in(item) else item


def original(item: Any) -> Any:
    """The caller's own container for its stand-in, anything else as it is. Raises StaleError for what holds a stand-in."""
    if not is_stand_in(item) and tree.holds(item, lambda piece: is_stand_in(piece) or type(piece) is EarlierItem):
        raise StaleError("it puts one container of its own into another")
    return item.kept.original if is_stand_in(item) and not item.kept.is_new else item


def holds_stand_in(item: Any) -> bool:
    """Whether there is a stand-in in what a program hands on."""
    if is_stand_in(item) or type(item) is EarlierItem:
        return True
    items = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else ()
    return any(map(holds_stand_in, items))


def without_stand_ins(item: Any) -> Any:
    """What is shown of a container: a copy of it as it is now, which the program has read as a whole."""
    item = copy.copy(item) if is_stand_in(item) else item
    if type(item) in (list, tuple):
        return type(item)(map(without_stand_ins, item))
    if type(item) not in KINDS or not isinstance(item, dict):
        return item
    result = copy.copy(item)
    result.update({key: without_stand_ins(each) for key, each in item.items()})
    return result


@functools.cache
def class_for(kind: Any) -> Any:
    """A class like one of `KINDS` whose methods tell of their calls."""
    methods = {name: _watched(kind, name, getattr(kind, name)) for name in dir(kind) if name not in _NOT_WATCHED}
    kept = {"kept": None, "__class__": property(lambda self: kind), "__hash__": None, "__reduce_ex__": _reduced}
    cls = type(kind.__name__, (kind,), {**methods, **kept})
    _classes.add(cls)
    return cls


def _watched(kind: Any, name: str, method: Any) -> Any:
    is_table = issubclass(kind, dict)

    def changing(self: Any, *args: Any, **options: Any) -> Any:
        if name == "__setitem__" and isinstance(args[1], torch.Tensor) and any(args[1] is each for each in self.kept.lying_at(args[0])):
            return None  # `table["last"] += x` of a tensor puts it where it lies
        if name == "__setitem__" and args[0] == slice(None):  # all of a list
            self.clear()
            return self.extend(args[1])
        if "extend" in name or name == "__iadd__":
            args = (list(args[0]),)
        taken = self.kept.taken
        self.kept.change("extend" if name == "__iadd__" else name, args)
        items = self.kept.items
        result = method(items, *args, **options)
        if self.kept.taken > taken and result is not None:
            result = EarlierItem(self.kept)
        self.kept.show()
        return self if result is items else result

    def reading(self: Any, *args: Any, **options: Any) -> Any:
        self.kept.read(*(args if name == "__getitem__" and not isinstance(args[0], slice) else ()))
        return method(self.kept.items, *args, **options)

    plain = changing if name in _CHANGING and not (kind is collections.Counter and name.startswith("__i")) else reading
    own = {**_OWN, **_OF_COUNTERS} if kind is collections.Counter else _OWN if is_table else {}
    mine: Any = own.get(name, plain)

    def either(self: Any, *args: Any, **options: Any) -> Any:
        return method(self.kept.original, *args, **options) if self.kept.is_of_others() else mine(self, *args, **options)

    return either


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
    for key, item in dict(*args, **named).items():
        self[key] = item


def _missing(self: Any, key: Any) -> Any:
    if getattr(self, "default_factory", None) is None:
        self.kept.read(key)
        raise KeyError(key)
    return self.kept.adopt(key, self.default_factory())


def _set_default(self: Any, key: Any, default: Any = None) -> Any:
    if type(default) in (int, float):
        return self.kept.lookup(key, default, "setdefault", default)
    return self[key] if dict.__contains__(self, key) else self.kept.adopt(key, default)


def _get_item(self: Any, key: Any) -> Any:
    if self.kept.kind is collections.Counter:
        return self.kept.lookup(key, 0)
    if (made_by := getattr(self, "default_factory", None)) in (int, float):
        return self.kept.lookup(key, made_by(), "__getitem__")
    if dict.__contains__(self, key):
        return self.kept.lookup(key, ABSENT)
    return dict.__getitem__(self, key)  # what misses a key says so itself


def _count(self: Any, iterable: Any = None, /, *, times: int = 1, **named: Any) -> None:
    for key, count in collections.Counter(iterable, **named).items():
        self[key] = self.get(key, 0) + count if times > 0 else self.get(key, 0) - count


_OWN: dict[str, Any] = {
    "update": _update, "setdefault": _set_default, "__getitem__": _get_item, "__missing__": _missing,
    "__iter__": lambda self: iter(self.kept.each_key()), "keys": lambda self: dict.fromkeys(self.kept.each_key()).keys(),
    "values": lambda self: [self[key] for key in self.kept.each_key()], "__len__": lambda self: len(self.kept.each_key()),
    "items": lambda self: [(key, self[key]) for key in self.kept.each_key()],
    "get": lambda self, key, default=None: self.kept.lookup(key, default), "__contains__": lambda self, key: self.kept.has(key),
}  # fmt: skip
_OF_COUNTERS = {"update": _count, "subtract": functools.partial(_count, times=-1)}
