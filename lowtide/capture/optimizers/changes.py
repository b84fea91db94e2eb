"""What an optimizer's step has changed in its state and in its settings: what goes into slots after each step."""

from __future__ import annotations

from collections.abc import Container, Iterator, Mapping, Sequence
from enum import Enum
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.base.places import ABSENT
from lowtide.base.skeleton import Keys, Skeleton, entry, leaves, mapped
from lowtide.capture.blocks import address
from lowtide.capture.draft import Draft
from lowtide.capture.looks import another
from lowtide.capture.optimizers.scalars import UNKNOWN, Scalars, TracedNumber
from lowtide.errors import CaptureError
from lowtide.ir.graph import Slot, Value

_PLAIN = (bool, str, type(None), torch.dtype, torch.device, torch.Size, Enum)


class Changes:
    """Collects them; the numbers and tensors that the next step starts from are told as they are found."""

    def __init__(self, draft: Draft, scalars: Scalars, gradients: Container[int] = ()) -> None:
        """`gradients`: the addresses of those that the step is given, in which the next one finds others."""
        self.draft, self.scalars, self._gradients = draft, scalars, gradients
        self._instead: dict[int, torch.Tensor] = {}  # of a gradient that is kept, what the next step finds
        self.assigned: list[tuple[Slot, Value]] = []
        # flags, None, texts and skeletons of what follows, and how many of `assigned` come before
        self.constants: list[tuple[int, Slot, Any]] = []
        self.added: list[Slot] = []  # settings that were not there before
        self.contents: dict[int, Any] = {}  # by id of a tensor of one element: the number that it now holds, where that is known

    def of_state(self, slot: Slot, before: Mapping[str, Any], entries: Mapping[str, Any]) -> dict[str, Any]:
        """What an optimizer keeps in one place, as the next step finds it."""
        if gone := [key for key in before if key not in entries]:
            raise CaptureError(
                f"the optimizer removes {gone[0]!r} from its state of {slot.path[0]}, which cannot be captured: set it to None"
            )
        for key, item in entries.items():
            self._compare(within(slot, (key,)), before.get(key, ABSENT), item)
        return {key: self.settled(item) for key, item in entries.items()}

    def of_own(self, slot: Slot, before: Any, now: Any) -> Any:
        """The same of what it keeps for no parameter."""
        if before is ABSENT and now is not ABSENT:
            self.added.append(slot)
        self._compare(slot, before, now)
        return self.settled(now)

    def of_settings(self, before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> Iterator[tuple[int, str, Any]]:
        """Settings that the step has changed or made: group, key, and what the next step finds there."""
        for index, (old, group) in enumerate(zip(before, now, strict=True)):
            if gone := [key for key in old if key not in group]:
                raise CaptureError(f"the optimizer's step removes its setting {gone[0]!r} from group {index}, which cannot be captured")
            for key, item in group.items():
                slot = Slot("group", (index, key))
                if key not in old:
                    self.added.append(slot)
                if key != "params" and differ(old.get(key, ABSENT), item):
                    self._compare(slot, old.get(key, ABSENT), item)
                    yield index, key, self.settled(item)

    def _compare(self, slot: Slot, before: Any, now: Any) -> None:
        """Put into slots what is not what it was: of a list or a dictionary, the entries that the step has written."""
        if not differ(before, now):
            return
        skeleton = Skeleton.of(now)
        if skeleton is None or (skeleton.kind is tuple and not _may_be_written_within(before, now)):
            self._put(slot, now)
            return
        if skeleton != Skeleton.of(before):
            self.constants.append((len(self.assigned), slot, skeleton))
            before = ABSENT
        for key, item in skeleton.entries(now):
            self._compare(within(slot, (key,)), before if before is ABSENT else entry(before, key), item)

    def _put(self, slot: Slot, item: Any) -> None:
        plain = (*_PLAIN, int, float) if type(item) is tuple else _PLAIN
        if all(isinstance(leaf, plain) and not isinstance(leaf, TracedNumber) for _, leaf in leaves(item)):
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

    def settled(self, item: Any) -> Any:
        """What the next step finds: a number by its value here, which the next shadow traces again."""
        return mapped(lambda _, leaf: self._settled(leaf), item)

    def _settled(self, item: Any) -> Any:
        if isinstance(item, TracedNumber):
            return item.actual
        item = self.draft.fake(item)  # of a tensor that was there before: the fake which stands for it
        if isinstance(item, FakeTensor) and address(item) in self._gradients:
            return self._instead.setdefault(id(item), another(item))
        if isinstance(item, torch.Tensor) and item.numel() == 1 and item.device.type == "cpu":
            known = self.scalars.known_content(self.draft.value(item))
            if known is not UNKNOWN:
                self.contents[id(item)] = known
        return item


def _may_be_written_within(before: Any, now: tuple[Any, ...]) -> bool:
    """Whether what has changed in a tuple lies within lists and the like, which are there as they were."""
    skeletons = [(Skeleton.of(old), Skeleton.of(new)) for old, new in zip(before, now, strict=False)] if type(before) is tuple else []
    same = len(skeletons) == len(now) == len(before) if skeletons else False
    return same and all(old == new and (new is not None or before[at] is now[at]) for at, (old, new) in enumerate(skeletons))


def within(slot: Slot, path: Keys) -> Slot:
    return Slot(slot.table, (*slot.path, *path))


def differ(before: Any, now: Any) -> bool:
    """Whether other things lie there, or lie in other containers."""
    skeleton = Skeleton.of(now)
    if skeleton is None or skeleton != Skeleton.of(before):
        return now is not before
    return any(differ(entry(before, key), item) for key, item in skeleton.entries(now))
