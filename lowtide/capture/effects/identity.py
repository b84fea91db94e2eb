"""Objects that a program puts somewhere: the same one in each step, which is put there, or one that it makes anew, as each step then does.

Which of the two shows in a second capture. What is made anew has to be alike in both: it is copied, but for what both have in common.
"""

from __future__ import annotations

import copy
import types
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import numpy

from lowtide.capture.care.contents import CONTAINERS, differ, in_words, is_constant, is_iterator, is_plain, pieces
from lowtide.errors import CaptureError
from lowtide.ir import tree

_OPEN = (list, dict, set, numpy.ndarray)  # constants that may be written later, so that it matters whose they are
_REDUCE: Any = object.__reduce_ex__
_GENERATED = types.GeneratorType, types.CoroutineType, types.AsyncGeneratorType
_CODE = "__code__", "__defaults__", "__kwdefaults__", "__dict__"


class UnlikeError(Exception):
    """Two captures have made something, and each another thing: in words."""


def is_sure(item: Any) -> bool:
    """Whether one that lies there is as good as another: what is fixed, and what has a name in a module."""
    if isinstance(item, tuple):
        return all(map(is_sure, item))
    if isinstance(item, types.FunctionType):
        return "<" not in item.__qualname__
    return isinstance(item, types.BuiltinFunctionType) or (is_constant(item) and not isinstance(item, _OPEN))


@dataclass(frozen=True)
class MadeAnew:
    """An object that each step makes."""

    example: Any
    shared: dict[int, Any]  # what all of them hold in common, by id
    words: str

    def instance(self, known: dict[int, Any]) -> Any:
        """Another one; `known` is what the step has made so far, by id of the examples: what is put into two places stays one."""
        known.update(self.shared)
        return copy.deepcopy(self.example, known)


def resolved(before: Any, now: Any) -> tuple[Any, str]:
    """What a step puts where two captures have put these: the object itself, or a `MadeAnew`; and in words. Raises UnlikeError."""
    shared, words = dict[int, Any](), list[str]()
    waiting, met = [(before, now)], set[tuple[int, int]]()
    while waiting:
        one, two = waiting.pop()
        same = one is two or _same_referent(one, two)
        if same or (id(one), id(two)) in met:
            if same and not is_plain(two):
                shared[id(two)] = two
            continue
        met.add((id(one), id(two)))
        if type(one) is not type(two) or differ(one, two):
            raise UnlikeError(f"{in_words(one)} the first time and {in_words(two)} the second time")
        if is_plain(two):
            words.append(repr(two))
        else:
            words.append(type(two).__name__)
            waiting.extend(zip_longest(_within(one), _within(two)))
    if before is now:
        return now, f"{type(now).__name__} {id(now)}"
    anew = MadeAnew(now, shared, " ".join(words))
    try:
        anew.instance({})
    except Exception as error:  # of whatever class it is
        raise UnlikeError(f"a {type(now).__name__} that cannot be copied ({error})") from None
    return anew, anew.words


def _same_referent(one: Any, two: Any) -> bool:
    """Whether both are weak references to one object, which Python may or may not make one reference of."""
    return type(one) is type(two) is weakref.ref and one() is two() is not None and one.__callback__ is two.__callback__ is None


def _within(item: Any) -> Iterator[Any]:
    """What an object is made of. Raises UnlikeError where nobody can tell."""
    if isinstance(item, numpy.ndarray):
        yield from (item.dtype.str, item.shape, *([*item.flat] if item.dtype == object else [item.tobytes()]))
    elif isinstance(item, CONTAINERS):
        entries = pieces(item)
        if isinstance(item, (set, frozenset)):
            entries = dict(enumerate(sorted(entries, key=repr)))
        yield from (*entries, *entries.values(), *tree.attributes_of(item).values())
    elif isinstance(item, types.FunctionType):
        yield from (getattr(item, name) for name in _CODE)
        yield from (cell.cell_contents for cell in item.__closure__ or ())
    elif isinstance(item, types.MethodType):
        yield from (item.__func__, item.__self__)
    elif is_constant(item):
        yield repr(item)
    elif is_iterator(item) and not isinstance(item, _GENERATED):
        yield from item.__reduce__()
    elif getattr(type(item), "__reduce_ex__", None) is _REDUCE and not isinstance(item, _GENERATED) and hasattr(item, "__dict__"):
        attributes = tree.attributes_of(item)
        yield from (*attributes, *attributes.values())
    else:
        yield from _reduced(item)


def _reduced(item: Any) -> Iterator[Any]:
    try:
        yield from item.__reduce_ex__(4)
    except CaptureError:  # one of ours says more
        raise
    except Exception:  # of whatever class it is
        raise UnlikeError(f"a {type(item).__name__} that it makes each time") from None
