"""Numbers and texts that classes of the user's keep in their attributes: which a program has changed, though nobody saw it write them."""

from __future__ import annotations

import sys
import types
from collections.abc import Container, Iterator
from typing import Any

from lowtide.base.places import ABSENT
from lowtide.capture.care.contents import differ, is_plain
from lowtide.capture.results import is_number
from lowtide.capture.sources import is_library


class ClassNumbers:
    """What lay in attributes of classes when they were found."""

    def __init__(self) -> None:
        self._of: dict[type, dict[str, Any]] = {}

    def note(self, cls: type) -> None:
        self._of.setdefault(cls, _numbers_of(cls))

    def clear(self) -> None:
        self._of.clear()

    def others(self, but: Container[tuple[int, str]]) -> Iterator[tuple[type, str, Any, Any]]:
        """Where another number lies now, what lay there, and what does; but for places, by class and name, that are noted otherwise."""
        for cls, before in self._of.items():
            for name, number in (before | dict.fromkeys(_numbers_of(cls).keys() - before.keys(), ABSENT)).items():
                now = vars(cls).get(name, ABSENT)
                if (id(cls), name) not in but and differ(number, now) and not is_number(now):
                    yield cls, name, number, now

    def unchanged(self, words: Container[str]) -> Iterator[tuple[type, str]]:
        """The attributes with these names that hold no number, or the same one."""
        for cls, before in self._of.items():
            for name, item in vars(cls).items():
                is_old = not is_plain(item) or (name in before and not differ(before[name], item))
                if is_old and name in words and not name.startswith("__"):
                    yield cls, name


def counts(old: Any, new: Any) -> bool:
    """Whether a number has become another, as counts do; a flag or a text may settle."""
    return {type(old), type(new)} <= {int, float}


def users_bases(cls: type) -> Iterator[type]:
    """A class, and those that it derives from, but for libraries' own."""
    for base in cls.__mro__:
        file = getattr(sys.modules.get(base.__module__), "__file__", None)
        if base not in (object, type) and not (isinstance(file, str) and is_library(file)):
            yield base


def is_written_by_user(item: Any) -> bool:
    """Whether a module, or the module of a class or function, is no library's and not Python's own."""
    module = item if isinstance(item, types.ModuleType) else sys.modules.get(item.__module__)
    if module is None or module.__name__ in sys.builtin_module_names:
        return False
    file = getattr(module, "__file__", None)
    return not (isinstance(file, str) and is_library(file))


def _numbers_of(cls: type) -> dict[str, Any]:
    """The numbers and texts in a class's own attributes, but for what Python keeps there."""
    return {name: item for name, item in vars(cls).items() if is_plain(item) and not name.startswith("__")}
