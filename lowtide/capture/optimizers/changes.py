"""What an optimizer's step has changed in its state and in its settings: what goes into slots after each step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeAlias

import torch

from lowtide.base.places import ABSENT
from lowtide.capture.draft import Draft
from lowtide.capture.optimizers.scalars import UNKNOWN, Scalars, TracedNumber
from lowtide.errors import CaptureError
from lowtide.ir.graph import Slot, Value

_PLAIN = (bool, str, type(None), torch.dtype, torch.device)
Lists: TypeAlias = Sequence[tuple[list[Any], list[Any]]]  # with what each has held


class Changes:
    """Collects them; the numbers and tensors that the next step starts from are told as they are found."""

    def __init__(self, draft: Draft, scalars: Scalars) -> None:
        self.draft, self.scalars = draft, scalars
        self.assigned: list[tuple[Slot, Value]] = []
        self.constants: list[tuple[int, Slot, Any]] = []  # flags, None and texts, and how many of `assigned` come before
        self.added: list[Slot] = []  # settings that were not there before
        self.contents: dict[int, Any] = {}  # by id of a tensor of one element: the number that it now holds, where that is known

    def of_state(self, name: str, before: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
        """One parameter's state as the next step finds it."""
        if gone := [key for key in before if key not in entries]:
            raise CaptureError(f"the optimizer removes {gone[0]!r} from its state of {name}, which cannot be captured: set it to None")
        for key, item in entries.items():
            if key not in before or item is not before[key]:
                self._put(Slot("state", (name, key)), item)
        return {key: self._settled(item) for key, item in entries.items()}

    def of_settings(
        self, before: Sequence[Mapping[str, Any]], lists: Lists, now: Sequence[Mapping[str, Any]]
    ) -> Iterator[tuple[int, str, Any]]:
        """Settings that the step has changed or made: group, key, and what the next step finds there. `lists`, with what they held."""
        for index, (old, group) in enumerate(zip(before, now, strict=True)):
            if gone := [key for key in old if key not in group]:
                raise CaptureError(f"the optimizer's step removes its setting {gone[0]!r} from group {index}, which cannot be captured")
            for key, item in group.items():
                slot = Slot("group", (index, key))
                if key not in old:
                    self.added.append(slot)
                if changed := [*_changed(slot, old.get(key, ABSENT), item, lists)] if key != "params" else []:
                    for each in changed:
                        self._put(*each)
                    yield index, key, self._settled(item)

    def _put(self, slot: Slot, item: Any) -> None:
        if isinstance(item, _PLAIN):
            self.constants.append((len(self.assigned), slot, item))
        else:
            self.assigned.append((slot, self._value(slot, item)))

    def _value(self, slot: Slot, item: Any) -> Value:
        if isinstance(item, torch.Tensor):
            return self.draft.value(item)
        if isinstance(item, TracedNumber):
            return item.value
        if isinstance(item, (int, float)):
            return self.draft.emit_scalar("py.mul", (item, 1))  # a number that every first step starts from, such as a count of 1
        raise CaptureError(f"the optimizer keeps a {type(item).__name__} in {slot}; tensors, numbers, flags and texts can be captured")

    def _settled(self, item: Any) -> Any:
        """An entry as the next step finds it: a number by its value here, which the next shadow traces again."""
        if isinstance(item, (tuple, list)):
            return type(item)(map(self._settled, item))
        if isinstance(item, TracedNumber):
            return item.actual
        if isinstance(item, torch.Tensor) and item.numel() == 1 and item.device.type == "cpu":
            known = self.scalars.known_content(self.draft.value(item))
            if known is not UNKNOWN:
                self.contents[id(item)] = known
        return item


def lists_in(item: Any) -> Iterator[list[Any]]:
    if isinstance(item, list):
        yield item
    if isinstance(item, (tuple, list)):
        for piece in item:
            yield from lists_in(piece)


def _changed(slot: Slot, old: Any, now: Any, lists: Lists) -> Iterator[tuple[Slot, Any]]:
    """Where a setting is not what it was, and what is there: the whole of it, or the places of a list that the step has written."""
    if now is not old:
        yield slot, now
    elif isinstance(now, (tuple, list)):
        before = next((pieces for each, pieces in lists if each is now), now)
        if len(before) != len(now):
            yield slot, now
        else:
            for at, pair in enumerate(zip(before, now, strict=True)):
                yield from _changed(Slot(slot.table, (*slot.path, at)), *pair, lists)
