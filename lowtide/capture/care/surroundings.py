"""What a program can reach beside its model: variables and globals of its functions, containers and objects in them or in its batch.

A capture that fails puts them back as they were. Found are those that the functions name; what is reached in other ways is not. An
optimizer's settings are put back after every capture: a program that changes them itself is refused.
"""

from __future__ import annotations

import collections
import functools
import sys
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch
from torch import nn

from lowtide.base.places import ABSENT, Position, put_entry, slots_of, static_attribute
from lowtide.base.skeleton import is_plain_object
from lowtide.capture.care.contents import pieces, put_back
from lowtide.capture.care.follower import INTEGRATIONS
from lowtide.capture.care.generators import is_default
from lowtide.capture.care.instances import IMMUTABLE
from lowtide.capture.care.turns import Undo, undoing
from lowtide.capture.effects.code import codes, rewrite
from lowtide.capture.effects.stand_ins import KINDS, is_stand_in
from lowtide.capture.sources import is_users, is_written_by_user
from lowtide.errors import CaptureError
from lowtide.ir import tree
from lowtide.kernels.optimizers import each_of

_MOST = 20_000  # objects that are looked at
_CONTAINERS = (list, dict, set, collections.deque)
_WITHIN = ("fget", "fset", "__func__", "func")  # of properties, class methods, partial methods
_LEFT_ALONE = (type(None), bool, int, float, complex, str, bytes, types.ModuleType, torch.Tensor, torch.optim.Optimizer)
_OPENED = (*_CONTAINERS, weakref.WeakSet, weakref.WeakKeyDictionary, weakref.WeakValueDictionary, torch.optim.lr_scheduler.LRScheduler)

_NO_OBJECTS = (torch.Tensor, nn.Module, type, types.FunctionType, types.MethodType)
OWN_OF_MODULES = frozenset(vars(nn.Module()))


@contextmanager
def put_back_on_failure(
    functions: Iterable[Any], objects: Iterable[Any] = (), *, models: Iterable[nn.Module] = (), always: bool = False, classes: bool = False
) -> Iterator[None]:
    """Where what runs inside raises, or `always`, what these functions and objects lead to is put back: contents, attributes, variables.

    Of the tables of `models` somebody else takes care. `classes`: these functions find things of the classes that they have elsewhere.
    """
    modules = {id(module): module for model in models for module in model.modules()}
    seen, slots = {*modules}, [restore for module in modules.values() for restore in _of_slots(module)]
    with undoing() as undo:
        waiting = slots + _found([*functions, *objects], {id(item) for item in objects}, seen, undo if classes else None)

        def restore_all() -> None:
            for restore in waiting:
                restore()

        undo(restore_all)
        yield
        if not always:
            waiting.clear()


def methods_of(models: Iterable[nn.Module]) -> list[Any]:
    """The classes of all modules, their functions but for those that libraries wrote, hooks, and what attributes hold that is called."""
    modules = [module for model in models for module in model.modules()]
    classes = {cls: None for module in modules for cls in type(module).__mro__}
    tables = [table for module in modules for name, table in vars(module).items() if name.endswith("_hooks")]
    hooks = [each for table in tables if isinstance(table, dict) for each in table.values()]
    called = [item for item in _kept_by(modules) if isinstance(item, types.FunctionType) or called_by(item) is not None]
    return [*(each for cls in classes for each in (cls, *functions_of(cls))), *hooks, *called]


def objects_of(models: Iterable[nn.Module]) -> list[Any]:
    """What modules keep beside torch's own that is a container, a generator, a bag of names or of the user's classes."""
    kinds = {*KINDS, set, torch.Generator, types.SimpleNamespace}
    kept = _kept_by(module for model in models for module in model.modules())
    own = [item for item in kept if type(item) in kinds or (not isinstance(item, nn.Module) and is_of_users(item))]
    return [*own, *_objects_of_tensors(models)]


def _objects_of_tensors(models: Iterable[nn.Module]) -> list[Any]:
    """What is in the attributes of parameters and buffers, and holds something itself."""
    tensors = {id(each): each for model in models for each in (*model.parameters(), *model.buffers())}
    kept = (item for each in tensors.values() for item in vars(each).values())
    return [item for item in kept if isinstance(item, _CONTAINERS) or (hasattr(item, "__dict__") and not isinstance(item, _NO_OBJECTS))]


def _held_by(item: Any) -> dict[Any, Any]:
    return pieces(item) if isinstance(item, _CONTAINERS) else vars(item)


@contextmanager
def objects_of_tensors_unchanged(models: Sequence[nn.Module]) -> Iterator[None]:
    """Raise CaptureError where the program changes them, as some libraries' first calls do: a step would do without."""
    reached = _objects_of_tensors(models)
    reached += [each for item in reached for each in _held_by(item).values() if isinstance(each, _CONTAINERS) or is_plain_object(each)]
    before = [(item, dict(_held_by(item))) for item in reached]

    def changed() -> CaptureError | None:
        for item, old in before:
            now = _held_by(item)
            for name in {**old, **now}:
                if now.get(name, ABSENT) is not old.get(name, ABSENT):
                    return CaptureError(
                        f"the program changes {name!r} in a {type(item).__name__} that a parameter has, which a captured step would not: "
                        "call the model once before, where only its first call does that"
                    )
        return None

    try:
        yield
    except CaptureError as error:
        raise changed() or error from error.__cause__
    if (change := changed()) is not None:
        raise change


def _kept_by(modules: Iterable[nn.Module]) -> list[Any]:
    return [item for module in modules for name, item in tree.attributes_of(module).items() if name not in OWN_OF_MODULES]


def functions_of(cls: type) -> list[types.FunctionType]:
    """The functions of a class that no library wrote, those of properties and class methods among them; none for others."""
    members = {id(each): each for item in _own(cls).values() for each in (item, *(getattr(item, name, None) for name in _WITHIN))}
    return [each for each in members.values() if isinstance(each, types.FunctionType)]


def containers_of_class(cls: type) -> list[str]:
    """The names of those that a class keeps that no library wrote."""
    return [name for name, item in _own(cls).items() if type(item) in _CONTAINERS or isinstance(item, collections.deque)]


def numbers_of_class(cls: type) -> list[str]:
    """The names of those that such a class has, and no class above it."""
    names = [name for name, item in _own(cls).items() if type(item) in (int, float) and not name.startswith("__")]
    return [name for name in names if not any(hasattr(base, name) for base in cls.__bases__)]


def _own(cls: type) -> Mapping[str, Any]:
    return vars(cls) if is_written_by_user(cls) and not cls.__flags__ & IMMUTABLE else {}


def _found(roots: list[Any], given: set[int], seen: set[int], undo: Callable[[Undo], None] | None) -> list[Undo]:
    """How to put back each thing that the roots lead to, but for what was `seen`. Objects of libraries' classes only where `given`."""
    waiting, restores, most = collections.deque(roots), list[Undo](), len(seen) + _MOST
    while waiting and len(seen) < most:
        item = waiting.popleft()
        if id(item) in seen or isinstance(item, _LEFT_ALONE):
            continue
        seen.add(id(item))
        if (called := called_by(item)) is not None:
            waiting.extend(called)
        elif isinstance(item, torch.Generator):
            if not is_default(item):
                restores.append(functools.partial(item.set_state, item.get_state()))
        elif isinstance(item, types.FunctionType):
            restores.extend(_of_function(item, waiting, undo))
        elif isinstance(item, (*_OPENED, nn.Module)) or type(item).__module__ == "collections" or id(item) in given or is_of_users(item):
            given.update(map(id, _held(item)) if id(item) in given else ())
            restores.extend(_of_object(item))
            waiting.extend(_held(item))
            waiting.extend(type(item).__mro__)
        elif isinstance(item, type):
            restores.append(functools.partial(_put_back_class, item, dict(_own(item))))
            waiting.extend((*(vars(item)[name] for name in containers_of_class(item)), *functions_of(item)))
    return restores


def called_by(item: Any) -> tuple[Any, ...] | None:
    """What a bound method or a partial function calls, and with what, and what a tuple holds; None for anything else."""
    if isinstance(item, (tuple, frozenset)):
        return (*pieces(item).values(),)
    if isinstance(item, types.BuiltinMethodType) and isinstance(item.__self__, _CONTAINERS):  # `put = kept.append`
        return (item.__self__,)
    if isinstance(item, types.MethodType):
        return item.__self__, item.__func__
    if isinstance(item, functools.partial):
        return item.func, *item.args, *item.keywords.values()
    return None


def is_of_users(item: Any) -> bool:
    """Whether an object's class was written by the user, or is Python's to be derived from."""
    return type(item) in (collections.UserDict, collections.UserList) or is_written_by_user(type(item))


def _held(item: Any) -> list[Any]:
    if is_stand_in(item):
        return [*pieces(item.kept.items).values()]
    items = item.values() if isinstance(item, dict) else item if isinstance(item, _CONTAINERS) else ()
    return [*items, *tree.attributes_of(item).values()]


def _of_function(function: types.FunctionType, waiting: collections.deque[Any], undo: Callable[[Undo], None] | None) -> Iterator[Undo]:
    """A function's own variables, and the globals that it names, also those of the user's modules."""
    cells = [cell for cell in function.__closure__ or () if Position.of(cell).now() is not ABSENT]
    waiting.extend(cell.cell_contents for cell in cells)  # of a library's, too: what it wraps may be the user's
    if not is_users(function) and not function.__code__.co_filename.startswith(INTEGRATIONS):
        return
    yield functools.partial(put_back, function.__dict__, dict(function.__dict__))
    yield from (functools.partial(setattr, cell, "cell_contents", cell.cell_contents) for cell in cells)
    waiting.extend((*(function.__defaults__ or ()), *(function.__kwdefaults__ or {}).values()))
    named = names_in(function.__code__)
    if undo is not None:
        rewrite(function, undo, named)
    modules = (each for name in named for each in (function.__globals__.get(name), sys.modules.get(name)) if is_users_module(each))
    for table in (function.__globals__, *map(vars, modules)):
        before = {name: table.get(name, ABSENT) for name in named}
        waiting.extend(before.values())
        yield functools.partial(_put_back_names, table, before)


def _put_back_names(table: dict[str, Any], before: dict[str, Any]) -> None:
    for name, item in before.items():
        put_entry(table, name, item)


def is_users_module(item: Any) -> bool:
    return isinstance(item, types.ModuleType) and is_written_by_user(item)


def names_in(code: types.CodeType) -> set[str]:
    return {name for piece in codes(code) for name in piece.co_names}


def _put_back_class(cls: type, before: dict[str, Any]) -> None:
    for name in {*before, *_own(cls)}:
        if not name.startswith("__") and vars(cls).get(name, ABSENT) is not (was := before.get(name, ABSENT)):
            Position.of(cls, name).put(was)


def _of_slots(item: Any) -> Iterator[Callable[[], None]]:
    for name in slots_of(item):
        yield functools.partial(Position.of(item, name).put, static_attribute(item, name))


def _of_object(item: Any) -> Iterator[Callable[[], None]]:
    """The contents of a container, the attributes of an object; put back only where they are others, in the object itself."""
    yield from _of_slots(item)
    own = getattr(item, "__dict__", None)
    if isinstance(own, dict) and own is not item:
        yield functools.partial(put_back, own, dict(own))
    if isinstance(item, _CONTAINERS):
        yield functools.partial(put_back, item, pieces(item))


_Copied: TypeAlias = "list[tuple[dict[str, Any], dict[str, Any], list[Any]]]"  # each group, its settings and its parameters


@contextmanager
def settings_unchanged(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Raise CaptureError where what runs inside changes a setting (a scheduler's `step()`), which is put back whatever happens."""
    copies = [
        (each.param_groups, [(group, dict(group), list(group["params"])) for group in each.param_groups]) for each in each_of(optimizer)
    ]
    try:
        yield
        if (changed := next(filter(None, (_changed(*each) for each in copies)), None)) is not None:
            raise CaptureError(
                f"loss() or after_backward() changes the optimizer's {changed}, which would be done once, in the capture: do it "
                "between steps (`scheduler.step()` before step(...) for a rate that this step uses, behind it for the next one's)"
            )
    finally:
        for groups, before in copies:
            groups[:] = [group for group, _, _ in before]
            for group, settings, parameters in before:
                group.clear()
                group.update(settings)
                group["params"][:] = parameters


def _changed(groups: list[dict[str, Any]], before: _Copied) -> str | None:
    if len(groups) != len(before) or any(len(group["params"]) != len(parameters) for group, _, parameters in before):
        return "groups of parameters"
    for group, settings, _ in before:
        for key in (*settings, *(key for key in group if key not in settings)):
            old, new = settings.get(key), group.get(key)
            if old is not new and (isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor) or repr(old) != repr(new)):
                return f"{key!r} ({old!r} to {new!r})"
    return None
