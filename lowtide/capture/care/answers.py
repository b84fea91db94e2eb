"""Functions that remember their answers (`functools.lru_cache`): a step computes anew only what is the same in each, no capture leaves one.

Eager computes an answer once. A step that would make another one each time is refused, and so is one that writes into an answer.
"""

from __future__ import annotations

import functools
import gc
import sys
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.base.places import Position, attributes
from lowtide.capture.blocks import address
from lowtide.capture.care.instances import CALL_BEFORE
from lowtide.capture.results import holds_fakes
from lowtide.errors import CaptureError
from lowtide.ir import tree
from lowtide.ir.graph import Kind, Node, Storage
from lowtide.ir.operators.nodes import is_random

CACHED: Any = type(functools.lru_cache(lambda: None))  # what a function becomes that remembers its answers
WITHIN_ANSWERS = 3  # references between such a function and a tensor in an answer
_ALWAYS_CHANGE = Kind.INPUT, Kind.SCALAR


def answers(cached: Any) -> dict[Any, Any]:
    """What such a function remembers, by its arguments. Only the collector of garbage gets to see it, before the attributes."""
    return [each for each in gc.get_referents(cached) if type(each) is dict and each is not attributes(cached)][-1]


def called(cached: Any) -> str:
    """The name of such a function; of a partial, that it is one."""
    return str(getattr(cached, "__qualname__", type(getattr(cached, "__wrapped__", cached)).__name__))


class RememberingFunctions:
    """Those that a program was seen to lead to, and those that lie beside the classes of its modules, in libraries as well."""

    def __init__(self, models: Iterable[nn.Module]) -> None:
        self.functions: list[Any] = []
        self._models = [*models]

    def clear(self) -> None:
        self.functions.clear()
        self._models.clear()

    def with_memory(self, tensor: torch.Tensor) -> str:
        """The name of one that has a tensor on this memory in an answer; "" where none has."""
        shares = lambda piece: issubclass(type(piece), torch.Tensor) and address(piece) == address(tensor)  # noqa: E731
        return next((called(each) for each in self.functions if any(tree.holds(it, shares) for it in gc.get_referents(each))), "")

    def forget(self) -> None:
        """Forget the answers of a capture that has failed, so that nothing finds them that runs next."""
        names = {type(module).__module__ for model in self._models for module in model.modules()}
        beside = (each for name in names if not name.startswith("torch.") for each in _beside(sys.modules.get(name)))
        for cached in (*self.functions, *beside):
            if any(map(holds_fakes, gc.get_referents(cached))):
                forget_answers(cached)


def _beside(module: types.ModuleType | None) -> Iterator[Any]:
    """Such functions among the functions and methods that a module of Python's names, or within what wraps them."""
    for item in [] if module is None else [*vars(module).values()]:
        for each in [*vars(item).values()] if issubclass(type(item), type) else (item,):
            kind = type(each)  # as `isinstance` would ask proxies and lazy modules
            function = each.fget if issubclass(kind, property) else each.__func__ if issubclass(kind, (classmethod, staticmethod)) else each
            cells = (function.__closure__ or ()) if type(function) is types.FunctionType else ()
            yield from (it for it in (function, *(Position.of(cell).now() for cell in cells)) if type(it) is CACHED)


def forget_answers(cached: Any) -> None:
    """A function forgets answers that hold something of a capture; all of them where it bounds how many it remembers."""
    if not isinstance(cached, CACHED) or cached.cache_parameters()["maxsize"] is not None:
        cached.cache_clear()
        return
    memory = answers(cached)
    for key in [key for key, answer in memory.items() if holds_fakes((key, answer))]:
        del memory[key]


def forget_repeated(memoised: Sequence[Any], alive: Mapping[int, Storage], nodes: Sequence[Node]) -> None:
    """Have functions forget what a capture gave them, by its nodes and storages that live.

    Raises CaptureError where that is not what each step would compute.
    """
    refusals = []
    for cached in memoised:
        keys = [*answers(cached)] if isinstance(cached, CACHED) else []
        arguments = {alive[address(it)] for it in _fakes_within(keys) if address(it) in alive}
        given = {storage for storage in arguments if not storage.kind.caller_owned}  # other ones in each step, which eager does not know
        for storage in {alive[address(it)] for it in _fakes_within(cached) if address(it) in alive} - given:
            if why := _not_repeated(storage, given, nodes):
                refusals.append(f"{called(cached)} remembers what it gave when it was first called, and that {why}; {CALL_BEFORE}")
    for cached in memoised:
        forget_answers(cached)
    if refusals:
        raise CaptureError(refusals[0])


def _not_repeated(storage: Storage, given: set[Storage], nodes: Sequence[Node]) -> str:
    """Why what lies on a storage may be another in each step; "" where it is not: what was read is as it is, and nothing was drawn."""
    makers, written = dict[Storage, list[Node]](), {after.storage for node in nodes for _, after in node.writes}
    for node in nodes:
        for value in node.results:
            makers.setdefault(value.storage, []).append(node)
    origins = front = {storage} if not storage.kind.caller_owned else set()
    while front:
        makers_of_it = [node for each in front for node in makers.get(each, ())]
        if any(map(is_random, makers_of_it)):
            return "is drawn at random"
        front = {value.storage for node in makers_of_it for value in node.inputs} - origins - given
        if (changing := next((each for each in front if each.kind in _ALWAYS_CHANGE or each in written), None)) is not None:
            return f"follows from {changing.kind.value} {changing.name}, which differs from step to step"
        origins = origins | front
    return ""


def _fakes_within(item: Any) -> list[torch.Tensor]:
    items, fakes = [item], list[torch.Tensor]()
    for _ in range(WITHIN_ANSWERS):
        items = [item for item in gc.get_referents(*items) if not isinstance(item, (type, types.ModuleType, types.FunctionType))]
        fakes += [item for item in items if issubclass(type(item), FakeTensor)]
    return fakes
