"""Whether a program reads values of its batch that are no tensors: file names, ids, objects.

They are replaced by stand-ins of the same types that note whatever is done with them, and raise. A program that does nothing with
them does the same whatever they are.
"""

from __future__ import annotations

from abc import ABCMeta
from collections.abc import Callable, Set
from typing import Any

from lowtide.ir import tree

_TYPES = (str, bytes, int, float)  # flags and None are there to be read
_LEFT_ALONE = frozenset({
    "__class__", "__new__", "__init__", "__init_subclass__", "__subclasshook__", "__doc__", "__getattribute__", "__setattr__",
    "__delattr__", "__dir__", "__class_getitem__", "__sizeof__",
})  # fmt: skip
_NOTICED = ("__init_subclass__", "__del__")
_OTHERS = ("__bool__", "__fspath__", "__bytes__", "__complex__", "__int__", "__index__", "__float__", "__iter__", "__len__", "__getitem__")


class ReadError(Exception):
    """A stand-in was read."""


def can_stand_in(value: Any) -> bool:
    """Whether there are stand-ins for values of its type: those above, and objects of plain classes, which may be made empty."""
    kind = type(value)
    if kind in _TYPES:
        return True
    if type(kind) not in (type, ABCMeta) or any(name in vars(base) for base in kind.__mro__[:-1] for name in _NOTICED):
        return False  # a class of it would be noted, or its end would do something
    if any("__slots__" in vars(base) for base in kind.__mro__):
        return False  # looking for tensors in it reads them
    try:
        return bool(_empty(type(kind.__name__, (kind,), {})))
    except TypeError:  # it has no classes of its own (None, bool), or more memory than Python knows
        return False


def _empty(kind: type) -> list[Any]:
    return [object.__new__(kind)]


def with_stand_ins(
    args: tuple[Any, ...], kwargs: dict[str, Any], where: Set[str], reads: list[str]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """A batch with stand-ins for the leaves at these places, which write into `reads` what is done with them."""
    leaves, rebuild = tree.flatten((args, kwargs))
    items = [_stand_in(leaf.value, reads.append) if leaf.where in where else leaf.value for leaf in leaves]
    built: tuple[tuple[Any, ...], dict[str, Any]] = tree.unflatten(rebuild, items)
    return built


def _stand_in(value: Any, note: Callable[[str], None]) -> Any:
    def raising(name: str) -> Callable[..., Any]:
        def method(self: Any, *args: Any, **kwargs: Any) -> Any:
            note(name)
            raise ReadError(f"{name} of a value of the batch")

        return method

    def attribute(self: Any, name: str) -> Any:
        if name.startswith("__"):
            return object.__getattribute__(self, name)
        return raising(name)(self)

    base = type(value)
    own = {name for name in dir(base) if callable(getattr(base, name))}
    names = [name for name in {*own, *_OTHERS} if name.startswith("__") and name not in _LEFT_ALONE]
    made = type(base.__name__, (base,), {name: raising(name) for name in names} | {"__getattribute__": attribute})
    return made(_UNLIKELY[base]) if base in _UNLIKELY else _empty(made)[0]


_UNLIKELY: dict[type, Any] = {str: "\0lowtide", bytes: b"\0lowtide", int: -0x10BD_71DE, float: -1.0727368e-37}  # what C reads of them
