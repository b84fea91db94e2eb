"""Whether a capture's fake tensors are all gone when it is over, and who still holds one if not."""

from __future__ import annotations

import gc
import types
import weakref
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef

from lowtide.base.process import look_at_all
from lowtide.capture.blocks import address
from lowtide.capture.care.answers import WITHIN_ANSWERS, forget_repeated
from lowtide.capture.draft import Draft
from lowtide.capture.effects.stand_ins import LeavingError
from lowtide.errors import CaptureError
from lowtide.ir import tree
from lowtide.ir.graph import Node, Storage

NAMELESS = "a graph of autograd"  # nothing of Python's holds it
_IN_A_CIRCLE = (
    "writes in place may have closed a circle in it, which eager PyTorch would never free either: write out of place (`y = y + x`). Or an "
    "extension holds it: let it go"
)
_KEPT_STATE = (
    "the program keeps a state of torch's generator (`torch.get_rng_state()`), which a captured step would not take anew: take it before "
    "the step (`state = torch.get_rng_state(); loss = step(...)`)"
)
_FARTHEST = 6  # references between a fake and the name that it is told by
_WHAT_TO_DO = (
    "a captured step would not put anything there again. Put the tensor into a plain list or dict (of no class of your own), or into an "
    "attribute, that your functions lead to, where each step puts its own, or return it from loss() or after_backward(): `value, norm = "
    "step(...)`"
)


@dataclass
class LeakWatch:
    """Remembers, without holding them, the storages that a capture has made."""

    names: bool = True  # whoever holds one of them, which takes seconds where there are many objects
    storages: list[tuple[StorageWeakRef, Storage]] = field(default_factory=list)
    nodes: list[Node] = field(default_factory=list)
    states: list[weakref.ref[torch.Tensor]] = field(default_factory=list)  # of torch's generator, made up for the program that asked

    def note(self, draft: Draft) -> None:
        """What a draft has seen, which lets go of it."""
        self.storages.extend(draft.storages())
        self.nodes.extend(draft.nodes)
        draft.let_go()

    def refuse_survivors(self) -> None:
        """Raise CaptureError if a fake of the capture is still held, after taking it out of the list that holds it.

        Memoised functions are made to forget: what they gave is computed in each step, where that is the same in each.
        """
        torch.clear_autocast_cache()  # where autocast is on around the capture, its cast weights are there
        if not self._alive() and not any(each() is not None for each in self.states):
            return
        gc.collect()  # of what was made since the capture began
        if any(each() is not None for each in self.states):
            raise CaptureError(_KEPT_STATE)
        if not (alive := self._alive()):
            return
        fakes = _fakes_on(alive)
        look_at_all()
        if memoised := _memoised(fakes):
            forget_repeated(memoised, alive, self.nodes)
        if memoised or self.names:
            fakes.clear()
            gc.collect()
            if not (alive := self._alive()):
                return
            fakes = _fakes_on(alive)
        holding = [f"{_holder(fake)}{self._made_at(alive[address(fake)])}" for fake in fakes] if self.names else []
        _take_out(fakes)
        holders = list(dict.fromkeys(holding)) or [NAMELESS]
        named = [holder for holder in holders if not holder.startswith(NAMELESS)]
        what_to_do = _WHAT_TO_DO if named else _IN_A_CIRCLE
        raise LeavingError(f"{' and '.join((named or holders)[:3])} still holds what the program computed; {what_to_do}")

    def _alive(self) -> dict[int, Storage]:
        return {ref.cdata: storage for ref, storage in self.storages if not ref.expired()}

    def _made_at(self, storage: Storage) -> str:
        source = next((node.source for node in self.nodes if any(out.storage is storage for out in node.results)), None)
        return "" if source is None else f" (made at {source.file}:{source.line})"


def _fakes_on(alive: dict[int, Storage]) -> _Path:
    return _Path([item for item in gc.get_objects() if issubclass(type(item), FakeTensor) and address(item) in alive])


def _referrers(*items: Any) -> list[Any]:
    """Who holds one of these objects, but for the frames and lists of this search."""
    holders = gc.get_referrers(*items)
    return [each for each in holders if each is not items and not isinstance(each, types.FrameType) and type(each) is not _Path]


class _Path(list[Any]):
    """Objects in a list of its own class, so that the search does not find itself."""


def _holder(fake: torch.Tensor) -> str:
    """Who holds a fake, by the nearest name: "the global norms[0] of train", "attribute 'last' of a Logger", else by type."""
    paths = [_Path([fake])]
    first = ""
    while paths:
        path = paths.pop(0)
        for holder in _referrers(path[-1]):
            if holder is paths or any(holder is item for item in path):
                continue
            if (name := _name(holder, path[-1])) is not None:
                return name
            first = first or f"a {type(holder).__name__}"
            if len(path) < _FARTHEST and not issubclass(type(holder), torch.Tensor):
                paths.append(_Path([*path, holder]))
    return first or NAMELESS


def _name(holder: Any, item: Any) -> str | None:
    """What people call `item` within `holder`; None where the holder is nameless itself."""
    if isinstance(holder, types.CellType):
        return _name_of_cell(holder)
    if isinstance(holder, types.GeneratorType):
        return f"the generator {holder.__name__!r}"
    if isinstance(holder, dict) and "__name__" in holder and "__builtins__" in holder:
        return f"the global {_key(holder, item)!r} of {holder['__name__']}"
    if isinstance(holder, dict):
        owner = next((owner for owner in gc.get_referrers(holder) if getattr(owner, "__dict__", None) is holder), None)
        return None if owner is None else f"attribute {_key(holder, item)!r} of a {type(owner).__name__}"
    key = _key(tree.attributes_of(holder), item)
    return None if key is None else f"attribute {key!r} of a {type(holder).__name__}"


def _key(table: dict[Any, Any], item: Any) -> Any:
    return next((key for key, value in table.items() if value is item), None)


def _name_of_cell(cell: types.CellType) -> str | None:
    holder: Any
    for holder in gc.get_referrers(cell):
        for function in gc.get_referrers(holder) if isinstance(holder, tuple) else ():
            own = str(getattr(function, "__module__", "")).partition(".")[0] == __name__.partition(".")[0]  # which names nothing to a user
            if isinstance(function, types.FunctionType) and function.__closure__ is holder and not own:
                at = [each is cell for each in function.__closure__].index(True)
                return f"the variable {function.__code__.co_freevars[at]!r} of {function.__qualname__}"
    return None


def _memoised(fakes: _Path) -> list[Any]:
    """Every `functools.lru_cache` that holds a fake, straight or within what it holds."""
    holders, functions = fakes, dict[int, Any]()
    for _ in range(WITHIN_ANSWERS):
        holders = _Path(_referrers(*holders))
        functions |= {id(holder): holder for holder in holders if callable(getattr(type(holder), "cache_clear", None))}
    return [*functions.values()]


def _take_out(fakes: _Path) -> None:
    """Take fakes out of plain lists: they cannot have been there before the capture."""
    ids = {id(fake) for fake in fakes}
    for holder in _referrers(*fakes):
        if type(holder) is list:
            holder[:] = [item for item in holder if id(item) not in ids]
