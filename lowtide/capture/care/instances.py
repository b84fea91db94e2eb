"""What is read and written of objects, told to the follower of the program that does so (`follower.py`), in its own thread.

Classes of such objects note it of their instances, for as long as somebody follows one of them.
"""

from __future__ import annotations

import os
import sys
import threading
import types
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import torch

from lowtide.base.places import ABSENT, EVERYTHING
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError

CALL_BEFORE = "call it once before the step, with the same arguments: what it remembers then is found by each step"
PACKAGE_FOLDER = f"{Path(__file__).parents[2]}{os.sep}"
_HEAP, IMMUTABLE = 1 << 9, 1 << 8  # flags of types: made by a class statement; closed to changes
_MARK = "_lowtide_notes"  # on what notes
_HOOKS = ("__getattribute__", "__setattr__", "__delattr__")

_lock = threading.Lock()
_patched: dict[type, int] = {}  # how many captures note what is read of its instances
_originals: dict[type, dict[str, Any]] = {}  # what those classes had of their own


listener: ContextVar[Any] = ContextVar("listener", default=None)  # the `Follower` of the program that this thread captures


def read(item: Any, name: str, *, by_user: bool = True) -> None:
    """An attribute of an object, or of a torch module, is read in this thread."""
    if (follower := listener.get()) is not None and (not name.startswith("__") or name == EVERYTHING):
        follower.read(item, name, by_user=by_user)


def read_of_tensor(tensor: torch.Tensor, name: str) -> Any:
    """An attribute that the caller's tensor has of its own is read in this thread; ABSENT where it has none."""
    if (follower := listener.get()) is not None:
        follower.note(tensor, name, f"attribute {name!r} of a tensor")
    return vars(tensor).get(name, ABSENT)


def lies_in_array(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies on the memory of an array that the program which this thread follows has not made itself."""
    return (follower := listener.get()) is not None and follower.lies_in_array(tensor)


def refuse_remembered(tensor: torch.Tensor, operator: str) -> None:
    """Raise CaptureError where a function that remembers its answers has given a tensor that is written now: each step would write anew."""
    if (follower := listener.get()) is not None and (name := follower.remembering.with_memory(tensor)):
        raise CaptureError(
            f"operator {operator} at {users_line()} writes into what {name} remembers: write into a copy (`.clone()`), or {CALL_BEFORE}"
        )


def reaches(item: Any) -> bool:
    """Whether the program which this thread follows has found an object, and not made it."""
    return (follower := listener.get()) is not None and follower.reaches(item)


def written(item: Any, name: str) -> None:
    """An attribute of an object, or of a torch module, is about to be written in this thread."""
    if (follower := listener.get()) is not None:
        follower.write(item, name)


def noted(cls: type, mine: list[type]) -> bool:
    """Have a class note what is read of its instances; False where that cannot be, as it reads in a way of its own."""
    own: Any = cls.__getattribute__
    if hasattr(own, _MARK) and cls in mine:
        return True
    file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ".py"
    sets = type(cls).__setattr__  # a metaclass that another language wrote (pybind11's) lets nobody else set attributes
    if not cls.__flags__ & _HEAP or cls.__flags__ & IMMUTABLE or not file.endswith(".py"):
        return False
    if issubclass(cls, torch.Tensor):  # of all tensors it is noted what is set, which this would stand before
        return False
    if sets is not type.__setattr__ and not isinstance(sets, types.FunctionType):
        return False
    with _lock:
        if cls not in _patched:
            if own is not object.__getattribute__ and not hasattr(own, _MARK):
                return False
            if "__getattribute__" in vars(cls):
                return False
            _patch(cls)
        _patched[cls] = _patched.get(cls, 0) + 1
        mine.append(cls)
    return True


def _patch(cls: type) -> None:
    writes: Any = cls.__setattr__
    deletes: Any = cls.__delattr__

    def reads(self: Any, name: str) -> Any:
        read(self, name, by_user=not sys._getframe(1).f_code.co_filename.startswith(PACKAGE_FOLDER))
        return object.__getattribute__(self, name)

    def write(self: Any, name: str, value: Any) -> None:
        written(self, name)
        writes(self, name, value)

    def delete(self: Any, name: str) -> None:
        written(self, name)
        deletes(self, name)

    setattr(reads, _MARK, True)
    _originals[cls] = {name: vars(cls)[name] for name in _HOOKS if name in vars(cls)}
    for name, function in zip(_HOOKS, (reads, write, delete), strict=True):
        type.__setattr__(cls, name, function)


def let_go(cls: type) -> None:
    """A capture that had a class note what is read of its instances is over."""
    with _lock:
        _patched[cls] -= 1
        if _patched[cls]:
            return
        del _patched[cls]
        originals = _originals.pop(cls)
        for name in _HOOKS:
            if name in originals:
                type.__setattr__(cls, name, originals[name])
            else:
                type.__delattr__(cls, name)
