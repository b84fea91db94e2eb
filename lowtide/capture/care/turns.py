"""One capture at a time in a process; what it puts in the place of something stands there for its own thread, and is gone afterwards.

How to undo a change is written down before the change is made, and is done at the end whatever happens: an interrupt may come between any
two lines, also between those that enter a `with` and those that leave it.

An interrupt comes to Python at the next bytecode, which after a while in C++ is often the first one of a function that can hand on no
exception. Raised there it would end the process, or be lost: it comes a moment later.

In modules a capture's own thread finds tables of its own, with fakes for their tensors. All others find what is there.

Nothing is put into a module, so that another thread may evaluate, train or copy it meanwhile, and nothing has to be put back.
"""

from __future__ import annotations

import contextlib
import contextvars
import functools
import os
import signal
import sys
import threading
import time
import types
from _thread import interrupt_main, start_new_thread
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from contextvars import ContextVar
from pathlib import Path
from traceback import walk_tb
from types import FrameType
from typing import Any, ParamSpec, TypeAlias, TypeVar

import torch
from torch import nn, overrides
from torch.overrides import _get_current_function_mode_stack
from torch.overrides import _pop_mode as _pop_function_mode
from torch.overrides import _push_mode as _push_function_mode
from torch.utils import _python_dispatch as dispatching

from lowtide.base.places import ABSENT, put_entry, shown

P = ParamSpec("P")
T = TypeVar("T")
Undo: TypeAlias = Callable[[], object]  # may be done twice
Replacing: TypeAlias = Callable[[Callable[..., Any]], Callable[..., Any]]  # makes a function of the one that was there

_FLAGS = ("_is_in_torch_dispatch_mode", "_is_in_non_infra_torch_dispatch_mode", "_is_in_any_mode_without_ignore_compile_internals")
_NOT_THE_USERS = (contextlib.__file__, *(f"{folder}{os.sep}" for folder in (Path(torch.__file__).parent, Path(__file__).parents[2])))
_lock = threading.RLock()
_TABLES = ("_parameters", "_buffers", "_modules")
_MADE_BY_TORCH = (nn.Parameter, nn.Buffer, nn.Module)  # which `nn.Module.__setattr__` puts into tables


class _Undone(threading.local):
    def __init__(self) -> None:
        self.waiting: list[Undo] = []


_own = _Undone()


def one_at_a_time(function: Callable[P, T]) -> Callable[P, T]:
    """The function, which waits until no other thread is within one; whatever it wrote down to be undone is undone when it is over."""

    @functools.wraps(function)
    def alone(*args: P.args, **kwargs: P.kwargs) -> T:
        with _lock, interrupts_that_can_be_taken():
            mark = len(_own.waiting)
            try:
                _own.waiting.append(_modes_of_torch())
                return contextvars.copy_context().run(function, *args, **kwargs)  # variables that it sets are as they were
            except BaseException as error:
                _let_go(error)
                raise
            finally:
                try:
                    _undo(mark)
                finally:  # an interrupt may have come meanwhile
                    _undo(mark)

    return alone


def turn() -> AbstractContextManager[object]:
    """While this lasts no other thread captures, which has stand-ins in the places of a model's tensors."""
    return _lock


@contextmanager
def undoing() -> Iterator[Callable[[Undo], None]]:
    """Takes what is to be undone at the end; all of it is, the latest first. The first error is raised when that is done."""
    mark = len(_own.waiting)
    try:
        yield _own.waiting.append
    finally:
        _undo(mark)


def _undo(mark: int) -> None:
    waiting, failures = _own.waiting, []
    while len(waiting) > mark:
        try:
            waiting[-1]()
        except Exception as error:  # what comes after it is put back all the same
            failures.append(error)
        waiting.pop()
    if failures:
        raise failures[0]


def replaced(owner: Any, name: str, of: Replacing) -> AbstractContextManager[None]:
    """While this lasts, `owner.name` is for this thread what `of` makes of it, and for all others what it was."""
    before = getattr(owner, name)
    item = for_this_thread(of(before), before)
    unbound = isinstance(owner, type) and isinstance(before, types.BuiltinFunctionType)  # as in a class a function of C stays
    return placed(owner, name, staticmethod(item) if unbound else item)


@contextmanager
def all_replaced(functions: Iterable[tuple[Any, str, Replacing]]) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, of in functions:
            stack.enter_context(replaced(owner, name, of))
        yield


@contextmanager
def unasked(mode: overrides.TorchFunctionMode) -> Iterator[None]:
    """Enter a mode of which layers do not hear: they ask for modes to choose a fused kernel, and in eager there is none of lowtide's."""

    def without(asks: Callable[..., bool]) -> Callable[..., bool]:
        def answer(given: Any) -> bool:
            with overrides._pop_mode_temporarily() if overrides._get_current_function_mode() is mode else nullcontext():
                return asks(given)

        return answer

    with mode, replaced(overrides, "has_torch_function", without):
        yield


@contextmanager
def placed(owner: Any, name: str, item: Any) -> Iterator[None]:
    """While this lasts, `owner.name` is this, for all threads."""
    original = vars(owner).get(name, ABSENT)
    with undoing() as undo:
        undo(functools.partial(_put_back, owner, name, original))
        setattr(owner, name, item)
        yield


@contextmanager
def listed(items: list[T], item: T) -> Iterator[None]:
    """While this lasts, the list ends with this item."""
    original = items[:]
    with undoing() as undo:
        undo(lambda: items.__setitem__(slice(None), original))
        items.append(item)
        yield


@contextmanager
def during(variable: ContextVar[T], item: T) -> Iterator[None]:
    """What runs inside finds this in a variable of its context."""
    token = variable.set(item)
    try:
        yield
    finally:
        variable.reset(token)


def for_this_thread(own: Callable[..., Any], others: Callable[..., Any]) -> Callable[..., Any]:
    """A function that is `own` where this thread calls it and `others` where another does."""
    thread, ident = threading.get_ident(), threading.get_ident

    @functools.wraps(others, updated=())
    def either(*args: Any, **kwargs: Any) -> Any:
        return own(*args, **kwargs) if ident() == thread else others(*args, **kwargs)

    return either


def _put_back(owner: Any, name: str, original: Any) -> None:
    if original is not ABSENT:
        setattr(owner, name, original)
    elif name in vars(owner):
        delattr(owner, name)


def _let_go(error: BaseException | None) -> None:
    """Empty the frames of torch and lowtide that an error came through: they may hold guards of torch's that nobody left."""
    while error is not None:
        for frame, _ in walk_tb(error.__traceback__):
            for each in (frame, frame.f_back):  # where a handler raised it, whom that interrupted is in no traceback
                if each is not None and each.f_code.co_filename.startswith(_NOT_THE_USERS):
                    with suppress(RuntimeError):  # it still runs
                        each.clear()
        error = error.__cause__ or error.__context__


def _modes_of_torch() -> Undo:
    """How to put back the modes of torch in which this thread is now."""
    gradients, several = torch.is_grad_enabled(), torch._C._is_multithreading_enabled()
    functions, operators = _get_current_function_mode_stack(), dispatching._get_current_dispatch_mode_stack()
    flags = {name: vars(dispatching)[name] for name in _FLAGS if name in vars(dispatching)}

    def put_back() -> None:
        if _get_current_function_mode_stack() != functions:
            for _ in _get_current_function_mode_stack():
                _pop_function_mode()
            for mode in functions:
                _push_function_mode(mode)
        if dispatching._get_current_dispatch_mode_stack() != operators:
            for _ in dispatching._get_current_dispatch_mode_stack():
                dispatching._pop_mode()
            for mode in operators:
                dispatching._push_mode(mode)
        if torch.is_grad_enabled() != gradients:
            torch.set_grad_enabled(gradients)
        if sys.exc_info()[0] is not None:  # else torch has left what it entered; these are of all threads
            torch._C._set_multithreading_enabled(several)
            vars(dispatching).update(flags)

    return put_back


# Of torch/_library/simple_registry.py: C++ asks it at each call under a mode, and an exception within it ends the process.
_HANDS_ON_NONE = "find_torch_dispatch_rule"
_DEPTH = 4  # of the calls that they make
_LATER_S = 0.001


@contextmanager
def interrupts_that_can_be_taken() -> Iterator[None]:
    """While this lasts, Ctrl-C reaches the caller's own handler where an exception can go up from there.

    What is raised in a callback of a weak reference or in `__del__` goes no further: Python hands it to `sys.unraisablehook`.
    """
    handler: Any = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(handler):
        yield
        return

    def later_or_now(number: int, frame: FrameType | None) -> None:
        if _hands_on_none(frame):
            start_new_thread(_interrupt_later, ())  # threading's own threads are waited for, and interrupted meanwhile
        else:
            handler(number, frame)

    def again_or_told(unraisable: Any) -> None:
        if issubclass(unraisable.exc_type, KeyboardInterrupt):
            start_new_thread(_interrupt_later, ())
        else:
            tell(unraisable)

    tell = sys.unraisablehook
    signal.signal(signal.SIGINT, later_or_now)
    sys.unraisablehook = again_or_told
    try:
        yield
    finally:
        if sys.unraisablehook is again_or_told:
            sys.unraisablehook = tell
        if signal.getsignal(signal.SIGINT) is later_or_now:
            signal.signal(signal.SIGINT, handler)


def _interrupt_later() -> None:
    time.sleep(_LATER_S)
    interrupt_main()


def _hands_on_none(frame: FrameType | None) -> bool:
    for _ in range(_DEPTH):
        if frame is None:
            return False
        if frame.f_code.co_name == _HANDS_ON_NONE:
            return True
        frame = frame.f_back
    return False


class ModuleViews:
    """The tables of this thread, for as long as a capture lasts."""

    def __init__(self) -> None:
        self._thread = threading.get_ident()
        self._before: dict[int, Any] = {}  # of a capture around this one
        self._found: dict[int, tuple[nn.Module, dict[str, Any]]] = {}  # what lay in each module
        self._by_others: set[tuple[int, str]] = set()  # what other threads have set meanwhile

    def show(self, module: nn.Module, own: dict[str, Any]) -> None:
        """From now on this thread finds these attributes in a module, and sets its own there."""
        if id(module) in self._found:
            return
        self._before[id(module)], self._found[id(module)] = shown.get(id(module)), (module, dict(lying_in(module)))
        shown[id(module)] = self._thread, {**own, **{table: dict(own[table]) for table in _TABLES}}, frozenset(own)

    def close(self) -> None:
        """All find the same again. What the program has set past `nn.Module` is put back."""
        for module, _ in self._found.values():
            for name, before in self.set_past(module):
                put_entry(lying_in(module), name, before)
        for at, before in self._before.items():
            if (view := shown.get(at, before)) is not before:
                for table in (*map(view[1].__getitem__, _TABLES), view[1]):
                    table.clear()  # whoever holds on to one
            if before is not None:
                shown[at] = before
            else:
                shown.pop(at, None)
        self._before.clear()
        self._found.clear()

    def set_past(self, module: nn.Module) -> list[tuple[str, Any]]:
        """What the program has set in a module itself, as `object.__setattr__` does, and what lay there before."""
        before, now = self._found[id(module)][1], lying_in(module)
        changed = [name for name in {**before, **now} if before.get(name, ABSENT) is not now.get(name, ABSENT)]
        return [(name, before.get(name, ABSENT)) for name in changed if (id(module), name) not in self._by_others]

    # In the place of methods of `nn.Module`.

    def getting(self, before: Callable[..., Any]) -> Callable[..., Any]:
        ident = threading.get_ident

        def get(module: nn.Module, name: str) -> Any:
            view = shown.get(id(module))
            if view is None or view[0] != ident():
                return before(module, name)
            own = view[1]
            if name in own:
                return before(module, name) if _is_set_by_class(type(module), name) else own[name]
            if name == "__dict__":
                return own
            if name == "__getstate__" and getattr(type(module), name, None) is getattr(object, name, None):  # a copy is of this thread's
                return own.copy
            return getattr(type(module), name) if name in view[2] else before(module, name)  # the first where it was deleted

        return get

    def setting(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def put(module: nn.Module, name: str, value: Any) -> None:
            if (own := self._own(module, name)) is None or isinstance(value, _MADE_BY_TORCH):
                before(module, name, value)
            else:
                own[name] = value

        return put

    def deleting(self, before: Callable[..., Any]) -> Callable[..., Any]:
        def delete(module: nn.Module, name: str) -> None:
            if (own := self._own(module, name)) is None or name not in own:
                before(module, name)
            else:
                del own[name]

        return delete

    def _own(self, module: nn.Module, name: str) -> dict[str, Any] | None:
        """The table that a plain attribute lies in; None where that is the module's own, or torch finds it."""
        thread, own, _ = shown.get(id(module), (self._thread, None, None))
        if thread != threading.get_ident():
            self._by_others.add((id(module), name))
        if own is None or thread != threading.get_ident():
            return None
        return None if any(name in own.get(table, ()) for table in _TABLES) or _is_set_by_class(type(module), name) else own


def lying_in(module: nn.Module) -> dict[str, Any]:
    """The attributes of a module that are there for all."""
    own: dict[str, Any] = object.__getattribute__(module, "__dict__")
    return own


def seen(item: Any, table: Any) -> Any:
    """What this thread finds where a table of attributes, or of buffers, lies in an object."""
    _, own, _ = shown.get(id(item), (0, None, None))
    return table if own is None or type(table) is not dict else own if table is lying_in(item) else own["_buffers"]


def _is_set_by_class(cls: type, name: str) -> bool:
    """Whether a class says itself what an attribute is, as a property does."""
    return next((hasattr(type(vars(base)[name]), "__set__") for base in cls.__mro__ if name in vars(base)), False)


@contextmanager
def module_views() -> Iterator[ModuleViews]:
    """While this lasts, this thread may be shown what is in no module."""
    views, own = ModuleViews(), vars(nn.Module)
    get, delete = own.get("__getattribute__", object.__getattribute__), own["__delattr__"]
    with (
        undoing() as undo,
        placed(nn.Module, "__getattribute__", views.getting(get)),
        placed(nn.Module, "__setattr__", views.setting(own["__setattr__"])),
        placed(nn.Module, "__delattr__", views.deleting(delete)),
    ):
        undo(views.close)
        yield views
