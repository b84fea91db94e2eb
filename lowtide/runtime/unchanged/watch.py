"""Whether anything was put elsewhere since: by identity alone, in some microseconds, without allocating."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Callable
from itertools import chain
from operator import attrgetter, is_, methodcaller
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from lowtide.base.identity import Held
from lowtide.base.words import Words, dictionary_of, length_of, python_is_known, type_of
from lowtide.runtime.unchanged.switches import meaning, switches

_values = methodcaller("values")
_flags = attrgetter("requires_grad", "_backward_hooks", "_post_accumulate_grad_hooks")
_BUILT_IN = {dict, list, set, OrderedDict, deque}
_MAPPINGS = (dict, MappingProxyType)


class Watch:
    """What lies in containers, the classes of modules, the flags of parameters, torch's switches; as all were when it was sealed."""

    def __init__(self) -> None:
        self._known: set[int] = set()
        self._empty: list[Any] = []
        self._dictionaries: list[Any] = []
        self._full: list[Any] = []
        self._mappings: list[Any] = []
        self._modules: list[nn.Module] = []
        self._parameters: list[torch.Tensor] = []
        self._groups: Callable[[], Any] = tuple

    def container(self, item: Any) -> None:
        """Watch what a dictionary, list or set holds."""
        if id(item) in self._known:
            return
        self._known.add(id(item))
        if type(item) in _BUILT_IN and not item:
            self._empty.append(item)
            return
        plain = isinstance(item, dict) and type(item).__iter__ is dict.__iter__
        if plain or (type(item) is MappingProxyType and dictionary_of(item)):
            self._dictionaries.append(item)
            return
        self._full.append(item)  # an OrderedDict has an order of its own
        if isinstance(item, _MAPPINGS):
            self._mappings.append(item)

    def module(self, module: nn.Module) -> None:
        """Watch a module's class."""
        self._modules.append(module)

    def parameter(self, parameter: torch.Tensor) -> None:
        """Watch whether a parameter is trained, and that it has no other hooks."""
        self._parameters.append(parameter)

    def groups(self, optimizer: torch.optim.Optimizer) -> None:
        """Watch which lists the groups of an optimizer keep their parameters in."""
        self._groups = lambda: [group["params"] for group in optimizer.param_groups]

    def sealed(self) -> Watch:
        """Itself, with everything as it is now."""
        self._in_dictionaries, self._lengths = Held(self._dictionaries), [*map(len, self._full)]
        self._items, self._held = [*chain.from_iterable(self._full)], [*chain.from_iterable(map(_values, self._mappings))]
        self._types, self._flags = [*map(type, self._modules)], [*map(_flags, self._parameters)]
        self._lists, self._switches, self._meaning = self._groups(), switches(), meaning()
        self._is_rest_empty = not (self._full or self._parameters or self._lists)
        self._words = Words([*map(length_of, self._empty), *map(type_of, self._modules)]) if python_is_known() else None
        return self

    def same(self) -> bool:
        """Whether all of it is as it was. False may also be said of what only looks alike."""
        return self._plain_same() and self._in_dictionaries.same() and self.rest_same()

    @property
    def words(self) -> list[Words] | None:
        """Words that are what they were while all but the rest is; None where there are none that tell it."""
        tags = self._in_dictionaries.tags
        return None if self._words is None or tags is None else [self._words, tags]

    def rest_same(self) -> bool:
        """Whether what no words tell of is as it was."""
        return switches() == self._switches and (self._is_rest_empty or self._others_same())

    def meaning_same(self) -> bool:
        """The same for who runs generated kernels alone: switches that choose among torch's kernels are not asked."""
        return meaning() == self._meaning and (self._is_rest_empty or self._others_same())

    def _others_same(self) -> bool:
        return (
            [*map(len, self._full)] == self._lengths
            and all(map(is_, chain.from_iterable(self._full), self._items))
            and all(map(is_, chain.from_iterable(map(_values, self._mappings)), self._held))
            and [*map(_flags, self._parameters)] == self._flags
            and [*map(id, self._groups())] == [*map(id, self._lists)]
        )

    def _plain_same(self) -> bool:
        """Whether what was empty is, and modules are of the same classes."""
        if self._words is not None and self._words.same():
            return True
        found = not any(self._empty) and all(map(is_, map(type, self._modules), self._types))
        if found and self._words is not None:
            self._words.renew()
        return found
