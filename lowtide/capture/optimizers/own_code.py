"""An optimizer's own code, run once: what it does to traced numbers is recorded, also where these become tensors and tensors numbers."""

from __future__ import annotations

import warnings
from collections import deque
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import copy
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload, OpOverloadPacket
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import TorchFunctionMode

from lowtide.base.skeleton import is_plain_object, leaves
from lowtide.capture.care.turns import for_this_thread, undoing
from lowtide.capture.optimizers.derived_numbers import traced_calls
from lowtide.capture.optimizers.scalars import Scalars, apply, is_traced
from lowtide.errors import CaptureError
from lowtide.ir.graph import Slot

# What an optimizer's state may consist of.
KEPT = (torch.Tensor, bool, int, float, str, type(None), torch.dtype, torch.device, torch.Size, Enum)


def run(twin: torch.optim.Optimizer, scalars: Scalars) -> None:
    """Take the step. The class's own `step`: the instance's may be wrapped by a scheduler that counts calls."""
    import torch._dynamo  # optimizers import it in their step; not while tensors are fake

    tracing = traced_calls(is_traced, apply, scalars.read)
    with _TensorsAndNumbers(scalars), tracing, torch.no_grad(), warnings.catch_warnings(), _without_global_hooks():
        warnings.simplefilter("ignore", UserWarning)
        type(twin).step(twin)


class _TensorsAndNumbers(TorchFunctionMode):
    """Keeps the trace where tensors become numbers (`tensor.item()`) and numbers tensors, which torch makes of the bare number."""

    def __init__(self, scalars: Scalars) -> None:
        super().__init__()
        self.scalars = scalars

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.item:
            return self.scalars.read(args[0])
        if func in (torch.Tensor.__bool__, torch.is_nonzero):
            if args[0].dtype is torch.bool and (answer := self.scalars.answered(args[0])) is not None:
                return answer
            return self.scalars.compare("ne", self.scalars.read(args[0]), 0)
        if func in _TO_NUMBERS:
            return _TO_NUMBERS[func](self.scalars.freeze(self.scalars.read(args[0])))
        if func in (torch.tensor, torch.as_tensor) and kwargs.keys() <= {"dtype", "device"}:
            numbers = args[0] if isinstance(args[0], (list, tuple)) else [args[0]]
            if any(map(is_traced, numbers)) and (tensor := self._made(numbers, kwargs)) is not None:
                return tensor.reshape(len(numbers) if numbers is args[0] else ())
        if func is torch.full and is_traced(args[-1]) and kwargs.get("dtype") is None and self.scalars.kind_of(args[-1]) is int:
            return func(*args, **{**kwargs, "dtype": torch.int64})
        if isinstance(func, (OpOverload, OpOverloadPacket)) and any(map(is_traced, args)):
            args = self._whole(func, args)
        if func is torch.Tensor.__setitem__ and is_traced(args[2]):
            target, index, number = args
            return func(target, index, torch.full((), number, dtype=target.dtype, device=target.device))
        return func(*args, **kwargs)

    def _whole(self, func: OpOverload | OpOverloadPacket, args: tuple[Any, ...]) -> tuple[Any, ...]:
        """Arguments with integers where an operator takes nothing else, as those of other libraries may."""
        names: Sequence[str] = func.overloads() if isinstance(func, OpOverloadPacket) else []
        if isinstance(func, OpOverloadPacket) and len(names) > 1:
            return args
        op = getattr(func, names[0]) if isinstance(func, OpOverloadPacket) else func
        kinds = (str(each.type) for each in op._schema.arguments)
        return tuple(
            self.scalars.whole(item) if is_traced(item) and kind in ("int", "SymInt") else item
            for item, kind in zip(args, kinds, strict=False)
        )

    def _made(self, numbers: Sequence[Any], options: dict[str, Any]) -> torch.Tensor | None:
        """[numbers] a tensor of them; None where one is no number that is known to be a float or an integer."""
        kinds = [self.scalars.kind_of(item) if is_traced(item) else type(item) for item in numbers]
        if not {*kinds} <= {float, int}:
            return None
        options = {"dtype": torch.get_default_dtype() if float in kinds else torch.int64} | options
        return torch.stack([torch.full((), item, **options) for item in numbers])


_TO_NUMBERS: dict[Any, type] = {torch.Tensor.__float__: float, torch.Tensor.__int__: int, torch.Tensor.__index__: int}


@contextmanager
def _without_global_hooks() -> Iterator[None]:
    """Hooks on every optimizer's step run at each step, not while it is traced on this thread."""
    with undoing() as undo:
        for table in (_global_optimizer_pre_hooks, _global_optimizer_post_hooks):
            for key, hook in list(table.items()):
                undo(partial(_put_back, table, key, hook))
                table[key] = for_this_thread(lambda *given: None, hook)
        yield


def _put_back(table: dict[int, Any], key: int, hook: Any) -> None:
    if key in table:  # else another thread has taken it off
        table[key] = hook


# The state, which is looked at by itself; torch's note that it has looked at the parameters, which holds for all steps.
_OWN = frozenset({"state", "param_groups", "_need_device_dtype_check_for_fused"})
_HOLDERS = (list, tuple, dict, set, deque)
_DEEPEST = 6  # objects within one another


def own_attributes(optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """Its attributes, without anybody taking that for the program's reading all of them, its hooks among them."""
    table: dict[str, Any] = object.__getattribute__(optimizer, "__dict__")
    return table


@contextmanager
def containers_kept(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Lists and the like in its attributes, which the step may write into, hold what they did when this ends."""
    kept: dict[int, tuple[Any, Any]] = {}
    wanted = [item for name, item in own_attributes(optimizer).items() if name not in _OWN]
    while wanted:
        item = wanted.pop()
        if id(item) in kept:
            continue
        if isinstance(item, _HOLDERS):
            kept[id(item)] = item, copy(item)
            wanted += item.values() if isinstance(item, dict) else item
        elif is_plain_object(item):
            wanted.append(vars(item))
    try:
        yield
    finally:
        for item, before in kept.values():
            if not isinstance(item, tuple) and _contents(item, _DEEPEST) != _contents(before, _DEEPEST):
                item.clear()
                (item.update if isinstance(item, (dict, set)) else item.extend)(before)


def attributes(twin: torch.optim.Optimizer) -> dict[str, Any]:
    """What they hold, by identity."""
    return {name: _contents(item) for name, item in own_attributes(twin).items() if name not in _OWN}


def _contents(item: Any, depth: int = 0) -> Any:
    """Of a container, or a plain object, what lies in it, for comparison; else the thing itself."""
    if depth > 2 * _DEEPEST:  # one may hold itself
        return Same(item)
    if depth < _DEEPEST and is_plain_object(item):
        return Same(item), _contents(vars(item), depth + 1)
    if isinstance(item, dict):
        pairs = ((Same(key) if isinstance(key, torch.Tensor) else key, _contents(each, depth + 1)) for key, each in item.items())
        return type(item), *pairs
    return (type(item), *(_contents(each, depth + 1) for each in item)) if isinstance(item, _HOLDERS) else Same(item)


@dataclass(frozen=True)
class Same:
    """One object, equal to itself alone."""

    item: Any

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Same) and other.item is self.item


class UndeclaredError(CaptureError):
    """A step that changes attributes of its optimizer, which its program is to be given."""

    def __init__(self, slots: Sequence[Slot], message: str) -> None:
        super().__init__(message)
        self.slots = slots


def refuse_undeclared(number: int, twin: torch.optim.Optimizer, before: dict[str, Any], declared: Mapping[Slot, Any]) -> None:
    """Raise UndeclaredError where an optimizer has changed attributes that are no inputs of the program. `before`: as `attributes` gave."""
    now = own_attributes(twin)
    if gone := [name for name in before if name not in now]:
        raise CaptureError(f"the optimizer's step deletes its attribute {gone[0]!r}, which cannot be captured: set it to None")
    changed = {name: item for name, item in now.items() if name not in _OWN and _contents(item) != before.get(name)}
    slots = {name: Slot("optimizer", (number, name)) for name in changed}
    unknown = [slot for slot in slots.values() if slot not in declared]
    for name, item in changed.items():
        message = f"the optimizer's step changes its attribute {name!r}, which a captured step would not: keep it in `state`"
        if any(not isinstance(leaf, KEPT) for _, leaf in leaves(item)):
            raise CaptureError(message)
        if unknown:
            raise UndeclaredError(unknown, message)
