"""What a captured program takes for granted, and whether it still holds: how a model and an optimizer look, what lies beside them.

What a program has read beside its model has to be as it was by identity in each call, by value where something lies elsewhere.
Hyper-parameters have to be of the same sort: numbers, or tensors that look alike.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import repeat
from operator import contains, getitem, is_
from types import CellType, FunctionType
from typing import Any, NamedTuple

import torch
from torch import nn

from lowtide.base import places
from lowtide.base.places import Position
from lowtide.ir.graph import Graph, Kind, Slot
from lowtide.kernels.optimizers import each_of
from lowtide.runtime.caller import Caller, layout_of, looks_like
from lowtide.runtime.tokens import ContentWatch, Identity, Token, Tokens, Watch, global_hooks, switches

_TABLES = frozenset({"_parameters", "_buffers", "_modules"})
_ABOUT_FILES = frozenset({
    "_non_persistent_buffers_set", "_state_dict_hooks", "_state_dict_pre_hooks", "_load_state_dict_pre_hooks",
    "_load_state_dict_post_hooks",
})  # fmt: skip
# tables that say how the hooks of another are called; its items are what they are of
_HOW_CALLED = {
    "_forward_hooks_with_kwargs": "_forward_hooks", "_forward_hooks_always_called": "_forward_hooks",
    "_forward_pre_hooks_with_kwargs": "_forward_pre_hooks",
}  # fmt: skip
_CALLS = frozenset({"__call__", "__getattr__", "__getattribute__", "__setattr__"})


class Location(NamedTuple):
    """Where something is: "attribute" "p" of module "layer1.0"."""

    what: str
    path: str
    name: str

    def __str__(self) -> str:
        return f"{self.what} {self.name!r} of {self.path!r}" if self.path or self.name else self.what


@dataclass(frozen=True)
class Reads:
    """The attributes of modules that a program reads, as (path of the module, name); None stands for all.

    ("layer1", "__dict__") stands for all of that module.
    """

    pairs: frozenset[tuple[str, str]] | None = None

    def of_module(self, path: str, name: str) -> bool:
        return self.pairs is None or (path, name) in self.pairs or (path, "__dict__") in self.pairs

    def anywhere(self, name: str) -> bool:
        """Whether it reads an attribute of this name of any module."""
        return self.pairs is None or name in self._names or "__dict__" in self._names

    def of(self, locations: Mapping[Location, Token]) -> dict[Location, Token]:
        reads = {
            "attribute": lambda location: self.of_module(location.path, location.name),
            "class attribute": lambda location: self.anywhere(location.name),
        }
        return {location: token for location, token in locations.items() if location.what not in reads or reads[location.what](location)}

    @cached_property
    def _names(self) -> frozenset[str]:
        return frozenset(name for _, name in self.pairs or ())


EVERYTHING = Reads()


class CallerState:
    """How a caller's objects look now, and what to watch so that a change is seen without looking again."""

    def __init__(self, caller: Caller, reads: Reads = EVERYTHING, beside: places.Beside = places.NOTHING) -> None:
        self.locations: dict[Location, Token] = {}
        self._watch, self._reads, self._trains = Watch(), reads, caller.optimizer is not None
        self._known: dict[int, Token] = {}  # tensors and modules of the model: which of them, not what is in them
        self._tokens = Tokens(self._watch, self._known, _free(beside))
        self.unwatched = self._tokens.unwatched
        self._paths: list[tuple[str, nn.Module]] = []
        self._find("", caller.model)
        self._groups = {} if caller.optimizer is None else self._trained(caller.optimizer)
        for path, module in self._paths:
            self._look_at(path, module)
        for cls in dict.fromkeys(cls for _, module in self._paths for cls in type(module).__mro__):
            self._look_at_class(cls)
        for name, table in global_hooks().items():
            self._put("hooks", "", name, self._tokens.of(table))
        self._put("switches of torch", "", "", switches())

    def watched(self) -> Watch:
        return self._watch.sealed()

    def _put(self, what: str, path: str, name: str, token: Token) -> None:
        self.locations[Location(what, path, name)] = token

    def _find(self, path: str, module: nn.Module) -> None:
        """Number modules and tensors in their order; what is there twice has one number, and so does what replaces it in both places."""
        if id(module) in self._known:
            return
        self._known[id(module)] = "module", len(self._known)
        self._paths.append((path, module))
        for table in (module._parameters, module._buffers):
            for tensor in table.values():
                if tensor is not None:
                    self._known.setdefault(id(tensor), ("tensor", len(self._known)))
        for name, child in module._modules.items():
            if child is not None:
                self._find(f"{path}.{name}" if path else name, child)

    def _trained(self, optimizer: torch.optim.Optimizer) -> dict[int, tuple[int, int]]:
        """Where each parameter is in the optimizer's groups."""
        self._watch.groups(optimizer)
        for group in optimizer.param_groups:
            self._watch.container(group["params"])
        for number, each in enumerate(each_of(optimizer)):
            path = str(number or "")
            self._watch.container(each.param_groups)
            self._put("class of the optimizer", path, "", type(each))
            self._watch.container(each.__dict__)
            own = vars(each).get("step")  # a scheduler's wrapper around the class's step only counts
            counts = getattr(own, "_wrapped_by_lr_sched", False) and getattr(own, "__wrapped__", None) is type(each).step
            self._put("step of the optimizer", path, "", self._tokens.of(None if counts else own))
        self._put("groups of the optimizer", "", "", tuple(len(group["params"]) for group in optimizer.param_groups))
        return {id(each): (at, index) for at, group in enumerate(optimizer.param_groups) for index, each in enumerate(group["params"])}

    def _look_at(self, path: str, module: nn.Module) -> None:
        self._watch.module(module)
        self._watch.container(module.__dict__)
        self._put("class", path, "", type(module))
        for name, item in module.__dict__.items():
            if self._counts(path, module, name):
                # The program reads a tensor anew in each step.
                place = Location("attribute", path, name)
                self.locations[place] = torch.Tensor if type(item) is torch.Tensor else self._tokens.of(item, place)
        for name, parameter in module._parameters.items():
            self._put("parameter", path, name, None if parameter is None else self._parameter(parameter))
        for what, tables in (("buffer", module._buffers), ("module", module._modules)):
            for name, each in tables.items():
                own = self._of_own_class(each) if isinstance(each, torch.Tensor) else ()
                self._put(what, path, name, None if each is None else (self._known[id(each)], *own))
        for name in _TABLES:
            self._watch.container(module.__dict__[name])

    def _counts(self, path: str, module: nn.Module, name: str) -> bool:
        """Whether a program may read this attribute of a module, or torch does where it calls it."""
        if name in _HOW_CALLED:
            return bool(module.__dict__.get(_HOW_CALLED[name], True))
        return name not in _TABLES and name not in _ABOUT_FILES and (name.endswith("_hooks") or self._reads.of_module(path, name))

    def _parameter(self, parameter: torch.Tensor) -> Token:
        if self._trains:  # where nothing is differentiated, neither matters: a small network's call is short
            self._watch.parameter(parameter)
        hooks = tuple(self._tokens.of(getattr(parameter, name, None)) for name in ("_backward_hooks", "_post_accumulate_grad_hooks"))
        own = self._of_own_class(parameter)
        return self._known[id(parameter)], type(parameter), parameter.requires_grad, self._groups.get(id(parameter)), hooks, *own

    def _of_own_class(self, tensor: torch.Tensor) -> tuple[Token, ...]:
        """Which one it is, of a class that may keep more than numbers; where it is not read anew in each call, of what it is made."""
        if type(tensor) in _PLAIN_TENSORS:
            return ()
        self._watch.container(tensor.__dict__)
        parts = () if self._trains or not hasattr(tensor, "__tensor_flatten__") else tensor.__tensor_flatten__()[0]
        return Identity(tensor), *(Identity(getattr(tensor, name)) for name in parts)

    def _look_at_class(self, cls: type) -> None:
        """What a class of the model's modules brings, torch's base apart: functions, and what else the program reads."""
        if cls in (object, nn.Module):
            return
        self._watch.container(cls.__dict__)
        for name, item in cls.__dict__.items():
            if name in _CALLS or (not name.startswith("__") and (isinstance(item, FunctionType) or self._reads.anywhere(name))):
                self._put("class attribute", f"{cls.__module__}.{cls.__qualname__}", name, self._tokens.of(item))


_PLAIN_TENSORS = (torch.Tensor, nn.Parameter, nn.Buffer)


@dataclass(frozen=True)
class SettingsCheck:
    """What the optimizer's settings, and the numbers in its state, must be."""

    numbers: tuple[Slot, ...]
    tensors: tuple[tuple[Slot, tuple[Any, ...]], ...]  # shape, strides, dtype, device

    @classmethod
    def of(cls, graph: Graph, slots: Sequence[Slot]) -> SettingsCheck:
        """The check for the inputs of a graph, which `slots` hold."""
        of_optimizer = [pair for pair in zip(slots, graph.inputs, strict=True) if pair[0].table in ("group", "state", "optimizer")]
        numbers = tuple(slot for slot, value in of_optimizer if value.storage.kind is Kind.SCALAR)
        pairs = [(slot, value) for slot, value in of_optimizer if slot.table == "group"]
        return cls(numbers, tuple((slot, layout_of(value)) for slot, value in pairs if value.storage.kind is not Kind.SCALAR))

    def hold(self, read: Callable[[Slot], Any]) -> bool:
        """Whether what `read` finds in the slots now is of the same sort."""
        if not all(isinstance(item := read(slot), (int, float)) and not isinstance(item, bool) for slot in self.numbers):
            return False
        for slot, layout in self.tensors:
            item = read(slot)
            if not isinstance(item, torch.Tensor) or not looks_like(item, layout):
                return False
        return True


class BesideWatch:
    """The places that a program has read, as they were when this was made."""

    def __init__(self, beside: places.Beside) -> None:
        self._found = beside
        self._tokens = self._looked()
        self._sealed: _Sealed | None = _Sealed(beside.places, self._contents)

    def holds(self) -> bool:
        """Whether a program that has read them then reads the same now."""
        if self.unmoved():
            return True
        if self._looked() != self._tokens:
            self._sealed = None  # it would keep what is gone alive
            return False
        self._sealed = _Sealed(self._found.places, self._contents)
        return True

    def unmoved(self) -> bool:
        """Whether the same objects lie there; False may also be said of what only looks alike."""
        return self._sealed is not None and self._sealed.same()

    def changes(self) -> list[tuple[Position, Token, Token]]:
        """The places that look otherwise now, with how they looked, and how they look."""
        triples = zip(self._found.places, self._tokens, self._looked(), strict=True)
        return [(place, old, new) for place, old, new in triples if old != new]

    def _looked(self) -> list[Token]:
        known = {id(item): Identity(item) for each in self._found.followed if (item := each()) is not None}
        self._contents = ContentWatch()
        tokens = Tokens(self._contents, known, _free(self._found))
        self.unwatched = tokens.unwatched
        return [places.ABSENT if place.holder is None else tokens.of(place.now(), place) for place in self._found.places]


class _Sealed:
    """The objects that lie in places, and in containers there."""

    def __init__(self, positions: tuple[Position, ...], contents: ContentWatch) -> None:
        direct = [place for place in positions if _is_direct(place.holder)]
        self._holders = [place.holder for place in direct]
        self._attributes = ["cell_contents" if isinstance(place.holder, CellType) else place.name for place in direct]
        self._items = [place.now() for place in direct]
        pairs = [(place, list(place.tables())) for place in positions if not _is_direct(place.holder)]
        there = [(table, place.name) for place, tables in pairs for table, has in tables if has]
        absent = [(table, place.name) for place, tables in pairs for table, has in tables if not has]
        self._tables, self._names = [table for table, _ in there], [name for _, name in there]
        self._without, self._missing = [table for table, _ in absent], [name for _, name in absent]
        self._held = [*map(getitem, self._tables, self._names)]
        self._other = [place for place, tables in pairs if _is_kept_elsewhere(place, tables)]
        self._others = [place.now() for place in self._other]
        self._contents = contents
        contents.seal()

    def same(self) -> bool:
        try:
            return (
                all(map(is_, map(getitem, self._tables, self._names), self._held))
                and not any(map(contains, self._without, self._missing))
                and all(map(is_, map(getattr, self._holders, self._attributes, repeat(places.ABSENT)), self._items))
                and all(place.now() is item for place, item in zip(self._other, self._others, strict=True))
                and self._contents.same()
            )
        except (KeyError, ValueError):  # a name is gone, or a variable
            return False


def _is_direct(holder: Any) -> bool:
    """Whether what lies there is an attribute of the holder's in Python itself: of a function, or of a variable that has a value."""
    return isinstance(holder, FunctionType) or (isinstance(holder, CellType) and holder != CellType())


def _is_kept_elsewhere(place: Position, tables: Sequence[tuple[Mapping[str, Any], bool]]) -> bool:
    """Whether no table holds what lies there: a name in it may stand for what an object keeps by itself, as `__slots__` do."""
    item = next((table[place.name] for table, has in tables if has), places.ABSENT)
    return not tables or item is not place.now()


class Premises:
    """How a caller's objects, and what lies `beside`, looked when they were captured, as far as the program reads them.

    Asking again compares identities, in microseconds; only where something was put elsewhere does it look anew, and compares values.
    """

    def __init__(self, caller: Caller, reads: Reads, beside: places.Beside = places.NOTHING, assigned: Iterable[Slot] = ()) -> None:
        """`assigned`: what the program's steps set."""
        self._caller, self._reads, self._found, self.beside = caller, reads, beside, BesideWatch(beside)
        state = self._state()
        self._locations = state.locations
        self._watch: Watch | None = state.watched()
        self.unwatched = [*state.unwatched, *self.beside.unwatched]  # places that hold too much
        modules = dict(caller.model.named_modules())
        paths = {id(module): path for path, module in modules.items()}
        pairs = [str(slot.path[0]).rpartition(".")[::2] for slot in assigned if slot.table in ("attribute", "buffer")]
        pairs += [(paths[id(module)], name) for get, name in beside.put if id(module := get()) in paths]
        self._put = [(modules[path], name, reads.of_module(path, name)) for path, name in dict.fromkeys(pairs) if path in modules]

    def holds(self) -> bool:
        """Whether a program that was captured then is right now."""
        if not self.beside.holds():
            return False
        if self._watch is not None and self._watch.same():
            return True
        state = self._state()
        if state.locations != self._locations:
            self._watch = None  # it would keep what is gone alive
            return False
        self._watch = state.watched()
        return True

    def unmoved(self) -> bool:
        """Whether nothing was put elsewhere since it was last asked; False may also be said of what only looks alike."""
        return self._watch is not None and self.beside.unmoved() and self._watch.same()

    def note_put(self) -> None:
        """A step has run: what it has put into modules is no change of the caller's, and what lay there before is let go."""
        if (watch := self._watch) is not None:
            for module, name, is_read in self._put:
                watch.note(module.__dict__, name, is_read=is_read)
                watch.note(module._buffers, name, is_read=True)

    def other_numbers(self) -> list[Position]:
        """The places in which another number lies now, those within lists and dictionaries among them."""
        now = self._state().locations
        own = [(at, old, now.get(at, _ABSENT)) for at, old in self._locations.items() if at.what == "attribute"]
        modules = dict(self._caller.model.named_modules())
        places = [
            (Position.of(modules[at.path], at.name, str(at), ""), old, new) for at, old, new in own if old != new and at.path in modules
        ]
        return [number for place, old, new in (*self.beside.changes(), *places) for number in _numbers_in(place, place.now(), old, new)]

    def change(self) -> str:
        """What does not hold any more, in words; empty where all does."""
        for place, old, new in self.beside.changes():
            return f"{place} {_changed(old, new)}"
        return first_difference(self._locations, self._state().locations)

    def _state(self) -> CallerState:
        return CallerState(self._caller, self._reads, self._found)


def first_difference(before: Mapping[Location, Token], now: Mapping[Location, Token]) -> str:
    """The first place that looks otherwise, in words: "attribute 'p' of 'layer1.drop' was 0.1 and is 0.2"; empty where there is none."""
    for location in (*before, *now):
        old, new = before.get(location, _ABSENT), now.get(location, _ABSENT)
        if old != new:
            return f"{location} {_changed(old, new)}"
    return ""


def _changed(old: Token, new: Token) -> str:
    shown = (_shown(old), _shown(new))
    return f"was {shown[0]} and is {shown[1]}" if shown[0] != shown[1] else f"has changed{_where(old, new)}"


_ABSENT = places.ABSENT


def _free(beside: places.Beside) -> dict[int, frozenset[Any]]:
    """By id of a container the keys of the numbers that each step asks for."""
    free = dict[int, frozenset[Any]]()
    for container, key in beside.free:
        free[id(container())] = free.get(id(container()), frozenset()) | {key}
    return free


def _numbers_in(place: Position, item: Any, old: Token, new: Token) -> Iterator[Position]:
    """The places of other numbers in what lies in a place, given how it looked and how it looks."""
    if {_kind(old), _kind(new)} <= {int, float}:
        yield place
    elif type(item) in (dict, list) and (entries := _entries_of(old)) and len(others := _entries_of(new)) == len(entries) == len(item):
        for key, one, two in zip(item if type(item) is dict else range(len(item)), entries, others, strict=True):
            if one != two and (type(item) is list or one[0] == two[0]):
                one, two = (one[1], two[1]) if type(item) is dict else (one, two)
                yield from _numbers_in(Position.of(item, key, f"item {key!r} of {place.text}", place.line), item[key], one, two)


def _entries_of(token: Token) -> tuple[Any, ...]:
    """The tokens of what lies in a list, of a dictionary pairs; empty for anything else, and for what is compared as a whole."""
    content = _kind(token)
    known = isinstance(content, tuple) and len(content) == 2 and content[0] in (dict, list) and isinstance(content[1], tuple)
    return content[1] if known else ()


def _kind(token: Token) -> Any:
    return token[0] if isinstance(token, tuple) and token else None


def _where(old: Token, new: Token) -> str:
    """What within two things differs, by the name under which it lies: ": 'p' was 0.1 and is 0.2"; empty where no name leads there."""
    name = ""
    while (names := _by_name(old)) and (others := _by_name(new)):
        name = next((each for each in {**names, **others} if names.get(each, _ABSENT) != others.get(each, _ABSENT)), "")
        if not name:
            return ""
        old, new = names.get(name, _ABSENT), others.get(name, _ABSENT)
    shown = (_shown(old), _shown(new))
    return f": {name!r} was {shown[0]} and is {shown[1]}" if name and shown[0] != shown[1] else ""


def _by_name(token: Token) -> dict[str, Token]:
    """The tokens of what an object or a dictionary holds under a text; empty for others."""
    entries = token[1] if isinstance(token, tuple) and len(token) == 2 and isinstance(token[1], tuple) else ()
    pairs = [each for each in entries if isinstance(each, tuple) and len(each) == 2 and isinstance(each[0], tuple)]
    return {key[1]: value for key, value in pairs if len(key) == 2 and key[0] is str}


def _shown(token: Token) -> str:
    if token is _ABSENT:
        return token
    if isinstance(token, tuple) and len(token) == 2 and isinstance(token[0], type):
        kind, value = token
        return value if kind in (float, complex) else repr(value) if kind in (bool, int, str, type(None)) else f"a {kind.__name__}"
    return repr(token) if isinstance(token, Identity) else token.__qualname__ if isinstance(token, type) else "something else"
