"""Modules as they were before a program ran: what it changes in them and no graph could follow is refused.

But for tables that a forward fills with what follows from the model alone. A captured call leaves such a table as it is: each one finds
what the captured one found, and gives what eager PyTorch gives from there.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Callable, Iterator
from inspect import getattr_static
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.base.places import ABSENT
from lowtide.capture.care.contents import pieces, put_back
from lowtide.capture.care.reads import HOOKS, AttributeReads, refusal
from lowtide.capture.draft import Draft
from lowtide.capture.effects.outputs import is_followed
from lowtide.capture.effects.stand_ins import LeavingError
from lowtide.capture.results import holds_fakes, is_number
from lowtide.ir.graph import Kind, Slot, Value
from lowtide.ir.operators.nodes import is_random

_CONTAINERS = (list, dict, set, OrderedDict)


class ModuleSnapshot:
    """A module's attributes and containers, and what the program finds there: the same with fakes in their places."""

    def __init__(self, path: str, module: nn.Module) -> None:
        self.path, self.module, self.attributes = path, module, dict(module.__dict__)
        self.name = path or type(module).__name__
        tables = module._parameters, module._buffers, module._modules
        self.containers = {
            name: copy.copy(item)
            for name, item in module.__dict__.items()
            if type(item) in _CONTAINERS and not any(item is table for table in tables)
        }

    def begin(self) -> None:
        """Fakes are in their places: the program begins."""
        self.swapped, self.buffers = dict(self.module.__dict__), dict(self.module._buffers)
        self.registered = {**self.module._parameters, **self.module._modules}

    def rebound(self) -> Iterator[tuple[Slot, torch.Tensor]]:
        """Where the program has put another tensor, parameters aside, and that tensor."""
        prefix = f"{self.path}." if self.path else ""
        for table, old, now in (("buffer", self.buffers, self.module._buffers), ("attribute", self.swapped, self.module.__dict__)):
            for name, item in now.items():
                if isinstance(item, torch.Tensor) and item is not old.get(name):
                    yield Slot(table, (f"{prefix}{name}",)), item

    def restore(self) -> None:
        """Put back what containers hold, which all threads find."""
        for name, items in self.containers.items():
            put_back(self.attributes[name], pieces(items))

    def refuse_changes(self, reads: AttributeReads, following: Callable[[], OfCall] | None) -> None:
        """Raise CaptureError for what a captured step would not change, unless it is a tensor now: those are part of the graph.

        A table may gain tensors that follow from nothing of the call, where that can be told: by what `following` gives. Numbers and
        texts may settle: that shows in a further capture.
        """
        memos = [memo.place.name for memo in reads.memos_of(self.name, self.module)]
        gone = (name for name in self._gone() if name not in memos)
        now = {**self.module._parameters, **self.module._modules}
        new = (name for name, item in now.items() if item is not None and item is not self.registered.get(name))
        for name in (*self._counted(following, [*reads.put(self.module), *memos]), *gone, *self._rested_on(reads, memos), *new):
            raise LeavingError(refusal(self.name, name))

    def _counted(self, following: Callable[[], OfCall] | None, put: list[str]) -> Iterator[str]:
        """Numbers and containers that hold other things than before, and tensors that are gone."""
        for name in {**self.attributes, **self.module.__dict__}:
            old, new = self.attributes.get(name), self.module.__dict__.get(name)
            if is_number(old):  # it stands for one that each step goes on with
                continue
            own = self.swapped.get(name)  # a container of the same things is still that: `module.to(dtype)` makes such lists anew
            still = new is own or (type(new) is type(own) and type(new) in _CONTAINERS and _same_items(new, own))
            if not still and holds_fakes(new) and not isinstance(new, torch.Tensor):
                if not is_followed():
                    yield name
                continue
            counted = isinstance(old, (int, float)) and isinstance(new, (int, float)) and new != old and name not in put
            emptied = isinstance(old, torch.Tensor) and new is None
            refilled = name in self.containers and not _same_items(self.containers[name], old)
            if refilled and following is not None:  # which goes over the whole program
                refilled = not is_memo(self.containers[name], old, following())
            if counted or emptied or (refilled and not name.endswith(HOOKS)):
                yield name

    def _gone(self) -> Iterator[str]:
        now = self.module.__dict__
        yield from self.attributes.keys() - now.keys()
        for table in ("_parameters", "_buffers", "_modules"):
            yield from (name for name, old in self.attributes[table].items() if old is not None and now[table].get(name) is None)

    def _rested_on(self, reads: AttributeReads, memos: list[str]) -> Iterator[str]:
        """What the program has read and then replaced: the next step would find something else there, and may go another way."""
        for name, old, new in reads.replaced(self.module):
            of_graph = isinstance(new, torch.Tensor) and name not in self.module._parameters
            made_once = old is ABSENT and hasattr(getattr_static(type(self.module), name, None), "__get__")  # functools.cached_property
            begins = (is_number(new) or type(new) is tuple) and is_followed() and (old is None or old is ABSENT)
            begins = begins or (is_followed() and _is_alike_container(old, new))
            if not (of_graph or made_once or begins or is_number(old) or name.endswith(HOOKS) or name in memos or _alike(old, new)):
                yield name


def _same_items(one: Any, two: Any) -> bool:
    """Whether two containers hold the same objects. Numbers may be other objects, and sets have no order."""
    if isinstance(one, set) or isinstance(two, set):
        return bool(one == two)
    if len(one) != len(two):
        return False
    items = (x.items() if isinstance(x, dict) else x for x in (one, two))
    flat = ([piece for item in each for piece in (item if isinstance(item, tuple) else (item,))] for each in items)
    return all(a is b or (isinstance(a, (int, float, str)) and type(a) is type(b) and a == b) for a, b in zip(*flat, strict=False))


def _is_alike_container(old: Any, new: Any) -> bool:
    """Whether what the program has computed lies in a container as large as the one that lay there, or where nothing did."""
    begins = old is None or old is ABSENT
    return type(new) in (tuple, list, dict) and holds_fakes(new) and (begins or (type(old) is type(new) and len(old) == len(new)))


def _alike(one: Any, two: Any) -> bool:
    """Whether a program finds no difference between two things that lie in one place by turns."""
    if type(one) is not type(two):
        return False
    if type(one) in _CONTAINERS:
        return _same_items(one, two)
    try:
        return bool(one == two)
    except Exception:  # of whatever class they are
        return False


OfCall: TypeAlias = Callable[[torch.Tensor], bool]  # whether a tensor follows from more than the model


def of_call(draft: Draft) -> OfCall:
    """Whether a tensor of the program follows from the batch, from a draw, or from what was written on the way."""
    varying: set[Value] = {value for value in draft.inputs if value.storage.kind is Kind.INPUT}
    for node in draft.nodes:
        if is_random(node) or node.writes or any(value in varying for value in node.inputs):
            varying.update(node.results)
            varying.update(after for _, after in node.writes)
    return lambda tensor: draft.value(tensor) in varying


def is_memo(before: Any, now: Any, follows: OfCall) -> bool:
    """Whether a table has gained entries alone, tensors that follow from the model."""
    if type(before) is not dict or any(now.get(key, now) is not item for key, item in before.items()):
        return False
    return all(isinstance(item, FakeTensor) and not follows(item) for key, item in now.items() if key not in before)
