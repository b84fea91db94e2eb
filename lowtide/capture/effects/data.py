"""Data that a program puts elsewhere: `tensor.data = other`, `tensor.set_(other)`.

No operator says so: the tensor lies on other memory afterwards, and whoever looked at the old one keeps that. New data that lie alone on
their memory, as the old ones did, are written where those were, for want of room for both: later reads find them there, older views what
was there before. All else (a part of another tensor, another layout) is bound to the caller's tensor after each step, as eager binds it.
"""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _get_current_dispatch_mode

from lowtide.base.places import ABSENT
from lowtide.capture.blocks import address, covers, geometry
from lowtide.capture.care.contents import differ, is_plain
from lowtide.capture.care.instances import read_of_tensor
from lowtide.capture.care.turns import during, placed
from lowtide.capture.care.writes import refuse_once
from lowtide.capture.draft import Draft
from lowtide.capture.looks import is_made_of_tensors
from lowtide.capture.sources import is_library, users_line
from lowtide.errors import CaptureError
from lowtide.ir.graph import Kind, Slot

Call = Callable[..., torch.Tensor]  # an operator on its arguments

_DATA = torch.Tensor.data
_MEMO = "", "_vc", "_epoch"
_OWN = (f"{before}{name}{behind}" for name in {*vars(FakeTensor), *FakeTensor.__annotations__} for before in ("", "_") for behind in _MEMO)
_OF_TORCH = frozenset(_OWN) | {"_wrapped_number"}  # attributes that it sets itself, many for each fake; the last from C++, on a size
_aten = torch.ops.aten
_followed: ContextVar[Data | None] = ContextVar("followed", default=None)  # of this thread, for as long as it records


class Data:
    """Which of the caller's tensors have other data, and whether those were written into their memory or are to be bound."""

    def __init__(
        self, draft: Draft, fakes: Mapping[torch.Tensor, torch.Tensor], slots: Mapping[torch.Tensor, Slot], *, closed: bool = False
    ) -> None:
        """`fakes` and `slots` by real tensor, of a model. `closed`: an optimizer steps, which may not put its own data elsewhere."""
        self._draft, self._closed = draft, closed
        self._declared = {id(fakes[real]): (fakes[real], real, slot) for real, slot in slots.items()}
        self._model = {id(real): id(fakes[real]) for real in slots}
        self._several = {at for at, count in Counter(map(address, fakes.values())).items() if count > 1}
        self._bound: dict[Slot, torch.Tensor] = {}
        self._alone: dict[Slot, None] = {}

    def declare(self, fake: torch.Tensor, real: torch.Tensor, slot: Slot) -> None:
        self._declared[id(fake)] = fake, real, slot

    def bound(self) -> Iterator[tuple[Slot, torch.Tensor]]:
        """Where each step puts other data into a tensor, and a tensor that lies on those."""
        for slot, fake in self._bound.items():
            yield Slot("data", (slot.table, *slot.path)), fake

    @property
    def alone(self) -> tuple[Slot, ...]:
        """What is written in the place of being put elsewhere: nobody else may look at its memory."""
        return tuple(self._alone)

    def forget(self) -> None:
        self._declared.clear()
        self._bound.clear()

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, FakeTensor) and (known := self._known(tensor)) is not None:
            tensor = known[0]
        return _get(tensor)

    def put(self, tensor: torch.Tensor, item: torch.Tensor, call: Call | None = None) -> None:
        """Give a tensor the data of another one. Raises CaptureError for a tensor of the caller's, where it may not."""
        if self._closed and (not isinstance(tensor, FakeTensor) or self._draft.owns(tensor)):
            if isinstance(item, FakeTensor) and address(item) == address(tensor) and geometry(item) == geometry(tensor):
                return  # `p.data = p.data.contiguous()` of what lies so
            raise CaptureError(
                f"the optimizer gives a tensor of the caller's other memory (`.data = ...`), at {users_line()}, which a captured step "
                "would not: write into it with copy_"
            )
        known = self._known(tensor) if isinstance(tensor, FakeTensor) else self._known(tensor) or self._closed_over(tensor)
        with torch.no_grad():
            item = self._draft.fake(item)
            self._draft.value(item)
        if known is None:
            _set(tensor, item)
            return
        fake, real, slot = known
        self._draft.stands_for(real, fake)
        if self._is_written(slot, fake, item):
            self._alone[slot] = None
            old = _get(fake)
            with torch.no_grad():
                kept = (call or _called)(_aten.clone.default, old)
                (call or _called)(_aten.copy_.default, old, item)
            self._draft.moved(old, item, kept)
        elif address(fake) != address(item) or geometry(fake) != geometry(item) or self._shares(fake):  # not `t.data = t.data.mul_(2)`
            self._bound[slot] = fake
        _set(fake, item)

    def attribute(self, tensor: torch.Tensor, name: str) -> Any:
        """What the caller's tensor has under a name that its stand-in has not."""
        if (known := self._known(tensor)) is None or name.startswith("__"):
            return ABSENT
        readable = vars(known[1]) or not is_library(sys._getframe(2).f_code.co_filename)
        return read_of_tensor(known[1], name) if readable else ABSENT

    def set_attribute(self, tensor: torch.Tensor, name: str, item: Any) -> None:
        """Raise CaptureError for an attribute that the user's own code gives to a tensor of the caller's."""
        known = self._known(tensor)
        if known is None and is_made_of_tensors(type(tensor)):
            return  # such a one that the program makes
        real = (known or (tensor, tensor))[1]
        if isinstance(real, FakeTensor) or hasattr(torch.Tensor, name) or is_library(sys._getframe(2).f_code.co_filename):
            return
        before = vars(real).get(name, ABSENT)
        if before is not item and not (is_plain(item) and is_plain(before) and not differ(before, item)):
            refuse_once(f"sets attribute {name!r} of a tensor that was there before (keep it in a buffer, or in an attribute of a module)")

    def _known(self, tensor: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Slot] | None:
        return self._declared.get(self._model.get(id(tensor), id(tensor)))

    def _closed_over(self, real: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Slot]:
        fake = self._draft.fake(real)
        at = next(at for at, constant in enumerate(self._draft.constants) if constant is real)
        self.declare(fake, real, Slot("constant", (at,)))
        self._model[id(real)] = id(fake)
        return self._declared[id(fake)]

    def _shares(self, fake: torch.Tensor) -> bool:
        return address(fake) in self._several or address(fake) in self._draft.shared

    def _is_written(self, slot: Slot, fake: torch.Tensor, item: torch.Tensor) -> bool:
        """Whether the new data may lie where the old ones are, with nobody the wiser."""
        before, after = self._draft.value(fake), self._draft.value(item)
        return (
            before.storage.kind is not Kind.INPUT
            and (slot in self._alone or (slot not in self._bound and not before.version))
            and self._draft.owns(fake)
            and not self._draft.owns(item)
            and not self._shares(fake)
            and geometry(fake) == geometry(item)
            and before.storage.nbytes == after.storage.nbytes
            and before.storage.device == after.storage.device
            and covers(fake)
        )


@contextmanager
def following_data(data: Data) -> Iterator[None]:
    """While this lasts, `tensor.data = ...` of this thread goes to `data`; for other threads it is what it was."""
    with during(_followed, data), ExitStack() as stack:
        for name, item in _HOOKS.items():
            stack.enter_context(placed(torch.Tensor, name, item))
        yield


def _recording() -> Data | None:
    return None if _get_current_dispatch_mode() is None else _followed.get()


def _get_attribute(tensor: torch.Tensor, name: str) -> Any:
    item = ABSENT if (data := _recording()) is None else data.attribute(tensor, name)
    if item is ABSENT:
        raise AttributeError(f"'Tensor' object has no attribute {name!r}")
    return item


def _set_attribute(tensor: torch.Tensor, name: str, item: Any) -> None:
    if name not in _OF_TORCH and (data := _recording()) is not None:
        data.set_attribute(tensor, name, item)
    object.__setattr__(tensor, name, item)


_DATA_HERE = property(
    lambda tensor: _get(tensor) if (data := _recording()) is None else data.of(tensor),
    lambda tensor, item: _DATA.__set__(tensor, item) if (data := _recording()) is None else data.put(tensor, item),  # type: ignore[attr-defined]
)
_HOOKS = {"data": _DATA_HERE, "__getattr__": _get_attribute, "__setattr__": _set_attribute}


def _called(op: Any, *args: Any) -> torch.Tensor:
    result: torch.Tensor = op(*args)
    return result


def _get(tensor: torch.Tensor) -> torch.Tensor:
    data: torch.Tensor = _plainly(_DATA.__get__, tensor)  # type: ignore[attr-defined]
    return data


def _set(tensor: torch.Tensor, item: torch.Tensor) -> None:
    _plainly(_DATA.__set__, tensor, item)  # type: ignore[attr-defined]


def _plainly(function: Callable[..., Any], *args: Any) -> Any:
    """Past modes that would pass it on to the class's own attribute, which leads here again."""
    with torch._C.DisableTorchFunction():
        return function(*args)
