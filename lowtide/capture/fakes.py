"""A model with fake tensors in the places of its own, for as long as a capture lasts; afterwards it is as it was, to the last attribute."""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.errors import CaptureError
from lowtide.ir.slots import Slot


@dataclass(frozen=True)
class FakeModel:
    """The fake of each tensor that a model holds, by the real one, and their names. Tied tensors have one entry, under their first name."""

    parameters: dict[torch.Tensor, torch.Tensor]
    buffers: dict[torch.Tensor, torch.Tensor]
    attributes: dict[torch.Tensor, torch.Tensor]  # plain tensors that modules keep beside
    names: dict[torch.Tensor, str]

    @property
    def all(self) -> dict[torch.Tensor, torch.Tensor]:
        """The three tables as one."""
        return {**self.parameters, **self.buffers, **self.attributes}


def fake_model(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> FakeModel:
    """Fakes of all that a model owns. What lies on the meta device is taken to lie on `device`."""
    fakes = FakeModel({}, {}, {}, {})
    for table, found in ((model.named_parameters(), fakes.parameters), (model.named_buffers(), fakes.buffers)):
        for name, tensor in table:
            _refuse(name, tensor)
            fakes.names[tensor], found[tensor] = name, fake_of(tensor, mode, device)
            _refuse_late_hooks(name, tensor)
    for name, tensor in _attributes(model):
        if tensor not in fakes.names:
            fakes.names[tensor], fakes.attributes[tensor] = name, fake_of(tensor, mode, device)
    return fakes


def fake_of(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    """A fake leaf like `tensor`, without its gradient."""
    if tensor.device.type != "meta":
        fake = mode.from_tensor(tensor)
        fake.grad = None
        return fake
    with mode:
        empty = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=device)
        return nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty


def fake_batch_leaf(tensor: torch.Tensor, mode: FakeTensorMode, device: torch.device) -> torch.Tensor:
    """A fake like a tensor of the batch, on a storage of its own: two arguments that are one tensor today need not be tomorrow."""
    place = device if tensor.device.type == "meta" else tensor.device
    with mode:
        return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=place)


def _attributes(model: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Plain tensors in the attributes of modules. One within a graph is what a forward pass left behind: it would be none to start from."""
    for path, module in model.named_modules():
        for name, item in module.__dict__.items():
            if type(item) is torch.Tensor and item.layout is torch.strided and not item.requires_grad:
                yield _joined(path, name), item


def _refuse_late_hooks(name: str, tensor: torch.Tensor) -> None:
    if getattr(tensor, "_post_accumulate_grad_hooks", None):
        raise CaptureError(
            f"{name} has a hook that runs after its gradient is accumulated, which a captured step would not: use after_backward"
        )


def _refuse(name: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
        raise CaptureError(f"{name} is not initialised yet: run one batch through the model first")
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        raise CaptureError(f"{name} is a {type(tensor).__name__}; plain tensors and parameters can be captured")
    if tensor.layout is not torch.strided:
        raise CaptureError(f"{name} has layout {tensor.layout}; dense tensors can be captured")


@contextmanager
def swapped(model: nn.Module, fakes: FakeModel) -> Iterator[Places]:
    """Run with fakes in the model's places.

    Raises CaptureError if the model keeps count in Python numbers or containers, which no graph could follow.
    """
    modules = list(model.named_modules())
    before = [_Snapshot(module) for _, module in modules]
    replace = fakes.all
    try:
        for _, module in modules:
            _swap(module, replace)
        yield Places.of(modules)
        for (path, module), snapshot in zip(modules, before, strict=True):
            snapshot.refuse_changes(path or type(module).__name__)
    finally:
        for snapshot in before:
            snapshot.restore()


@dataclass(frozen=True)
class Places:
    """Where modules keep tensors beside parameters, and what was there before the program ran."""

    before: tuple[tuple[str, nn.Module, dict[str, Any], dict[str, Any]], ...]  # path, module, its buffers, its attributes

    @classmethod
    def of(cls, modules: list[tuple[str, nn.Module]]) -> Places:
        """The places of these modules as they are now."""
        return cls(tuple((path, module, dict(module._buffers), dict(module.__dict__)) for path, module in modules))

    def rebound(self) -> Iterator[tuple[Slot, torch.Tensor]]:
        """The places where the program has put another tensor, and that tensor."""
        for path, module, buffers, attributes in self.before:
            for place, old, now in (("buffer", buffers, module._buffers), ("attribute", attributes, module.__dict__)):
                for name, item in now.items():
                    if isinstance(item, torch.Tensor) and item is not old.get(name):
                        yield Slot(place, (_joined(path, name),)), item


class _Snapshot:
    """A module's attributes, tables and containers."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.attributes = module, dict(module.__dict__)
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module._modules)
        self.tables = [(table, dict(table)) for table in tables]
        self.containers = {
            name: copy.copy(item)
            for name, item in module.__dict__.items()
            if type(item) in _CONTAINERS and not any(item is table for table in tables)
        }

    def restore(self) -> None:
        """Put them back, in the dictionaries and lists that held them."""
        self.module.__dict__.clear()
        self.module.__dict__.update(self.attributes)
        for table, items in self.tables:
            table.clear()
            table.update(items)
        for name, items in self.containers.items():
            container = self.attributes[name]
            container.clear()
            container.extend(items) if isinstance(container, list) else container.update(items)

    def refuse_changes(self, path: str) -> None:
        """Raise CaptureError for an attribute that no longer holds what it held, unless it is a tensor now: those are part of the graph."""
        for name, old in self.attributes.items():
            new = self.module.__dict__.get(name)
            counted = isinstance(old, (int, float)) and isinstance(new, (int, float)) and new != old
            emptied = isinstance(old, torch.Tensor) and new is None
            refilled = name in self.containers and not _same_items(self.containers[name], self.attributes[name])
            if counted or emptied or (refilled and not name.endswith(_HOOKS)):
                raise CaptureError(
                    f"module {path!r} changes its attribute {name!r} in its forward, which a captured step would not: "
                    "keep what changes from step to step in a buffer"
                )


_CONTAINERS = (list, dict, set, OrderedDict)
_HOOKS = ("_hooks", "_hooks_with_kwargs", "_hooks_always_called")  # libraries add theirs in the first forward; they are put back only


def _same_items(one: Any, two: Any) -> bool:
    """Whether two containers hold the same objects. Numbers may be other objects, and sets have no order."""
    if isinstance(one, set) or isinstance(two, set):
        return bool(one == two)
    if len(one) != len(two):
        return False
    ones, twos = (list(x.items()) if isinstance(x, dict) else list(x) for x in (one, two))
    flat = zip((part for item in ones for part in _parts(item)), (part for item in twos for part in _parts(item)), strict=False)
    return all(a is b or (isinstance(a, (int, float, str)) and type(a) is type(b) and a == b) for a, b in flat)


def _parts(item: Any) -> tuple[Any, ...]:
    return item if isinstance(item, tuple) else (item,)


def _swap(module: nn.Module, replace: dict[torch.Tensor, torch.Tensor]) -> None:
    """Fakes for a module's tensors, also in lists of them that it keeps beside (as recurrent layers do)."""
    for table in (module._parameters, module._buffers):
        for name, tensor in table.items():
            if tensor is not None:
                table[name] = replace[tensor]  # type: ignore[assignment]
    for name, item in module.__dict__.items():
        if isinstance(item, torch.Tensor) and item in replace:
            module.__dict__[name] = replace[item]
        elif isinstance(item, list) and any(isinstance(part, torch.Tensor) and part in replace for part in item):
            module.__dict__[name] = [replace.get(part, part) if isinstance(part, torch.Tensor) else part for part in item]


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
