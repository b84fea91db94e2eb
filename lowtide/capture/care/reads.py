"""Which attributes of modules a program reads while it runs: nothing else that a module holds can change what it does."""

from __future__ import annotations

import functools
import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from inspect import getattr_static
from pathlib import Path
from types import CodeType
from typing import Any

import torch
from torch import nn
from torch.nn.modules import module as torch_module

from lowtide.base.places import ABSENT, Position, attributes
from lowtide.capture.care import turns
from lowtide.capture.care.contents import differ, is_plain, is_put
from lowtide.capture.care.instances import read, written
from lowtide.capture.care.turns import replaced
from lowtide.capture.effects.flags import Memo

_READ_ALL = frozenset({"__dict__", "__getstate__", "__deepcopy__", "__reduce_ex__", "__reduce__"})
# They look at a module's tables on its behalf.
_NOT_THE_PROGRAM = (torch_module.__file__, functools.__file__, str(Path(__file__).parents[2]))
_PASSING_ON = (__file__, turns.__file__)
HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")  # what tables of hooks are called
_PUTTING = nn.Module.register_buffer.__code__  # `self.mean = new` comes here, and looks at no other buffer


class AttributeReads:
    """The names that were read, by module. A module of which everything was read has "__dict__" among its names."""

    def __init__(self) -> None:
        self._names: dict[int, set[str]] = {}
        self._held: dict[int, dict[str, Any]] = {}  # what modules held when the program began
        self._hooks: dict[int, dict[str, dict[int, Any]]] = {}  # and their tables of hooks
        self._first: dict[int, set[str]] = defaultdict(set)  # what was read before the program put something else there
        self._written: dict[int, set[str]] = {}

    def begin(self, modules: Sequence[nn.Module]) -> None:
        """The program begins: what these modules hold now is what the step before has left."""
        self._held = {id(module): _held_by(module) for module in modules}
        self._hooks = {
            id(module): {name: dict(each) for name, each in vars(module).items() if name.endswith(HOOKS) and isinstance(each, dict)}
            for module in modules
        }
        self._first.clear()
        self._written.clear()

    def write(self, module: nn.Module, name: str) -> None:
        self._written.setdefault(id(module), set()).add(name)

    def puts(self, model: nn.Module) -> Iterator[tuple[Position, Any]]:
        """What the program has put into attributes and had not read before, but for what it has computed: it lies there after each step."""
        for path, module in model.named_modules():
            for name in self.put(module):
                yield Position.of(module, name, f"attribute {name!r} of {path or type(module).__name__!r}"), vars(module)[name]

    def put(self, module: nn.Module) -> list[str]:
        own: dict[str, Any] = attributes(module)
        written, first = self._written.get(id(module), set()), self._first[id(module)]
        unread = set[str]() if "__dict__" in first else written - first
        return sorted(name for name in unread if name in own and is_put(own[name]) and not isinstance(own[name], torch.Tensor))

    def note(self, module: nn.Module, name: str) -> None:
        at = id(module)
        if name in self._first[at]:
            return  # as most are, many times
        if name in _READ_ALL:
            if _reader().co_filename.startswith(_NOT_THE_PROGRAM):
                return
            name = "__dict__"
        self._names.setdefault(at, set()).add(name)
        initial = self._held.get(at)
        if (
            initial is not None
            and name not in self._written.get(at, ())
            and (name == "__dict__" or _now(module, name) is initial.get(name, ABSENT))
        ):
            self._first[at].add(name)

    def replaced(self, module: nn.Module) -> Iterator[tuple[str, Any, Any]]:
        """What the program found in a module, has read, and has put something else in the place of: name, before, now."""
        initial = self._held.get(id(module), {})
        own, names = attributes(module), self._first[id(module)]
        if "__dict__" in names:
            names = {*initial, *own}
        for name in sorted(names):
            before, now = initial.get(name, ABSENT), _now(module, name)
            if now is not before:
                yield name, before, now

    def memos(self, model: nn.Module) -> Iterator[Memo]:
        """The numbers and texts that the program has read and put others in the places of; hooks that it has put on or taken off."""
        for path, module in model.named_modules():
            yield from self.memos_of(path or type(module).__name__, module)

    def memos_of(self, path: str, module: nn.Module) -> Iterator[Memo]:
        for name, before, now in self.replaced(module):
            before = getattr_static(type(module), name, ABSENT) if before is ABSENT else before
            if is_plain(before) and is_plain(now) and differ(before, now):
                yield Memo(Position.of(module, name, f"attribute {name!r} of {path!r}", "its forward"), before, now, refusal(path, name))
        for name, hooks in self._hooks.get(id(module), {}).items():
            now = vars(module)[name]
            for key in sorted(hooks.keys() ^ now.keys()):
                place = Position.of(now, key, f"hook {key} in {name!r} of {path!r}", "its forward")
                yield Memo(place, hooks.get(key, ABSENT), now.get(key, ABSENT), refusal(path, name))

    def pairs(self, model: nn.Module) -> frozenset[tuple[str, str]]:
        """All of them in a model, as (path of the module, name), but for what each step puts there anew."""
        modules = dict(model.named_modules())
        return frozenset((path, name) for path, each in modules.items() for name in self._names.get(id(each), set()) - {*self.put(each)})


def refusal(path: str, name: str) -> str:
    """What is said of an attribute that each step would change."""
    return (
        f"module {path!r} changes its attribute {name!r} in its forward, which a captured step would not: "
        "keep what changes from step to step in a buffer; if only the first call changes it, call the model once before, "
        "within torch.no_grad()"
    )


def _held_by(module: nn.Module) -> dict[str, Any]:
    """What a module holds under each name: attributes, parameters, modules. What buffers hold is the graph's."""
    own: dict[str, Any] = attributes(module)
    return {**own, **own.get("_parameters", {}), **own.get("_modules", {})}


def _now(module: nn.Module, name: str) -> Any:
    own: dict[str, Any] = attributes(module)
    return next((table[name] for table in (own.get("_modules", {}), own.get("_parameters", {}), own) if name in table), ABSENT)


@contextmanager
def following_reads() -> Iterator[AttributeReads]:
    """Note what this thread reads of any module, and what it sets. Both go through `nn.Module`, by `getattr` as well as by a dot."""
    reads = AttributeReads()
    noting = replaced(nn.Module, "__getattribute__", partial(_noting, reads)), replaced(nn.Module, "__setattr__", partial(_writing, reads))
    with noting[0], noting[1]:
        yield reads


def _writing(reads: AttributeReads, before: Callable[..., Any]) -> Callable[..., Any]:
    def writing(module: nn.Module, name: str, value: Any) -> None:
        reads.write(module, name)
        written(module, name)
        before(module, name, value)

    return writing


def _noting(reads: AttributeReads, before: Callable[..., Any]) -> Callable[..., Any]:
    def noting(module: nn.Module, name: str) -> Any:
        reads.note(module, name)
        if name == "__class__":  # which `isinstance` asks for
            return before(module, name)
        if not (name in _READ_ALL and _reader().co_filename.startswith(_NOT_THE_PROGRAM)) and not (
            name == "_buffers" and _reader() is _PUTTING
        ):
            read(module, name)
        return before(module, name)

    return noting


def _reader() -> CodeType:
    frame = sys._getframe(2)
    while frame.f_code.co_filename in _PASSING_ON and frame.f_back is not None:
        frame = frame.f_back
    return frame.f_code
