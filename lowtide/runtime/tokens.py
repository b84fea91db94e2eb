"""How a thing looks: equal tokens for things that a program cannot tell apart, also after they were changed in place.

And whether anything was put elsewhere since: by identity alone, in some microseconds; torch's switches that choose what a program does.
"""

from __future__ import annotations

import array
import contextvars
import functools
import marshal
import threading
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Mapping
from itertools import chain, repeat
from operator import attrgetter, is_, methodcaller
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torch.backends import mha
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_hooks_always_called,
    _global_forward_hooks_with_kwargs,
    _global_forward_pre_hooks,
)

from lowtide.base.places import attributes, behind, in_context

_KERNELS = (  # which choose how something is computed
    torch._C._get_deterministic_algorithms,
    torch._C._get_deterministic_algorithms_warn_only,
    torch._C._get_mkldnn_enabled,
    torch._C._get_nnpack_enabled,
    torch._C._get_cudnn_enabled,
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
    torch._C._get_math_sdp_allow_fp16_bf16_reduction,
)
_AUTOCAST_DEVICES = ("cpu", "cuda")


def switches() -> tuple[Any, ...]:
    """Their positions now; some microseconds."""
    return (meaning(), mha._is_fastpath_enabled, *[ask() for ask in _KERNELS])


def meaning() -> tuple[Any, ...]:
    """The positions of those that choose what is computed, not by which kernels alone."""
    state = torch.get_default_dtype(), torch._C._len_torch_function_stack()
    return (*state, *map(_cast, _AUTOCAST_DEVICES)) if torch._C._is_any_autocast_enabled() else state


def _cast(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


def global_hooks() -> dict[str, Any]:
    """The tables of hooks that run around every module, by name."""
    return {
        "before forward": _global_forward_pre_hooks,
        "after forward": _global_forward_hooks,
        "after forward, always": _global_forward_hooks_always_called,
        "after forward, with keywords": _global_forward_hooks_with_kwargs,
        "before backward": _global_backward_pre_hooks,
        "after backward": _global_backward_hooks,
    }


_values = methodcaller("values")
_flags = attrgetter("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_BUILT_IN = {dict, list, set, OrderedDict, deque}
_MAPPINGS = (dict, types.MappingProxyType)


class ContentWatch:
    """What containers hold, and what certain questions about objects are answered, as both were when it was sealed.

    Each call asks for all of it, since things are put into a dictionary without anyone being told. What is compared is `is` alone, and
    loops run within `map` and `all`: some 30 ns an entry. Most containers are tables of hooks, which are empty.
    """

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._empty: list[Any] = []
        self._full: list[Any] = []
        self._mappings: list[Any] = []
        self._lists: list[Any] = []
        self._questions: list[tuple[Callable[[Any], Any], Any]] = []

    def container(self, item: Any, free: frozenset[Any] = frozenset()) -> None:
        """`free`: the keys of what may change there."""
        if id(item) in self._known:
            return
        self._known.add(id(item))
        if free:
            self.question(functools.partial(_but, free), item)
            return
        if type(item) in _BUILT_IN and not item:
            self._empty.append(item)
            return
        self._full.append(item)
        (self._mappings if isinstance(item, _MAPPINGS) else self._lists).append(item)

    def question(self, ask: Callable[[Any], Any], item: Any) -> None:
        """Watch what `ask` says of an item: the same object, the same bytes, or a list of the same objects."""
        self._questions.append((ask, item))

    def seal(self) -> None:
        self._lengths = [*map(len, self._full)]
        self._keys = [*chain.from_iterable(self._mappings)]
        self._places: dict[tuple[int, Any], int] | None = None
        self._items, self._held = [*chain.from_iterable(self._lists)], [*chain.from_iterable(map(_values, self._mappings))]
        self._answers = [(ask, item, ask(item)) for ask, item in self._questions]

    def note(self, mapping: Any, key: Any, *, is_read: bool) -> None:
        """What lies under a key now is what shall lie there; where it is read, one plain tensor for another alone."""
        if self._places is None:
            lengths = {id(each): length for each, length in zip(self._full, self._lengths, strict=True)}
            owners = chain.from_iterable(repeat(id(each), lengths[id(each)]) for each in self._mappings)
            self._places = {place: at for at, place in enumerate(zip(owners, self._keys, strict=True))}
        at, now = self._places.get((id(mapping), key)), mapping.get(key)
        if at is not None and (not is_read or (type(now) is torch.Tensor and type(self._held[at]) is torch.Tensor)):
            self._held[at] = now

    def same(self) -> bool:
        """Whether all of it is as it was. False may also be said of what only looks alike."""
        try:
            return (
                not any(self._empty)
                and [*map(len, self._full)] == self._lengths
                and all(map(is_, chain.from_iterable(map(_values, self._mappings)), self._held))
                and [*chain.from_iterable(self._mappings)] == self._keys  # texts and numbers, which is quicker than one by one
                and all(map(is_, chain.from_iterable(self._lists), self._items))
                and all(_is_same(ask(item), before) for ask, item, before in self._answers)
            )
        except (RuntimeError, ValueError):  # another thread changes a container meanwhile; an array is no key that can be compared
            return False


class Watch(ContentWatch):
    """Contents, the classes of modules, the flags of parameters, torch's switches; as all were when it was sealed."""

    def __init__(self) -> None:
        super().__init__()
        self._modules: list[nn.Module] = []
        self._parameters: list[torch.Tensor] = []
        self._groups: Callable[[], Any] = tuple

    def module(self, module: nn.Module) -> None:
        self._modules.append(module)

    def parameter(self, parameter: torch.Tensor) -> None:
        """Watch whether a parameter is trained, and that it has no other hooks."""
        self._parameters.append(parameter)

    def groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Watch which lists the groups of an optimizer keep their parameters in."""
        self._groups = lambda: [group["params"] for group in optimizer.param_groups]

    def sealed(self) -> Watch:
        """Itself, with everything as it is now."""
        self.seal()
        self._types, self._flags = [*map(type, self._modules)], [*map(_flags, self._parameters)]
        self._in_groups, self._switches = self._groups(), switches()
        return self

    def same(self) -> bool:
        return (
            switches() == self._switches
            and super().same()
            and all(map(is_, map(type, self._modules), self._types))
            and [*map(_flags, self._parameters)] == self._flags
            and [*map(id, self._groups())] == [*map(id, self._in_groups)]
        )


Token: TypeAlias = Any  # hashable; equal to itself and to tokens of what looks alike

_PLAIN = frozenset({bool, int, str, bytes, type(None), type(...), torch.dtype, torch.device, torch.Size})
_CONTAINERS: tuple[Any, ...] = (list, tuple, deque, set, frozenset, dict)
_OPAQUE = (type, types.FunctionType, types.BuiltinFunctionType, types.ModuleType, property, classmethod, staticmethod, torch.Tensor)
_NAMED = (type, types.FunctionType, types.MethodType, types.BuiltinFunctionType)
_NUMBERS = frozenset({bool, int, float, complex, type(None)})
_DUMPED = frozenset({list, tuple, set, frozenset, dict})  # which `marshal` writes, and no class that is derived from them
_FREE = "a number that each step asks for"  # in place of its token
_DEEPEST = 4  # objects within objects
_DEEPEST_HELD = 32  # lists within lists
_LARGEST = 1000  # items of a container that is compared item by item; a larger one as bytes, if it holds numbers and texts alone
_MOST = 10_000  # items within one attribute
_MOST_BYTES, _MOST_BYTES_WITHIN = 1 << 20, 1 << 16  # of what is compared as bytes, and within objects: nobody saw that it is read


class Identity:
    """The one object that it is of; it does not keep that alive."""

    __slots__ = ("_hash", "_ref", "text")

    def __init__(self, item: Any) -> None:
        name = getattr(item, "__qualname__", "") if isinstance(item, _NAMED) else ""  # a method may be that of a functools.partial
        self._hash, self.text = id(item), f"{type(item).__qualname__} {name}".strip()
        try:
            self._ref: Any = weakref.ref(item)
        except TypeError:
            self._ref = lambda: item

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Identity) and self._hash == other._hash and (mine := self._ref()) is not None and mine is other._ref()

    def __hash__(self) -> int:
        return self._hash

    def __repr__(self) -> str:
        return f"a {self.text}"


class Tokens:
    """Makes tokens, and tells `watch` what they rest on. `known` are the tokens of things that have their own, by id.

    `free`: by id of a container the keys of what may change there. `unwatched` are the places of what is too large to be compared.
    """

    def __init__(self, watch: ContentWatch, known: Mapping[int, Token], free: Mapping[int, frozenset[Any]]) -> None:
        self._watch, self._known, self._free = watch, known, free
        self._made: dict[tuple[int, int], Token] = {}
        self._left, self._bytes_left, self._within = _MOST, _MOST_BYTES, 0
        self.unwatched: list[str] = []

    def of(self, item: Any, place: object = "") -> Token:
        self._left, self._bytes_left, self._place = _MOST, _MOST_BYTES, place
        return self._of(item, 0)

    def _of(self, item: Any, depth: int) -> Token:
        kind = type(item)
        if kind in _PLAIN:
            return kind, item
        if kind in (float, complex):
            return kind, repr(item)  # nan looks like itself, -0.0 unlike 0.0
        if id(item) in self._known:
            return self._known[id(item)]
        key = id(item), depth
        if key not in self._made:
            if (target := behind(item)) is not item:
                self._watch.question(lambda item: behind(item) is None, item)
                return kind, item.__name__ if kind is types.BuiltinMethodType else "", self._of(target, depth + 1)
            self._made[key] = Identity(item)  # of what holds itself
            self._made[key] = self._opened(item, kind, depth)
        return self._made[key]

    def _opened(self, item: Any, kind: type, depth: int) -> Token:
        """The token of what may hold other things."""
        if isinstance(item, types.MethodType):
            return kind, Identity(item.__func__), self._of(item.__self__, _DEEPEST)
        if isinstance(item, functools.partial):
            self._watch.container(item.keywords)
            return kind, self._of(item.func, _DEEPEST), self._pieces(item.args, depth), self._entries(item.keywords, depth)
        if isinstance(item, contextvars.ContextVar):
            self._watch.question(in_context, item)
            return Identity(item), self._of(in_context(item), depth + 1)
        if isinstance(item, (np.ndarray, array.array, bytearray)):
            return self._bytes_of(item, kind), self._of(attributes(item), depth)  # of a class of its own: a mask, say
        if isinstance(item, _CONTAINERS):
            return self._container(item, kind, depth), self._of(attributes(item), depth)
        return self._object(item, kind, depth)

    def _bytes_of(self, item: Any, kind: type) -> Token:
        size = memoryview(item).nbytes if not isinstance(item, np.ndarray) else item.nbytes
        if size > self._most_bytes or (numbers := _numbers(item)) is None:
            return kind, size, self._identity(item, f"{size:,} bytes of a {kind.__name__}")
        self._bytes_left -= size
        self._watch.question(_numbers, item)
        return kind, (str(item.dtype), item.shape) if isinstance(item, np.ndarray) else size, numbers

    def _container(self, item: Any, kind: type, depth: int) -> Token:
        base: Any = next(base for base in _CONTAINERS if isinstance(item, base))
        length = base.__len__(item)  # its class may have another
        if depth >= _DEEPEST or length > min(_LARGEST, self._left):
            if (numbers := _dumped(item, self._most_bytes)) is not None:
                self._bytes_left -= len(numbers)
                if base not in (tuple, frozenset) or not {*map(type, item)} <= _NUMBERS:
                    self._watch.question(_bytes, item)
                return kind, length, numbers
            if depth >= _DEEPEST_HELD or length > self._left:
                return kind, length, self._identity(item, f"a {kind.__name__} of {length:,} items")
        self._left -= length
        free = self._free.get(id(item), frozenset())
        if not isinstance(item, (tuple, frozenset)):
            self._watch.container(item, free)
        if isinstance(item, dict):
            return kind, self._entries(item, depth, free)
        if isinstance(item, (set, frozenset)):
            return kind, frozenset(self._of(piece, _DEEPEST) for piece in item)
        return kind, self._pieces(item, depth, free)

    def _object(self, item: Any, kind: type, depth: int) -> Token:
        """An object is itself, with its attributes as they are."""
        own, names = attributes(item), kind is types.SimpleNamespace
        if depth >= (_DEEPEST_HELD if names else _DEEPEST) or isinstance(item, _OPAQUE) or type(own) is not dict:
            return Identity(item)
        if len(own) > min(_LARGEST, self._left):
            return self._identity(item, f"{len(own):,} attributes of a {kind.__name__}")
        self._left -= len(own)
        if isinstance(item, threading.local):
            self._watch.question(attributes, item)  # in another thread it is another
        self._watch.container(own)
        self._within += not names
        entries = self._entries(own, depth)
        self._within -= not names
        return Identity(item), entries

    def _identity(self, item: Any, what: str) -> Identity:
        """The token of what cannot be compared. Within an object nobody knows whether it is read, and nothing is said."""
        self.unwatched += [f"{self._place} holds {what}"] if self._place and not self._within else []
        return Identity(item)

    @property
    def _most_bytes(self) -> int:
        return min(self._bytes_left, _MOST_BYTES_WITHIN) if self._within else self._bytes_left

    def _pieces(self, items: Any, depth: int, free: frozenset[Any] = frozenset()) -> Token:
        return tuple([_FREE if at in free else self._of(piece, depth + 1) for at, piece in enumerate(items)])

    def _entries(self, items: Mapping[Any, Any], depth: int, free: frozenset[Any] = frozenset()) -> Token:
        return tuple([(self._of(key, _DEEPEST), _FREE if key in free else self._of(piece, depth + 1)) for key, piece in items.items()])


def _but(free: frozenset[Any], item: Any) -> list[Any]:
    """What a container holds but for what lies under these keys."""
    if isinstance(item, dict):
        return [*item, *(piece for key, piece in item.items() if key not in free)]
    return [piece for at, piece in enumerate(item) if at not in free]


def _is_same(now: Any, before: Any) -> bool:
    """Whether two answers are one object, the same bytes, or lists of the same objects."""
    if type(now) is list and type(before) is list:
        return len(now) == len(before) and all(map(is_, now, before))
    return now is before or (type(now) is bytes and now == before)


def _numbers(item: Any) -> bytes | None:
    """What an array holds; None where these are objects."""
    if not isinstance(item, np.ndarray):
        return bytes(item)
    return _dumped(item.tolist(), _MOST_BYTES) if item.dtype.hasobject else item.tobytes()


def _dumped(item: Any, most: int) -> bytes | None:
    """A container as bytes, the same for the same numbers and texts in it, at any depth; None where it holds anything else, or too much."""
    try:
        return _bytes(item) if _size(item, most) <= most else None
    except (ValueError, RecursionError):
        return None


def _bytes(item: Any) -> bytes:
    """15 ns a number, where a look at each from Python takes some hundreds."""
    if type(item) not in _DUMPED:
        base: Any = OrderedDict if isinstance(item, OrderedDict) else dict
        item = dict(base.items(item)) if isinstance(item, dict) else list(item)
    return marshal.dumps(item, 2)  # the version that does not tell whether one thing lies there twice


def _size(item: Any, most: int) -> int:
    """About how many bytes that will be; anything above `most` where they are more."""
    pieces = [*item, *item.values()] if type(item) is dict else item
    size = 8 * len(pieces)
    if size > most or {*map(type, pieces)} <= _NUMBERS:
        return size
    for piece in pieces:
        size += len(piece) if type(piece) in (str, bytes) else _size(piece, most - size) if type(piece) in _DUMPED else 0
    return size
