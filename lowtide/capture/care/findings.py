"""What a program was found to lead to beside its model, what lay there, and what the program has done to it since.

Places that it reads, containers, what goes on by itself, attributes and variables that it writes. How it leads there: `follower.py`.
"""

from __future__ import annotations

import types
from collections.abc import Container, Iterator
from typing import Any

import torch
from torch import nn

from lowtide.base.places import ABSENT, Position, attributes
from lowtide.capture.care.contents import (
    PLAIN,
    ClassNumbers,
    MovingObjects,
    WrittenAttributes,
    changed_each_time,
    counts,
    differ,
    difference,
    in_words,
    is_plain,
    is_put,
    is_replaced,
    pieces,
    put_back,
)
from lowtide.capture.effects.flags import Memo
from lowtide.capture.effects.stand_ins import is_stand_in, own_of
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError

MOST = 20_000  # of them


class Findings:
    def __init__(self) -> None:
        self._places: dict[tuple[int, str], Position] = {}
        self._before: dict[tuple[int, str], Any] = {}  # what lay there when it was found
        self._held: list[Any] = []  # kept alive meanwhile, so that ids stay their own
        self._written = WrittenAttributes()
        self._set: dict[tuple[int, str], tuple[Position, Any]] = {}  # variables that functions set, and what lay there
        self._contents: list[tuple[Any, dict[Any, Any]]] = []  # containers, and what they held when they were found
        self._large: list[tuple[Any, int]] = []  # those that are too large for that, and how much
        self._moving = MovingObjects()
        self._numbers = ClassNumbers()
        self._spaces: list[tuple[Any, dict[str, Any]]] = []  # objects of which no class notes what is read, and what they held

    def note(self, holder: Any, name: str, text: str, line: str = "") -> None:
        key = id(holder), name
        if key not in self._places and len(self._places) < MOST:
            self._held.append(holder)
            self._places[key] = place = Position.of(holder, name, text, line or users_line())
            self._before[key] = place.now()

    def memos(self, summed: Container[tuple[int, str]] = ()) -> tuple[Memo, ...]:
        """The numbers and texts that the program has read and put others in the places of, but for the `summed` attributes."""
        memos = []
        for key, place in self._places.items():
            old, new = self._before[key], place.now()
            writes = isinstance(place.holder, (types.CellType, dict, nn.Module, type)) or key in self._written
            if writes and key not in summed and issubclass(type(new), PLAIN) and differ(old, new):
                memos.append(Memo(place, old, new, changed_each_time(f"{place} was {old!r} and is {new!r}")))
        return tuple(memos)

    def refilled(self) -> str:
        """What the program has put into containers that it does not read, in words; "" where that is nothing.

        Stand-ins tell it themselves.
        """
        for container, before in self._contents:
            if is_stand_in(container):
                continue
            now = pieces(container)
            if before.keys() != now.keys():
                return f"a {type(container).__name__} that it reaches had {len(before)} items and has {len(now)}"
            for name in before:
                if is_replaced(before[name], now[name]):
                    was, is_now = (repr(each[name]) if is_plain(each[name]) else "another object" for each in (before, now))
                    return f"a {type(container).__name__} that it reads had {was} at {name!r} and has {is_now}"
        for container, size in self._large:
            if (now_size := len(pieces(container))) != size and not is_stand_in(container):
                return f"a {type(container).__name__} that it reaches had {size} items and has {now_size}"
        for cls, name, old, new in self._numbers.others(self._places):
            if counts(old, new):
                return f"attribute {name!r} of the class {cls.__name__} was {old!r} and is {new!r}"
        for space, before in self._spaces:
            if (name := difference(before, attributes(space))) is not None:
                once = "where only a first call sets it, call the model or the loss once before"
                return f"attribute {name!r} of a {type(space).__name__} is set, and those of an object of your own class can be; {once}"
        return ""

    def replaced(self) -> str:
        """Where the program has read one object and then put another, in words; "" where nowhere. Numbers and texts may settle."""
        for key, place in self._places.items():
            old, new = self._before[key], place.now()
            of_variables = isinstance(place.holder, (types.CellType, dict))  # of which nobody knows whether it was read before
            if old is new or is_plain(new) or isinstance(place.holder, (nn.Module, type, types.FunctionType)) or not is_put(new):
                continue
            if any(new is each for each in self._before.values()) if of_variables else is_replaced(old, new) and key in self._written:
                return f"{place} was {in_words(old)} and is {in_words(new)}"
        return ""

    def refuse_moved(self) -> None:
        """Raise CaptureError where the program has moved what no stand-in can be put in the place of."""
        if change := self._moving.change() or self._written.deleted():
            raise CaptureError(changed_each_time(change))

    def puts(self) -> list[tuple[Position, Any]]:
        """What the program has put into attributes of the user's objects and classes and into variables, and had not read before.

        Not what it has computed: that is followed elsewhere.
        """
        return [(place, now) for place, _ in self._put() if is_put(now := place.own())]

    def _put(self) -> Iterator[tuple[Position, Any]]:
        """Places that it writes alone, and what lay there where that is known."""
        for item, name in self._written.of_users():
            if self.only_writes(item, name):
                yield Position.of(item, name, f"attribute {name!r} of a {type(item).__name__}"), ABSENT
        for cls, name, before in self._numbers.replaced():
            if (id(cls), name) not in self._places:
                yield Position.of(cls, name, f"attribute {name!r} of the class {cls.__name__}"), before
        for key, (place, before) in self._set.items():
            if key not in self._places and place.now() is not before:
                yield place, before

    def only_writes(self, item: Any, name: str) -> bool:
        """Whether the program has written an attribute of an object, and did not read before what lay there."""
        return (id(item), name) in self._written and (id(item), name) not in self._places

    def leads_to(self, item: Any, but: Any = None) -> bool:
        """Whether an object lies now in a place that was read, or in another container than `but`."""
        return any(place.now() is item for place in self._places.values()) or any(
            piece is item for container, _ in self._contents if own_of(container) is not but for piece in pieces(container).values()
        )

    def take_back(self) -> None:
        for place, before in [*self._put()]:
            if not is_put(place.own()):
                continue
            if (id(place.holder), place.name) in self._written:
                self._written.put_back(place.holder, place.name)
            else:
                place.put(before)

    def turn_back(self) -> None:
        """Generators of random numbers, arrays, namespaces and numbers of classes are as they were."""
        self._moving.turn_back()
        for space, before in self._spaces:
            put_back(vars(space), before)
        for cls, name, number, _ in self._numbers.others(self._places):
            Position.of(cls, name).put(number)

    def put_back(self) -> None:
        """Undo what the program has written into attributes and containers."""
        for container, before_it in self._contents:
            put_back(container, before_it)
        self._written.put_all_back()
        for key, place in self._places.items():
            if isinstance(holder := place.holder, nn.Module) and differ(self._before[key], place.now()):
                object.__setattr__(holder, place.name, self._before[key])

    def lies_in_array(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies on the memory of an array of NumPy's that the program reaches."""
        return self._moving.lie_under(tensor)
