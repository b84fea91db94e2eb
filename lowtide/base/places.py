"""Where Python keeps what a program reads beside its model: looked up again without running anything of the program's."""

from __future__ import annotations

import contextvars
import gc
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

ABSENT = "not there"
LENGTH = object()  # in place of a key: how many items there are
EVERYTHING = "__dict__"  # in place of a name: all attributes of an object
_VIEWS = types.MappingProxyType, *(type(getattr(kind(), name)()) for kind in (dict, OrderedDict) for name in ("keys", "values", "items"))
_HOLDERS = (list, tuple, dict, set, frozenset, deque, contextvars.ContextVar)
_DICTIONARIES = (dict, OrderedDict)
_ENTRIES = (dict, list, tuple, deque)
_TABLES = ("_modules", "_parameters", "_buffers")  # of a torch module, which finds there what it has no attribute for

# By object: a thread that finds other attributes there than all others do, those, and their names at first.
shown: dict[int, tuple[int, dict[str, Any], frozenset[str]]] = {}


@dataclass(frozen=True, eq=False)
class Position:
    """One attribute of an object, one variable of a function, or one name in a table. It keeps no object alive."""

    name: Any  # of a hook its number, of what lies in a list its position
    text: str  # "attribute 'beta' of a Criterion"
    line: str  # where it was read, "loss.py:12"
    _holder: Callable[[], Any] = field(repr=False)

    @classmethod
    def of(cls, holder: Any, name: str = "", text: str = "", line: str = "") -> Position:
        """`holder` is an object, a cell (which has one name), or a dictionary of names."""
        return cls(name, text, line, referred(holder))

    @property
    def holder(self) -> Any:
        """Who holds it; None where that is gone."""
        return self._holder()

    def now(self) -> Any:
        """What lies there; ABSENT where nothing does."""
        holder = self._holder()
        if isinstance(holder, types.CellType):
            try:
                return holder.cell_contents
            except ValueError:  # not assigned, or deleted
                return ABSENT
        if isinstance(holder, _ENTRIES):
            return _entry_of(holder, self.name)
        return static_attribute(holder, self.name)

    def own(self) -> Any:
        """The same, where it is no attribute of the holder's class."""
        own = attributes(holder := self._holder())
        return self.now() if not isinstance(own, dict) or self.name in own or is_slot(holder, self.name) else ABSENT

    def put(self, item: Any) -> None:
        """Put something there; ABSENT takes away what there is."""
        holder = self._holder()
        name = "cell_contents" if isinstance(holder, types.CellType) else self.name
        table: Any = type(holder) if type(holder) in _DICTIONARIES else type if isinstance(holder, type) else object
        put, take = (table.__setitem__, table.__delitem__) if table in _DICTIONARIES else (table.__setattr__, table.__delattr__)
        if item is not ABSENT:
            put(holder, name, item)
        else:
            with suppress(KeyError, AttributeError, ValueError):  # it is not there
                take(holder, name)

    def tables(self) -> Iterator[tuple[Mapping[str, Any], bool]]:
        """The tables that say what lies there, and whether the name is in each; none where no table does."""
        holder = self._holder()
        if type(holder) is dict:
            yield holder, self.name in holder
        elif not isinstance(holder, types.CellType) and self.name != EVERYTHING:
            yield from _tables_with(holder, self.name)

    def __str__(self) -> str:
        return f"{self.text}, read at {self.line},"


@dataclass(frozen=True, eq=False)
class Beside:
    """What a program has read beside its model."""

    places: tuple[Position, ...] = ()
    followed: tuple[Callable[[], Any], ...] = ()  # objects of which each attribute that was read is a place
    free: tuple[tuple[Callable[[], Any], Any], ...] = ()  # containers, and keys of numbers that each step asks for
    put: tuple[tuple[Callable[[], Any], str], ...] = ()  # modules, and attributes that each step sets


NOTHING = Beside()


@dataclass(frozen=True)
class Sum:
    """A place of which the program reads the number, text or tuple, computes with it and writes it again."""

    table: Callable[[], Any]
    name: Any
    default: Any = ABSENT
    kinds: tuple[type, ...] = (int, float)

    @property
    def now(self) -> Any:
        return entry(self.table(), self.name, self.default)

    def holds(self) -> bool:
        try:
            return type(now := self.now) in self.kinds and now is not ABSENT
        except (LookupError, ValueError, TypeError):  # nothing leads there any more
            return False


def entry(table: Any, key: Any, default: Any = ABSENT) -> Any:
    """What lies in a container, or how many items do."""
    if key is LENGTH:
        return len(table)
    return table.get(key, default) if isinstance(table, dict) else table[key]


def put_entry(table: MutableMapping[str, Any], name: str, item: Any) -> None:
    """Put something under a name of a table; ABSENT takes away what there is."""
    if item is ABSENT:
        table.pop(name, None)
    else:
        table[name] = item


def _entry_of(table: Any, key: Any) -> Any:
    try:
        return entry(table, key)
    except (LookupError, TypeError):
        return ABSENT


def referred(item: Any) -> Callable[[], Any]:
    """Gives the item, which it does not keep alive where Python can do so."""
    try:
        return weakref.ref(item)
    except TypeError:
        return lambda: item


def static_attribute(item: Any, name: str) -> Any:
    """An object's attribute as it is kept, by itself or by its class; a property is itself. ABSENT where there is none."""
    if name == EVERYTHING:
        return attributes(item)
    if type(item) is types.FunctionType:
        return getattr(item, name, ABSENT)
    for table, there in _tables_with(item, name):
        if there:
            entry = table[name]
            if type(entry) in (types.MemberDescriptorType, types.GetSetDescriptorType) and not issubclass(type(item), type):
                try:
                    return entry.__get__(item)
                except AttributeError:
                    return ABSENT
            return entry
    return ABSENT


def slots_of(item: Any) -> list[str]:
    """The names that an object keeps by itself, in no table (`__slots__`)."""
    tables = [vars(cls) for cls in type(item).__mro__ if "__slots__" in vars(cls)]
    return [name for table in tables for name, each in table.items() if type(each) is types.MemberDescriptorType]


def is_slot(item: Any, name: str) -> bool:
    return type(getattr(type(item), name, None)) is types.MemberDescriptorType


def attributes(item: Any) -> Any:
    """The dictionary of an object's own attributes, of a `threading.local` those of this thread; ABSENT where it has none."""
    if (view := shown.get(id(item))) is not None and view[0] == threading.get_ident():
        return view[1]
    kind: Any = threading.local if issubclass(type(item), threading.local) else object
    try:
        return kind.__getattribute__(item, "__dict__")
    except AttributeError:
        return ABSENT


def behind(item: Any) -> Any:
    """What a weak reference, a view of a dictionary or of memory, a method of a container (`kept.get`) lead to; anything else is itself.

    None where what was referred to is gone.
    """
    kind = type(item)
    if kind in _VIEWS:
        return gc.get_referents(item)[0]
    if kind is types.BuiltinMethodType and isinstance(item.__self__, _HOLDERS):
        return item.__self__
    if kind is memoryview:
        with suppress(ValueError):  # of one that was released
            return item.obj
        return None
    if kind in weakref.ProxyTypes:
        try:
            return item.__repr__.__self__  # a proxy passes on all that it is asked, and a method says whose it is
        except ReferenceError:
            return None
    return item() if issubclass(kind, weakref.ref) else item


def in_context(variable: contextvars.ContextVar[Any]) -> Any:
    try:
        return variable.get()
    except LookupError:
        return ABSENT


def _tables_with(item: Any, name: str) -> Iterator[tuple[Mapping[str, Any], bool]]:
    """The object's own table, those of a module, those of its classes; up to the first that has the name."""
    is_class = issubclass(type(item), type)  # `isinstance` would read `__class__` of a module, and what reads one is noted
    tables: list[Mapping[str, Any]] = []
    if not is_class and (own := attributes(item)) is not ABSENT:
        tables = [own, *(table for each in _TABLES if isinstance(table := own.get(each), dict))]
    for table in (*tables, *(cls.__dict__ for cls in (item if is_class else type(item)).__mro__)):
        there = name in table
        if there or isinstance(table, dict):  # of what its bases have not, a class is not asked
            yield table, there
        if there:
            return
