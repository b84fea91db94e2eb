"""What a program reads beside its model: variables and globals of its functions, attributes of objects that these lead to.

A function's code says which variables, globals and (of modules, classes and functions) attributes it names. Which attributes of an object
a program reads is seen while it runs, however far from the function the object is: for as long as a capture lasts, classes of such objects
note what is read of their instances in this thread. What a container holds is followed as a whole.
"""

from __future__ import annotations

import contextvars
import functools
import gc
import os
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lowtide.base.places import ABSENT, EVERYTHING, Beside, Position, attributes, behind, in_context, is_slot, referred, static_attribute
from lowtide.capture.care.answers import CACHED, RememberingFunctions, answers, called
from lowtide.capture.care.contents import (
    CONTAINERS,
    PLAIN,
    SPACES,
    ClassNumbers,
    WrittenAttributes,
    counts,
    moves,
    pieces,
)
from lowtide.capture.care.findings import MOST, Findings
from lowtide.capture.care.instances import PACKAGE_FOLDER, let_go, listener, noted
from lowtide.capture.care.reads import HOOKS
from lowtide.capture.care.turns import during, undoing
from lowtide.capture.effects.code import IMPORT, assigned, codes, named
from lowtide.capture.effects.stand_ins import LeavingError, is_stand_in
from lowtide.capture.sources import is_users, is_written_by_user
from lowtide.kernels.optimizers import each_of

_PACKAGE = __name__.partition(".")[0]
INTEGRATIONS = f"{PACKAGE_FOLDER}integrations{os.sep}"
_LEADING = (INTEGRATIONS, noted.__code__.co_filename)  # a class that notes what is written has functions in the places of its own
_DEEPEST, _DEEPEST_OF_MODULES, _LARGEST = 32, 4, 10_000  # containers within containers, items of one
_NOT_FOLLOWED = (*PLAIN, torch.Tensor, torch.dtype, torch.device, torch.Size, torch.Generator, types.ModuleType, types.BuiltinFunctionType)
_OF_ALL_OPTIMIZERS = frozenset({"state", "param_groups", "step", "_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"})
_OF_ALL_MODULES = frozenset(vars(nn.Module()))
_BY_OTHERS = nn.Module, torch.Tensor, *PLAIN  # of these the walk over modules and their state asks
_MEMBERS = (classmethod, staticmethod, property, functools.cached_property)
_WITHIN = ("__func__", "fget", "fset", "fdel", "func")  # of these, their functions
_CODE = (types.FunctionType, types.MethodType, functools.partial, *_MEMBERS)
_METHODS = types.BuiltinMethodType, types.MethodWrapperType
_OF_FUNCTIONS = "__code__", "__defaults__", "__kwdefaults__"


class Follower(Findings):
    """Follows one program, from its functions and its optimizer on."""

    def __init__(self, models: Sequence[nn.Module], functions: Iterable[Any], optimizer: torch.optim.Optimizer | None) -> None:
        super().__init__()
        self._own = {id(module) for model in models for module in model.modules()}
        within = () if optimizer is None else each_of(optimizer)
        self._optimizers = [each for each in within if not type(each).__module__.startswith("torch.optim.")]  # those rest on groups alone
        self._seen: dict[int, Any] = {}  # kept alive meanwhile, as what is in `_held`
        self._followed: dict[int, Any] = {}  # objects of which reads are noted
        self._closed: list[Any] = []  # objects that are looked into elsewhere, or not at all
        self._functions: list[tuple[types.FunctionType, dict[str, Any]]] = []  # the user's, and their attributes when they were found
        self.remembering = RememberingFunctions(models)
        self._touched: set[tuple[int, str]] = set()  # attributes that were written
        self._put_there: set[int] = set()  # containers that were found in such
        self._born: dict[int, Any] = {}  # objects that the program makes, as far as their classes tell
        self._words: set[str] = set()  # all names in the code of the user's functions, and texts, which may be names for `getattr`
        self._asked: set[str] = set()  # of these the ones that may not be there
        self._imports: list[tuple[str, str]] = []  # modules that functions import themselves, and the line
        self.classes: list[type] = []
        tables = [
            table for model in models for module in model.modules() for name, table in vars(module).items() if name.endswith("_hooks")
        ]
        for kind in {type(module) for model in models for module in model.modules()}:
            for base in filter(is_written_by_user, kind.__mro__):
                self._numbers.note(base)
        for root in (*functions, *tables):
            self._follow(root) if callable(root) else self._follow_code(root)
        for each in self._optimizers:
            self._follow(each)
            self._follow(type(each).step)

    def places(self) -> Beside:
        """What was read so far, and flags of classes that were set.

        Containers that the program itself fills are looked at by what they are alone.
        """
        self._note_named()
        for cls, name, old, new in [*self._numbers.others(self._places)]:
            if not counts(old, new):
                self._held.append(cls)
                self._places[id(cls), name] = Position.of(cls, name, f"attribute {name!r} of the class {cls.__name__}", cls.__module__)
                self._before[id(cls), name] = old
        self._closed += [container for container, before in self._contents if before.keys() != pieces(container).keys()]
        return Beside(tuple(self._places.values()), tuple(map(referred, (*self._followed.values(), *self._closed))))

    def objects_in(self, model: nn.Module, reads: Iterable[tuple[str, str]]) -> dict[tuple[str, str], Position]:
        """Which of these attributes of modules hold objects that are followed here, and so are no more than places."""
        modules, places = dict(model.named_modules()), dict[tuple[str, str], Position]()
        for path, name in reads:
            item = ABSENT if name == EVERYTHING else static_attribute(modules[path], name)
            objects = pieces(item).values() if isinstance(item, (dict, list, tuple)) else (item,)
            if any(id(each) in self._followed and _is_object(each) for each in objects):
                places[path, name] = Position.of(modules[path], name, f"attribute {name!r} of {path!r}", type(modules[path]).__name__)
        return places

    def containers(self) -> dict[int, Any]:
        return {id(item): item for item, _ in self._contents if id(item) not in self._put_there and not is_stand_in(item)}

    def forget(self) -> None:
        for table in vars(self).values():
            if isinstance(table, (dict, list, set, ClassNumbers, WrittenAttributes, RememberingFunctions)) and table is not self.classes:
                table.clear()

    # While the program runs.

    def read(self, item: Any, name: str, *, by_user: bool = True) -> None:
        """An attribute of some object is read. What lowtide's own code reads (a Trainer's `compute_loss`) only leads to further things."""
        if (id(item), name) in self._touched and (moves(own := static_attribute(item, name)) or id(own) in self._born):
            return  # an iterator or an object that the program has made
        if isinstance(item, nn.Module) and id(item) in self._own and not is_slot(item, name):
            if not name.endswith(HOOKS):  # those that were there have been followed, others are the program's
                self._follow_code(static_attribute(item, name))  # the rest of the model's is looked at elsewhere
            return
        if isinstance(item, torch.optim.Optimizer) and id(item) not in self._followed:  # the twin whose step is traced
            for each in self._optimizers if name not in _OF_ALL_OPTIMIZERS else ():
                if type(each) is type(item):
                    self.read(each, name, by_user=by_user)
            return
        if (id(item), name) in self._places or not (id(item) in self._followed or id(item) in self._own):
            return
        if (id(item), name) not in self._written and by_user:
            self.note(item, name, f"attribute {name!r} of a {type(item).__name__}" if name != EVERYTHING else f"a {type(item).__name__}")
        before = len(self._contents)
        self._follow(static_attribute(item, name))
        if (id(item), name) in self._touched:
            self._put_there.update(id(container) for container, _ in self._contents[before:])

    def write(self, item: Any, name: str) -> None:
        """An attribute of some object is about to be written."""
        self._touched.add((id(item), name))
        if hasattr(type(of_class := static_attribute(type(item), name)), "__set__"):  # a property's function does what is to be done
            self._follow(of_class)
        if id(item) not in self._seen and not isinstance(item, nn.Module) and attributes(item) == {}:
            self._born[id(item)] = item
        if id(item) in self._followed or is_slot(item, name):
            self._written.note(item, name)

    def _note_named(self) -> None:
        """What nobody sees the program read: attributes that its code names of functions, classes, modules; answers that are remembered."""
        for module, line in self._imports:
            self._of_import(module, line)
        for function, before in self._functions:
            optional = (name for name in self._asked if not hasattr(types.FunctionType, name))  # `__eq__` is another object at each look
            for name in sorted({*(before.keys() & self._words), *optional}):
                self.note(function, name, f"attribute {name!r} of {function.__qualname__}", function.__code__.co_filename)
        for cls, name in self._numbers.unchanged(self._words):
            self.note(cls, name, f"attribute {name!r} of the class {cls.__name__}", f"its module {cls.__module__}")
        for cached in self.remembering.functions:
            for key in (memory := answers(cached)):
                self.note(memory, key, f"an answer that {called(cached)} remembers", cached.__module__)

    # What leads to what.

    def _follow_code(self, item: Any, depth: int = 0) -> None:
        """Of what lies in a module of the model, or in a class: functions, also in tables of hooks, classes, objects of the user's."""
        kind = type(item)  # `isinstance` would read `__class__` of modules, and what reads them is noted
        if issubclass(kind, _BY_OTHERS) and not issubclass(kind, CONTAINERS):
            return
        if isinstance(item, (*_CODE, CACHED, *SPACES, type)) or moves(item) or _is_object(item):
            self._follow(item)
        elif isinstance(item, CONTAINERS) and depth < _DEEPEST_OF_MODULES and len(within := pieces(item)) < _LARGEST:
            for piece in within.values():
                self._follow_code(piece, depth + 1)

    def _follow(self, item: Any, depth: int = 0) -> None:
        item = item if type(item) is memoryview else behind(item)  # which shows itself what is written through it
        if isinstance(item, _METHODS) and (isinstance(item.__self__, CONTAINERS) or moves(item.__self__)):  # `put = kept.append`
            item = item.__self__
        if isinstance(item, _NOT_FOLLOWED) or id(item) in self._seen or len(self._seen) > MOST:
            return
        self._seen[id(item)] = item
        if isinstance(item, types.MethodType):
            self._follow(item.__func__)
            self._follow(item.__self__)
        elif isinstance(item, functools.partial):
            self.note(item, "keywords", "the keywords of a partial", "its making")
            for piece in (item.func, *item.args, *item.keywords.values()):
                self._follow(piece)
        elif isinstance(item, _MEMBERS):
            for name in _WITHIN:
                self._follow(getattr(item, name, None))
        elif isinstance(item, types.FunctionType):
            self._of_function(item)
        elif isinstance(item, type):
            if is_written_by_user(item) and not issubclass(item, nn.Module):
                noted(item, self.classes)
            self._of_class(item, all_functions=True)
        elif isinstance(item, CONTAINERS):
            self._of_container(item, depth)
        elif isinstance(item, CACHED):
            self.remembering.functions.append(item)
            self._follow(item.__wrapped__)
        elif isinstance(item, contextvars.ContextVar):
            self._of_moving(item, depth)
            self._follow(in_context(item), depth + 1)
        elif moves(item):
            self._of_moving(item, depth)
        elif isinstance(item, SPACES):
            self._spaces.append((item, dict(attributes(item))))
            for piece in [*attributes(item).values()]:
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
        if is_written_by_user(type(item)):
            self._of_class(type(item), all_functions=True)
            self._follow(attributes(item), depth + 1)

    def _of_moving(self, item: Any, depth: int) -> None:
        """With what it rests on: iterators and files, a function that it calls."""
        self._moving.add(item, next(reversed(self._places.values()), None))
        for piece in gc.get_referents(item, getattr(item, "gi_frame", None)) if depth < _DEEPEST else ():
            if moves(piece) or isinstance(piece, (tuple, types.FunctionType, types.BuiltinMethodType)):
                self._follow(piece, depth + 1)

    def reaches(self, item: Any) -> bool:
        return id(item) in self._seen

    def _of_object(self, item: Any) -> None:
        cls = type(item)
        if isinstance(item, nn.Module):
            if id(item) in self._own:
                self._closed.append(item)
            else:
                self._followed[id(item)] = item  # `nn.Module` itself notes what is read
            return
        if all(f"{base.__module__}.".startswith(f"{_PACKAGE}.") for base in cls.__mro__[:-1]):  # of functions of C it is no text
            self._closed.append(item)
            return
        if not noted(cls, self.classes):
            self._of_moving(item, 0)  # what writes to a file, as `csv.writer` does, leads to it
            return
        self._followed[id(item)] = item
        self._of_class(cls, all_functions=False)

    def _of_class(self, cls: type, *, all_functions: bool) -> None:
        """Functions of a class of the user's; of an object's class classes, and functions that Python calls unasked, as `__call__`."""
        for base in (base for kind in (cls, type(cls)) for base in kind.__mro__ if is_written_by_user(base)):
            self._numbers.note(base)
            for name, function in list(vars(base).items()):
                if all_functions or name.startswith("__") or isinstance(function, type):
                    self._follow_code(function)

    def _of_function(self, function: types.FunctionType) -> None:
        """Its variables, the globals that it names, its defaults."""
        code, table = function.__code__, function.__globals__
        if code.co_filename.startswith(PACKAGE_FOLDER):  # of an integration; what a capture itself puts around things ends with it
            for cell in function.__closure__ or () if code.co_filename.startswith(_LEADING) else ():
                self._follow(Position.of(cell).now())
            return
        cells = dict(zip(code.co_freevars, function.__closure__ or (), strict=True))
        where = f"{code.co_filename}:{code.co_firstlineno}"
        for name, cell in cells.items():
            self.note(cell, name, f"variable {name!r} of {function.__qualname__}", where)
            self._follow(Position.of(cell).now())
        if not is_users(function):
            return
        self._contents.append((function.__dict__, dict(function.__dict__)))
        self._functions.append((function, dict(function.__dict__)))
        for name in _OF_FUNCTIONS:
            if getattr(function, name) is not None:
                self.note(function, name, f"{name} of {function.__qualname__}", where)
        for piece in (function.__defaults__, function.__kwdefaults__, *function.__dict__.values()):
            self._follow(piece)
        for piece in codes(code):
            texts = {each for each in piece.co_consts if isinstance(each, str) and each.isidentifier()}
            self._words.update(piece.co_names, texts)
            self._asked.update(texts if {"getattr", "hasattr"} & {*piece.co_names} else ())
        for name in {*assigned(code)}:
            holder: Any = cells.get(name, table)
            place = Position.of(holder, name, f"{'variable' if name in cells else 'global'} {name!r}")
            self._held.append(holder)
            self._set.setdefault((id(holder), name), (place, place.now()))
        for name, chain, line in (each for piece in codes(code) for each in named(piece)):
            at = f"{code.co_filename}:{line}"
            if name in cells:
                item = Position.of(cells[name]).now()
            elif name in table:
                self.note(table, name, f"global {name!r} of {table.get('__name__', 'a module')}", at)
                self._follow(item := table[name])
            elif name.startswith(IMPORT):
                module = name.removeprefix(IMPORT)
                for each in (module, f"{table.get('__package__')}.{module}"):
                    self._imports.append((each, at))
                    self._of_import(each, at)
                continue
            else:
                continue
            self._of_chain(item, chain, at)

    def _of_import(self, name: str, line: str) -> None:
        if isinstance(module := sys.modules.get(name), types.ModuleType):
            for each in sorted(vars(module).keys() & self._words):
                self._of_chain(module, (each,), line)

    def _of_chain(self, item: Any, chain: tuple[str, ...], line: str) -> None:
        """Attributes of modules, classes and the user's functions, which say nothing of who reads them."""
        for name in chain:
            if not isinstance(item, (types.ModuleType, type)) and not (isinstance(item, types.FunctionType) and is_users(item)):
                return
            users = isinstance(item, types.FunctionType) or is_written_by_user(item)
            self.note(item, name, f"attribute {name!r} of {item.__name__}", line)
            item = static_attribute(item, name)
            if users or isinstance(item, Mapping):
                self._follow(item)
            elif attributes(item) is not ABSENT:
                self._closed.append(item)  # what libraries keep in their objects is theirs


@contextmanager
def following(
    models: Sequence[nn.Module], functions: Iterable[Any] = (), optimizer: torch.optim.Optimizer | None = None
) -> Iterator[Follower]:
    """Follow what a program reads that runs inside, in this thread; `models` are looked at elsewhere."""
    follower = Follower(models, functions, optimizer)

    def end() -> None:
        follower.turn_back()
        follower.remembering.forget()
        while follower.classes:
            let_go(follower.classes.pop())

    with undoing() as undo, during(listener, follower):
        undo(end)
        try:
            yield follower
        except LeavingError:
            follower.refuse_moved()  # another attempt would move it once more
            raise


def put_beside() -> list[tuple[Position, Any]]:
    """What the program which this thread follows has put into attributes and variables so far, but for what it has computed."""
    return [] if (follower := listener.get()) is None else follower.puts()


def containers_of(model: nn.Module) -> dict[int, Any]:
    """Lists, dictionaries and sets by id that lie in attributes of modules."""
    containers = dict[int, Any]()
    waiting = [item for module in model.modules() for name, item in vars(module).items() if name not in _OF_ALL_MODULES]
    while waiting:
        if isinstance(item := waiting.pop(), CONTAINERS) and id(item) not in containers:
            containers[id(item)] = item
            waiting.extend(within.values() if len(within := pieces(item)) < _LARGEST else ())
    return {at: item for at, item in containers.items() if not isinstance(item, (tuple, frozenset)) and not is_stand_in(item)}


def containers_beside() -> dict[int, Any]:
    """The same of objects and variables that the program which this thread follows has read so far, as far as it has not set them."""
    return {} if (follower := listener.get()) is None else follower.containers()


def _is_object(item: Any) -> bool:
    """Whether it is of a class of the user's, and no module or container."""
    return not isinstance(item, (*_NOT_FOLLOWED, *CONTAINERS, nn.Module)) and is_written_by_user(type(item))
