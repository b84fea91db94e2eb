"""A model with fake tensors in the places of its own, for as long as a capture lasts; afterwards it is as it was, to the last attribute."""

from __future__ import annotations

import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.errors import CaptureError


@dataclass(frozen=True)
class FakeModel:
    """The fake of each parameter and buffer, by the real tensor, and their names. Tied tensors have one entry, under their first name."""

    parameters: dict[torch.Tensor, torch.Tensor]
    buffers: dict[torch.Tensor, torch.Tensor]
    names: dict[torch.Tensor, str]


def fake_model(model: nn.Module, mode: FakeTensorMode, device: torch.device) -> FakeModel:
    """Fakes of all that a model owns. What lies on the meta device is taken to lie on `device`."""
    names: dict[torch.Tensor, str] = {}
    parameters: dict[torch.Tensor, torch.Tensor] = {}
    buffers: dict[torch.Tensor, torch.Tensor] = {}
    for table, found in ((model.named_parameters(), parameters), (model.named_buffers(), buffers)):
        for name, tensor in table:
            _refuse(name, tensor)
            names[tensor], found[tensor] = name, fake_of(tensor, mode, device)
    return FakeModel(parameters, buffers, names)


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


def _refuse(name: str, tensor: torch.Tensor) -> None:
    if isinstance(tensor, (nn.parameter.UninitializedParameter, nn.parameter.UninitializedBuffer)):
        raise CaptureError(f"{name} is not initialised yet: run one batch through the model first")
    if type(tensor) not in (torch.Tensor, nn.Parameter, nn.Buffer):
        raise CaptureError(f"{name} is a {type(tensor).__name__}; plain tensors and parameters can be captured")
    if tensor.layout is not torch.strided:
        raise CaptureError(f"{name} has layout {tensor.layout}; dense tensors can be captured")


@contextmanager
def swapped(model: nn.Module, fakes: FakeModel) -> Iterator[None]:
    """Run with fakes in the model's places.

    Raises CaptureError if the model counts steps in a Python number, which no graph could follow.
    """
    modules = list(model.modules())
    before = [_Snapshot(module) for module in modules]
    replace = {**fakes.parameters, **fakes.buffers}
    try:
        for module in modules:
            _swap(module, replace)
        yield
        for path, module in model.named_modules():
            _refuse_changed_numbers(path, module, before[modules.index(module)])
    finally:
        for snapshot in before:
            snapshot.restore()


class _Snapshot:
    """A module's attributes and tables."""

    def __init__(self, module: nn.Module) -> None:
        self.module, self.attributes = module, dict(module.__dict__)
        tables: tuple[dict[str, Any], ...] = (module._parameters, module._buffers, module._modules)
        self.tables = [(table, dict(table)) for table in tables]

    def restore(self) -> None:
        """Put them back, in the dictionaries that held them."""
        self.module.__dict__.clear()
        self.module.__dict__.update(self.attributes)
        for table, items in self.tables:
            table.clear()
            table.update(items)


def _swap(module: nn.Module, replace: dict[torch.Tensor, torch.Tensor]) -> None:
    """Fakes for a module's tensors, also in lists of them that it keeps beside (as recurrent layers do)."""
    for table in (module._parameters, module._buffers):
        for name, tensor in table.items():
            if tensor is not None:
                table[name] = replace[tensor]  # type: ignore[assignment]
    for name, item in module.__dict__.items():
        if isinstance(item, list) and any(isinstance(part, torch.Tensor) and part in replace for part in item):
            module.__dict__[name] = [replace.get(part, part) if isinstance(part, torch.Tensor) else part for part in item]


def _refuse_changed_numbers(path: str, module: nn.Module, before: _Snapshot) -> None:
    for name, item in module.__dict__.items():
        old = before.attributes.get(name)
        if isinstance(old, (int, float)) and isinstance(item, (int, float)) and item != old:
            raise CaptureError(
                f"module {path or type(module).__name__!r} changes its attribute {name!r} from {old!r} to {item!r} in its forward: "
                "a captured step would not; keep it in a buffer"
            )


@contextmanager
def untouched_randomness() -> Iterator[None]:
    """Every generator is as before afterwards.

    Raises CaptureError if the program drew from Python's or NumPy's, which no graph could follow.
    """
    state, python, numpy = torch.get_rng_state(), random.getstate(), np.random.get_state(legacy=False)
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    try:
        yield
        drawn = [
            name
            for name, same in (("random", random.getstate() == python), ("numpy.random", _same(np.random.get_state(legacy=False), numpy)))
            if not same
        ]
        if drawn:
            raise CaptureError(
                f"the program draws from {' and '.join(drawn)}: a captured step would repeat the same choice for ever; draw with torch"
            )
    finally:
        torch.set_rng_state(state)
        random.setstate(python)
        np.random.set_state(numpy)
        if cuda is not None:
            torch.cuda.set_rng_state_all(cuda)


def _same(one: Any, two: Any) -> bool:
    return repr(one) == repr(two)
