"""What a capture's own thread finds in modules: tables of its own, with fakes for their tensors. All others find what is there.

Nothing is put into a module, so that another thread may evaluate, train or copy it meanwhile, and nothing has to be put back.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from lowtide.base.places import ABSENT, shown
from lowtide.capture.care.turns import placed, undoing

_TABLES = ("_parameters", "_buffers", "_modules")
_MADE_BY_TORCH = (nn.Parameter, nn.Buffer, nn.Module)  # which `nn.Module.__setattr__` puts into tables


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
                lying_in(module).pop(name, None) if before is ABSENT else lying_in(module).update({name: before})
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
