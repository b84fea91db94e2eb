"""`module.to(...)` while a capture lasts: torch would swap the fakes in the module's places, which it cannot."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn

from lowtide.capture.care.turns import replaced
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError


@contextmanager
def conversions_in_place() -> Iterator[None]:
    """Conversions that change nothing (`.to(self.dtype)` in a forward) do nothing; others raise CaptureError."""
    with replaced(nn.Module, "_apply", lambda _: _apply):
        yield


def _apply(module: Any, convert: Callable[[torch.Tensor], torch.Tensor], recurse: bool = True) -> Any:
    for child in module.children() if recurse else ():
        child._apply(convert)
    for name, tensor in (*module._parameters.items(), *module._buffers.items()):
        if tensor is not None and _converted(tensor, convert) is not tensor:
            raise CaptureError(
                f"{name} of a {type(module).__name__} is converted while the program runs, at {users_line()}: a captured step leaves "
                "dtype and device of parameters as they are; convert the model before it is optimized"
            )
    return module


def _converted(tensor: torch.Tensor, convert: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
    with torch.no_grad():
        return convert(tensor)
