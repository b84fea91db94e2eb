"""What a program does to a container of the caller's, as the stand-in in its place tells (`stand_ins.py`).

Nobody can know what the program would find there after other steps: so what it reads of a container that it changes has to be what the same
step has put there.
"""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from lowtide.base.places import ABSENT, LENGTH, entry
from lowtide.capture.effects.stand_ins import ADDING, KINDS, EarlierItem, StaleError, class_for, holds_stand_in, is_stand_in
from lowtide.capture.sources import users_line

_TAKING = ("pop", "popleft", "__delitem__")
_ALL = object()  # in the place of a key: all of them


@dataclass
class EffectLog:
    """What the program did, in its order: containers, methods and their arguments."""

    events: list[tuple[Any, str, tuple[Any, ...]]] = field(default_factory=list)
    active: bool = False
    missed: str = ""  # what a defaultdict has made for a missing key, and where
    thread: int = field(default_factory=threading.get_ident)  # that captures: what others do is done to the caller's own containers


class Container:
    """One container of the caller's, and its stand-in. What leads to it finds it again before and after each step."""

    def __init__(self, log: EffectLog, original: Any, getter: Callable[[], Any], *, is_new: bool = False) -> None:
        """`is_new`: made by the program, which did not find it."""
        self.log, self.original, self.kind, self.getters, self.is_new = log, original, type(original), [getter], is_new
        options: tuple[Any, ...] = ()
        if isinstance(original, collections.deque):
            options = ((), original.maxlen)
        elif isinstance(original, collections.defaultdict):
            options = (original.default_factory,)
        made_for = class_for(self.kind)  # type: ignore[arg-type]
        self.stand_in: Any = made_for.__new__(made_for) if self.kind is collections.Counter else made_for(*options)
        self.stand_in.kept = self
        self.items: Any = [] if self.kind is list else self.stand_in  # a list's own items are read by C without a word
        self.within: list[Container] = []
        self.changed, self.fresh, self.added, self.taken = False, False, 0, 0  # fresh: emptied; `added` at its end, `taken` at its front
        self.written: set[Any] = set()  # keys
        self.defaults: dict[Any, Any] = {}  # keys of a dictionary that were read, and what would be taken where nothing lies there
        self.presence: dict[Any, bool] = {}  # keys of which it was asked whether they are there
        self.tensors: dict[Any, tuple[Any, str]] = {}  # by key: those that it has read, and the line
        self.keys: list[Any] = []
        self.keys_at = ""  # where all keys of a dictionary were read
        self.nothing: dict[Any, Any] = {}  # keys under which it has read None, and what is taken where nothing lies
        self.absent_at: dict[Any, str] = {}  # keys under which nothing lay, or None, and the line that has asked
        self.missing: dict[Any, str] = {}  # keys under which nothing lay for which it has taken something, and the line
        self.opened: set[Any] = set()  # keys of numbers that are there because they were read
        self.has_sums = self.is_shared = False
        self.sums: dict[Any, tuple[Any, Any]] = {}  # by key: what stands for a number, and what is taken where none is
        self.length: Any = None  # what stands for how many items it has when a step begins
        self.read_at, self.whole = "", ""  # where what the step had not put there was read; where all was, when there was nothing else
        self.show()

    @property
    def now(self) -> Any:
        return self.getters[0]()

    @property
    def changes(self) -> bool:
        return self.changed or any(other.changes for other in self.within)

    @property
    def matters(self) -> bool:
        """Whether the program changes it, or asks for a number in it that each step finds anew."""
        return self.changed or self.has_sums or any(other.matters for other in self.within)

    @property
    def changes_itself(self) -> bool:
        return self.changed or any(other.is_new for other in self.within)

    def is_of_others(self) -> bool:
        """Whether another thread asks than the one that captures."""
        are_others = threading.get_ident() != self.log.thread and self.original is not None
        self.is_shared = self.is_shared or (are_others and self.log.active)
        return are_others

    def stale_at(self, as_a_whole: bool) -> str:
        """Where the program reads what earlier steps have left; "" where it does not. `as_a_whole`: with what it holds."""
        grown = not isinstance(self.items, dict) and self.kind.__len__(self.items) > 0
        keys = self.items.keys() if isinstance(self.items, dict) else ()
        if self.keys_at and self.changes_itself and keys != self.original.keys():
            return self.keys_at
        if not (self.changes if as_a_whole else self.changes_itself):
            return ""
        begun = (line for key, line in self.missing.items() if self._differentiated(key) is None)
        trained = (line for key, line in self.absent_at.items() if self._differentiated(key))
        return self.read_at or (self.whole if grown else "") or next(begun, "") or next(trained, "")

    def _differentiated(self, key: Any) -> bool | None:
        """Whether a tensor lies under a key now, and requires gradients, so that eager would go through it again; None for none."""
        return next((each.requires_grad for each in self.lying_at(key) if isinstance(each, torch.Tensor)), None)

    def holds(self) -> bool:
        """Whether it is there, and holds what the program relies on."""
        if self.is_new:
            return True
        try:
            now, *others = (getter() for getter in self.getters)
            begins = all(entry(now, key, default) is None for key, default in self.nothing.items())
        except (LookupError, ValueError, TypeError, AttributeError):
            return False
        if type(now) is not self.kind or any(other is not now for other in others):
            return False
        if not self.changes:
            return True  # what else it holds is compared, as all that the program reads
        if not begins:
            return False
        if any((key in now) is not there for key, there in self.presence.items()) or (self.keys_at and list(now) != self.keys):
            return False
        return not self.whole or (now.keys() <= self.written if isinstance(now, dict) else not now)

    def read(self, key: Any = _ALL, default: Any = ABSENT) -> None:
        """`default`: what the program takes where nothing lies under the key."""
        if not self.log.active or self.fresh or (key is not _ALL and self._is_own(key)):
            return
        if key is _ALL and all(map(self._is_own, self._old_keys())) and self.sums.keys() <= self.written:
            self.whole = self.whole or users_line()
        elif key is not _ALL and self._may_last(key) and isinstance(item := entry(self.original, key, ABSENT), torch.Tensor):
            self.tensors.setdefault(key, (item, users_line()))
        elif key is not _ALL and self._may_last(key) and entry(self.original, key, default) is None:
            self.nothing.setdefault(key, default)
            self.absent_at.setdefault(key, users_line())
        elif key is not _ALL and isinstance(self.original, dict) and key not in self.original and default is not ABSENT:
            self.missing.setdefault(key, users_line())
            self.absent_at.setdefault(key, users_line())
            self.presence.setdefault(key, False)
            if type(default) in (int, float):
                self.defaults.setdefault(key, default)
        else:
            self.read_at = self.read_at or users_line()
            if key is not _ALL and self._may_last(key):
                self.defaults.setdefault(key, default)

    def lookup(self, key: Any, default: Any, put: str = "", *args: Any) -> Any:
        """What a dictionary gives under a key, or `default`, which is left there by the method `put`."""
        known = None if self.fresh or key in self.written or not self.log.active else self.sums.get(key)
        if known is None:
            self.read(key, default)
        elif key not in self.opened and (type(known[1]) is not type(default) or known[1] != default):
            self.read_at = self.read_at or users_line()  # where nothing lies there it takes two things
        elif put and key not in self.opened:
            self.changed = True
            self.opened.add(key)
            self.log.events.append((self, put, (key, *args)))
        item = dict.get(self.items, key, ABSENT)
        if item is ABSENT:
            item = default if known is None else known[0]
            if put:
                dict.__setitem__(self.items, key, item)
        return item

    def measured(self) -> Any:
        """How many items it has: with those that earlier steps have added, where it only grows."""
        if isinstance(self.items, dict) or self.fresh or not self.log.active or self.is_of_others():
            return self.stand_in.__len__()
        self.defaults.setdefault(LENGTH, ABSENT)
        most = getattr(self.stand_in, "maxlen", None)
        if self.length is None or most == 0:
            return self.stand_in.__len__()
        length = self.length + (self.added - self.taken)
        return length if most is None else min(length, most)

    def each_key(self) -> list[Any]:
        """All keys of a dictionary are asked for: they have to be those of the capture when a step begins."""
        keys = list(dict.keys(self.items))
        if self.log.active and not self.fresh and keys and not all(map(self._is_own, keys)) and not self.is_of_others():
            self.keys_at, self.keys = self.keys_at or users_line(), self.keys or list(self.original)
        else:
            self.read()
        return keys

    def has(self, key: Any) -> bool:
        """Whether a dictionary has a key: what the program does then follows from it."""
        if self.log.active and not self.fresh and key not in self.written and key not in self.opened:
            self.presence.setdefault(key, key in self.original)
            if key not in self.original:
                self.absent_at.setdefault(key, users_line())
        return dict.__contains__(self.items, key)

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
        elif method in ADDING:
            self.added += len(args[0]) if "extend" in method else 1
        elif method == "__setitem__" and self._may_last(args[0]):
            self.written.add(args[0])
        elif self._takes_first(method, args):
            self.taken += 1
        elif method != "__setitem__" or not self._is_own(args[0]):
            self.read()
        self.log.events.append((self, method, args))

    def holds_before(self, item: Any) -> int:
        """In how many places it has an item that the program found."""
        items = self.original.values() if isinstance(self.original, dict) else self.original or ()
        return sum(each is item for each in items)

    def _takes_first(self, method: str, args: tuple[Any, ...]) -> bool:
        """Whether it takes away the first item of several, which an earlier step has left, as loops do that keep the newest ones."""
        first = method == "popleft" or (method in _TAKING and args == (0,))
        return first and not isinstance(self.items, dict) and not self.fresh and self.length is not None and len(self.original) > 0

    def lying_at(self, key: Any) -> list[Any]:
        """What lies under a key, where anything does."""
        if isinstance(self.items, dict):
            return [dict.get(self.items, key)]
        length = self.kind.__len__(self.items)
        return [self.kind.__getitem__(self.items, key)] if self._is_position(key) and -length <= key < length else []

    def adopt(self, key: Any, item: Any) -> Any:
        """The program has missed an item, and made one. An empty container is watched, anything else follows from its absence."""
        if type(item) in (int, float):
            return self.lookup(key, item, "__getitem__")
        if type(item) not in KINDS or item or not self.log.active:
            self.read(key)
            if self.log.active:
                self.log.missed = self.log.missed or f"at {users_line()} a defaultdict makes a {type(item).__name__} for the key {key!r}"
        else:
            kind = type(item)
            reached = lambda: self.now[key] if hasattr(self.now, "default_factory") else self.now.setdefault(key, kind())  # noqa: E731
            self.within.append(Container(self.log, item, reached, is_new=True))
            item = self.within[-1].stand_in
        self.kind.__setitem__(self.stand_in, key, item)
        return item

    def show(self) -> None:
        """What C finds in a list: what the step has put there, and nothing of use where there may be more."""
        if self.kind is list:
            list.__setitem__(self.stand_in, slice(None), self.items if self.fresh or not self.log.active else [EarlierItem(self)])

    def forget(self) -> None:
        self.kind.clear(self.stand_in)
        self.kind.clear(self.items)
        self.original = self.length = None
        self.sums.clear()

    def _old_keys(self) -> list[Any]:
        return list(dict.keys(self.items)) if isinstance(self.items, dict) else list(range(self.kind.__len__(self.items) - self.added))

    def _is_own(self, key: Any) -> bool:
        """Whether the step has put there what lies under a key, or it is a container, which is watched itself."""
        if isinstance(self.stand_in, dict):
            return key in self.written or key in self.sums or holds_stand_in(dict.get(self.stand_in, key))
        if not isinstance(key, int):
            return False
        within = self._is_position(key) and is_stand_in(self.kind.__getitem__(self.items, key))
        known = (key in self.written or key in self.sums) and (key >= 0 or not self.added) and not self.taken
        return known or within or (self.kind is list and 0 < -key <= self.added)

    def _may_last(self, key: Any) -> bool:
        return isinstance(self.stand_in, dict) or self._is_position(key)

    def _is_position(self, key: Any) -> bool:
        """Whether it means the same item whatever is added on the right."""
        length = self.kind.__len__(self.original)
        return isinstance(key, int) and not self.added and not self.taken and -length <= key < length
