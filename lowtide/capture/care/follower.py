"""What a program reads beside its model: variables and globals of its functions, attributes of objects that these lead to.

A function's code says which variables, globals and (of modules and classes) attributes it names. Which attributes of an object a program
reads is seen while it runs, however far from the function the object is: for as long as a capture lasts, classes of such objects note
what is read of their instances in this thread. What a container holds is followed as a whole.
"""

from __future__ import annotations

import collections
import dis
import functools
import os
import sys
import threading
import types
from collections.abc import Container, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from lowtide.base.places import ABSENT, EVERYTHING, Beside, Position, attributes, held, referred
from lowtide.capture.care.contents import (
    CONTAINERS,
    DRAWN,
    MOVING,
    PLAIN,
    are_plain,
    differ,
    is_plain,
    pieces,
    position,
    put_back,
    turn_back,
)
from lowtide.capture.care.turns import undoing
from lowtide.capture.effects.containers import is_stand_in
from lowtide.capture.effects.flags import Memo
from lowtide.capture.sources import is_library, is_users, users_line
from lowtide.kernels.optimizers import each_of

_PACKAGE_FOLDER, _PACKAGE = f"{Path(__file__).parents[2]}{os.sep}", __name__.partition(".")[0]
INTEGRATIONS = f"{_PACKAGE_FOLDER}integrations{os.sep}"
_MOST = 20_000  # objects that are followed
_DEEPEST, _LARGEST = 4, 1000  # containers within containers, items of one
_NOT_FOLLOWED = (*PLAIN, torch.Tensor, torch.dtype, torch.device, torch.Size, torch.Generator, types.ModuleType, types.BuiltinFunctionType)
_HEAP, _IMMUTABLE = 1 << 9, 1 << 8  # flags of types: made by a class statement; closed to changes
_OF_ALL_OPTIMIZERS = frozenset({"state", "param_groups", "step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"})
_NAMES, _ATTRIBUTES = ("LOAD_GLOBAL", "LOAD_NAME", "LOAD_DEREF"), ("LOAD_ATTR", "LOAD_METHOD")

_MARK = "_lowtide_notes"  # on what notes
_HOOKS = ("__getattribute__", "__setattr__", "__delattr__")

_lock = threading.Lock()
_patched: dict[type, int] = {}  # how many captures note what is read of its instances
_originals: dict[type, dict[str, Any]] = {}  # what those classes had of their own
_active: dict[int, Follower] = {}  # by thread


class Follower:
    """Follows one program, from its functions and its optimizer on."""

    def __init__(self, models: Sequence[nn.Module], functions: Iterable[Any], optimizer: torch.optim.Optimizer | None) -> None:
        self._own = {id(module) for model in models for module in model.modules()}
        within = () if optimizer is None else each_of(optimizer)
        self._optimizers = [each for each in within if not type(each).__module__.startswith("torch.optim.")]  # those rest on groups alone
        self._places: dict[tuple[int, str], Position] = {}
        self._before: dict[tuple[int, str], Any] = {}  # what lay there when it was found
        self._written: dict[tuple[int, str], tuple[Any, Any]] = {}  # the object, and what lay there before
        self._seen: dict[int, Any] = {}  # kept alive meanwhile, so that ids stay their own, and what is in `_held`
        self._held: list[Any] = []
        self._followed: dict[int, Any] = {}  # objects of which reads are noted
        self._closed: list[Any] = []  # objects that are looked into elsewhere, or not at all
        self._contents: list[tuple[Any, dict[Any, Any]]] = []  # containers, and what they held when they were found
        self._large: list[tuple[Any, int]] = []  # those that are too large for that, and how much
        self._moving: list[tuple[Any, Any]] = []  # files, generators, counters, and where they were
        self._numbers: dict[type, dict[str, Any]] = {}  # the numbers and texts in attributes of classes
        self._spaces: list[tuple[types.SimpleNamespace, dict[str, Any]]] = []  # of which no class notes what is read, and what they held
        self.classes: list[type] = []
        tables = [
            table for model in models for module in model.modules() for name, table in vars(module).items() if name.endswith("_hooks")
        ]
        for kind in {type(module) for model in models for module in model.modules()}:
            for base in _users_bases(kind):
                self._note_numbers(base)
        for found in (*functions, *tables):
            self._follow(found) if callable(found) else self._follow_code(found)
        for each in self._optimizers:
            self._follow(each)
            self._follow(type(each).step)

    def places(self) -> Beside:
        """What was read so far. Containers that the program itself fills are looked at by what they are alone."""
        self._closed += [container for container, before in self._contents if before.keys() != pieces(container).keys()]
        return Beside(tuple(self._places.values()), tuple(map(referred, (*self._followed.values(), *self._closed))))

    def memos(self, summed: Container[tuple[int, str]] = ()) -> tuple[Memo, ...]:
        """The numbers and texts that the program has read and put others in the places of, but for the `summed` attributes."""
        found = []
        for key, place in self._places.items():
            old, new = self._before[key], place.now()
            writes = isinstance(place.holder, (types.CellType, dict, nn.Module, type)) or key in self._written
            if writes and key not in summed and issubclass(type(new), PLAIN) and differ(old, new):
                found.append(Memo(place, old, new, changed_each_time(f"{place} was {old!r} and is {new!r}")))
        return tuple(found)

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
                if differ(before[name], now[name]):
                    return f"a {type(container).__name__} that it reads had {before[name]!r} at {name!r} and has {now[name]!r}"
        for container, size in self._large:
            if (now_size := len(pieces(container))) != size and not is_stand_in(container):
                return f"a {type(container).__name__} that it reaches had {size} items and has {now_size}"
        for cls, name, old in self._other_numbers():
            once = ", which a first call may do once: call the model before" if isinstance(old, bool) else ""
            return f"attribute {name!r} of the class {cls.__name__} was {old!r} and is {vars(cls).get(name, ABSENT)!r}{once}"
        for space, before in self._spaces:
            if (name := _difference(before, vars(space))) is not None:
                return f"attribute {name!r} of a SimpleNamespace is set, and only those of an object of your own class are followed"
        moved = next((item for item, at in self._moving if position(item) != at), None)
        if isinstance(moved, DRAWN):
            return f"a {type(moved).__name__} is drawn from; draw with torch, or before the step and pass it with the batch"
        return "" if moved is None else f"a {type(moved).__name__} that it reaches is read or written"

    def puts(self) -> list[tuple[Any, str, Any]]:
        """The numbers and texts that the program has put into attributes of objects of the user's, and had not read before."""
        found = [(item, name, held(item, name)) for (_, name), (item, _) in self._written.items() if _is_of_users(type(item))]
        return [(item, name, now) for item, name, now in found if is_plain(now) and self.only_writes(item, name)]

    def only_writes(self, item: Any, name: str) -> bool:
        """Whether the program has written an attribute of an object, and did not read before what lay there."""
        return (id(item), name) in self._written and (id(item), name) not in self._places

    def leads_to(self, item: Any) -> bool:
        """Whether an object lies now in a place that was read, or in a container."""
        return any(place.now() is item for place in self._places.values()) or any(
            piece is item for container, _ in self._contents for piece in pieces(container).values()
        )

    def take_back(self) -> None:
        for item, name, _ in self.puts():
            self._restore(item, name, self._written[(id(item), name)][1])

    def turn_back(self) -> None:
        """Generators of random numbers, arrays, namespaces and numbers of classes are as they were."""
        for item, at in self._moving:
            if position(item) != at:
                turn_back(item, at)
        for space, before in self._spaces:
            put_back(vars(space), before)
        for cls, name, number in self._other_numbers():
            type.__setattr__(cls, name, number)

    def _other_numbers(self) -> Iterator[tuple[type, str, Any]]:
        """What was another number in attributes of classes, but for those that functions name, which are noted as places."""
        for cls, numbers in self._numbers.items():
            for name, number in numbers.items():
                if (id(cls), name) not in self._places and differ(number, vars(cls).get(name, ABSENT)):
                    yield cls, name, number

    def put_back(self) -> None:
        """Undo what the program has written into attributes and containers."""
        for container, before_it in self._contents:
            put_back(container, before_it)
        for (_, name), (item, before) in self._written.items():
            self._restore(item, name, before)
        for key, place in self._places.items():
            if isinstance(holder := place.holder, nn.Module) and differ(self._before[key], place.now()):
                object.__setattr__(holder, place.name, self._before[key])

    def _restore(self, item: Any, name: str, before: Any) -> None:
        own = attributes(item)
        if own is ABSENT:
            object.__delattr__(item, name) if before is ABSENT else object.__setattr__(item, name, before)
        elif before is ABSENT:
            own.pop(name, None)
        else:
            own[name] = before

    def forget(self) -> None:
        for each in (self._places, self._before, self._written, self._seen, self._followed):
            each.clear()
        for held_here in (self._held, self._closed, self._contents, self._large, self._moving, self._numbers, self._spaces):
            held_here.clear()

    # While the program runs.

    def read(self, item: Any, name: str, *, by_user: bool = True) -> None:
        """An attribute of some object is read. What lowtide's own code reads (a Trainer's `compute_loss`) only leads to further things."""
        if isinstance(item, nn.Module) and id(item) in self._own:
            self._follow_code(held(item, name))  # the rest of the model's is looked at elsewhere
            return
        if isinstance(item, torch.optim.Optimizer) and id(item) not in self._followed:  # the twin whose step is traced
            for each in self._optimizers if name not in _OF_ALL_OPTIMIZERS else ():
                if type(each) is type(item):
                    self.read(each, name, by_user=by_user)
            return
        if (id(item), name) in self._places or id(item) not in self._followed:
            return
        if (id(item), name) not in self._written and by_user:
            self._note(item, name, f"attribute {name!r} of a {type(item).__name__}" if name != EVERYTHING else f"a {type(item).__name__}")
        self._follow(held(item, name))

    def write(self, item: Any, name: str) -> None:
        """An attribute of some object is about to be written."""
        if id(item) in self._followed:
            own = attributes(item)
            before = held(item, name) if own is ABSENT else own.get(name, ABSENT)
            self._written.setdefault((id(item), name), (item, before))

    def _note(self, holder: Any, name: str, text: str, line: str = "") -> None:
        key = id(holder), name
        if key not in self._places and len(self._places) < _MOST:
            self._held.append(holder)
            self._places[key] = place = Position.of(holder, name, text, line or users_line())
            self._before[key] = place.now()

    # What leads to what.

    def _follow_code(self, item: Any) -> None:
        """Of what lies in a module of the model: functions, also in tables of hooks."""
        if isinstance(item, (types.FunctionType, types.MethodType, functools.partial)):
            self._follow(item)
        elif isinstance(item, (classmethod, staticmethod)):
            self._follow(item.__func__)
        elif isinstance(item, property):
            self._follow(item.fget)
        elif type(item) in (dict, collections.OrderedDict) and len(item) < _LARGEST:
            for piece in item.values():
                if isinstance(piece, types.FunctionType):
                    self._follow(piece)

    def _follow(self, item: Any, depth: int = 0) -> None:
        if isinstance(item, types.BuiltinMethodType) and isinstance(item.__self__, (*CONTAINERS, *MOVING)):  # `put = kept.append`
            item = item.__self__
        if isinstance(item, _NOT_FOLLOWED) or id(item) in self._seen or len(self._seen) > _MOST:
            return
        self._seen[id(item)] = item
        if isinstance(item, types.MethodType):
            self._follow(item.__func__)
            self._follow(item.__self__)
        elif isinstance(item, functools.partial):
            self._note(item, "keywords", "the keywords of a partial", "its making")
            for piece in (item.func, *item.args, *item.keywords.values()):
                self._follow(piece)
        elif isinstance(item, (classmethod, staticmethod)):
            self._follow(item.__func__)
        elif isinstance(item, property):
            self._follow(item.fget)
        elif isinstance(item, types.FunctionType):
            self._of_function(item)
        elif isinstance(item, type):
            self._of_class(item, all_functions=True)
        elif isinstance(item, CONTAINERS):
            self._of_container(item, depth)
        elif isinstance(item, MOVING):
            self._moving += [(item, at)] if (at := position(item)) is not None else []
        elif type(item) is types.SimpleNamespace:
            self._spaces.append((item, dict(vars(item))))
            for piece in vars(item).values():
                self._follow(piece, depth + 1)
        else:
            self._of_object(item)

    def _of_container(self, item: Any, depth: int) -> None:
        held_now, changes = pieces(item), not isinstance(item, (tuple, frozenset))
        if depth >= _DEEPEST or len(held_now) > _LARGEST:
            self._large += [(item, len(held_now))] if changes else []
            return
        if changes:
            self._contents.append((item, held_now))
        for piece in held_now.values():
            self._follow(piece, depth + 1)

    def _of_object(self, item: Any) -> None:
        cls = type(item)
        if isinstance(item, nn.Module):
            if id(item) in self._own:
                self._closed.append(item)
            else:
                self._followed[id(item)] = item  # `nn.Module` itself notes what is read
            return
        if all(base.__module__.partition(".")[0] == _PACKAGE for base in cls.__mro__[:-1]):
            self._closed.append(item)
            return
        if not _noted(cls, self.classes):
            return
        self._followed[id(item)] = item
        self._of_class(cls, all_functions=False)

    def _of_class(self, cls: type, *, all_functions: bool) -> None:
        """Functions of a class of the user's; of an object's class those that Python calls unasked, as `__call__`."""
        for base in _users_bases(cls):
            self._note_numbers(base)
            for name, function in list(vars(base).items()):
                if all_functions or name.startswith("__"):
                    self._follow_code(function)

    def _note_numbers(self, cls: type) -> None:
        self._numbers.setdefault(cls, {name: item for name, item in vars(cls).items() if is_plain(item)})

    def _of_function(self, function: types.FunctionType) -> None:
        """Its variables, the globals that it names, its defaults."""
        code, table = function.__code__, function.__globals__
        if code.co_filename.startswith(_PACKAGE_FOLDER):  # of an integration; what a capture itself puts around things ends with it
            for cell in function.__closure__ or () if code.co_filename.startswith(INTEGRATIONS) else ():
                self._follow(Position.of(cell, "", "", "").now())
            return
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        where = f"{code.co_filename}:{code.co_firstlineno}"
        for name, cell in cells.items():
            self._note(cell, name, f"variable {name!r} of {function.__qualname__}", where)
            self._follow(Position.of(cell, name, "", "").now())
        if not is_users(function):
            return
        self._contents.append((function.__dict__, dict(function.__dict__)))
        for name in ("__defaults__", "__kwdefaults__"):
            if (found := getattr(function, name)) and not are_plain(found):
                self._note(function, name, f"the defaults of {function.__qualname__}", where)
                self._follow(found)
        for name, chain, line in _named(code):
            if name in cells:
                found = Position.of(cells[name], name, "", "").now()
            elif name in table:
                self._note(table, name, f"global {name!r} of {table.get('__name__', 'a module')}", f"{code.co_filename}:{line}")
                self._follow(found := table[name])
            else:
                continue
            self._of_chain(found, chain, f"{code.co_filename}:{line}")

    def _of_chain(self, found: Any, chain: tuple[str, ...], line: str) -> None:
        """Attributes of modules and classes of the user's, which say nothing of who reads them."""
        for name in chain:
            if not isinstance(found, (types.ModuleType, type)) or not _is_of_users(found):
                return
            self._note(found, name, f"attribute {name!r} of {found.__name__}", line)
            found = held(found, name)
            self._follow(found)


def _users_bases(cls: type) -> Iterator[type]:
    """A class, and those that it derives from, but for libraries' own."""
    for base in cls.__mro__:
        file = getattr(sys.modules.get(base.__module__), "__file__", None)
        if base is not object and not (isinstance(file, str) and is_library(file)):
            yield base


def _difference(before: dict[str, Any], now: dict[str, Any]) -> str | None:
    """The first name under which something else lies."""
    return next((name for name in {**before, **now} if before.get(name, ABSENT) is not now.get(name, ABSENT)), None)


def changed_each_time(change: str) -> str:
    """What is said of what each step would change."""
    return (
        f"the program changes what it rests on each time it runs, which a captured step would not: {change}; "
        "keep what changes from step to step in a buffer, or count outside of the step"
    )


def put_beside() -> list[tuple[Any, str, Any]]:
    """The numbers and texts that the program which this thread follows has put into attributes so far."""
    follower = _active.get(threading.get_ident())
    return [] if follower is None else follower.puts()


def written_of_module(module: nn.Module, name: str) -> None:
    """An attribute of a torch module is about to be written in this thread."""
    _write(module, name)


def noted_of_module(module: nn.Module, name: str) -> None:
    """An attribute of a torch module is read in this thread."""
    follower = _active.get(threading.get_ident())
    if follower is not None and (not name.startswith("__") or name == EVERYTHING):
        follower.read(module, name)


@contextmanager
def following(
    models: Sequence[nn.Module], functions: Iterable[Any] = (), optimizer: torch.optim.Optimizer | None = None
) -> Iterator[Follower]:
    """Follow what a program reads that runs inside, in this thread; `models` are looked at elsewhere."""
    thread = threading.get_ident()
    before, follower = _active.get(thread), Follower(models, functions, optimizer)

    def end() -> None:
        follower.turn_back()
        if before is None:
            _active.pop(thread, None)
        else:
            _active[thread] = before
        with _lock:
            while follower.classes:
                _let_go(follower.classes.pop())

    with undoing() as undo:
        undo(end)
        _active[thread] = follower
        yield follower


def _noted(cls: type, mine: list[type]) -> bool:
    """Have a class note what is read of its instances; False where that cannot be, as it reads in a way of its own."""
    own: Any = cls.__getattribute__
    if hasattr(own, _MARK) and cls in mine:
        return True
    file = getattr(sys.modules.get(cls.__module__), "__file__", None) or ".py"
    sets = type(cls).__setattr__  # a metaclass that another language wrote (pybind11's) lets nobody else set attributes
    if not cls.__flags__ & _HEAP or cls.__flags__ & _IMMUTABLE or not file.endswith(".py"):
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

    def read(self: Any, name: str) -> Any:
        _read(self, name)
        return object.__getattribute__(self, name)

    def write(self: Any, name: str, value: Any) -> None:
        _write(self, name)
        writes(self, name, value)

    def delete(self: Any, name: str) -> None:
        _write(self, name)
        deletes(self, name)

    setattr(read, _MARK, True)
    _originals[cls] = {name: vars(cls)[name] for name in _HOOKS if name in vars(cls)}
    for name, function in zip(_HOOKS, (read, write, delete), strict=True):
        type.__setattr__(cls, name, function)


def _let_go(cls: type) -> None:
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


def _read(item: Any, name: str) -> None:
    follower = _active.get(threading.get_ident())
    if follower is None or (name.startswith("__") and name != EVERYTHING):
        return
    follower.read(item, name, by_user=not sys._getframe(2).f_code.co_filename.startswith(_PACKAGE_FOLDER))


def _write(item: Any, name: str) -> None:
    follower = _active.get(threading.get_ident())
    if follower is not None:
        follower.write(item, name)


def _named(code: types.CodeType) -> Iterator[tuple[str, tuple[str, ...], int]]:
    """The globals and free variables that code names, each with the attributes that are read of it in a row, and the line."""
    name, chain, line, at = "", [], code.co_firstlineno, code.co_firstlineno
    for each in dis.get_instructions(code):
        at = each.starts_line or at if not isinstance(each.starts_line, bool) else getattr(each, "line_number", at) or at
        if name and each.opname in _ATTRIBUTES:
            chain.append(each.argval)
            continue
        if name:
            yield name, tuple(chain), line
            name, chain = "", []
        if each.opname in _NAMES:
            name, line = each.argval, at
    if name:
        yield name, tuple(chain), line
    for piece in code.co_consts:
        if isinstance(piece, types.CodeType):
            yield from _named(piece)


def _is_of_users(item: Any) -> bool:
    """Whether a module, or the module of a class, was written by the user."""
    module = item if isinstance(item, types.ModuleType) else sys.modules.get(item.__module__)
    if module is None or module.__name__ in sys.builtin_module_names:
        return False
    file = getattr(module, "__file__", None)
    return not (isinstance(file, str) and is_library(file))
