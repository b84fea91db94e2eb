"""Gradients where a caller may look for them: on the parameters that it holds itself, for as long as `after_backward` runs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError


@contextmanager
def on_the_callers_own(parameters: Mapping[torch.Tensor, torch.Tensor]) -> Iterator[None]:
    """Real parameters have the gradients of their fakes meanwhile, and fakes those that are put there; afterwards what they had.

    A list of parameters made beforehand, or the groups of the optimizer, are so as good as the parameters of the model that is given.
    """
    before = {real: real.grad for real in parameters}
    shown = {real: None if fake.grad is None else _for(real, fake.grad) for real, fake in parameters.items()}
    try:
        for real, gradient in shown.items():
            real.grad = gradient
        yield
        for real, fake in parameters.items():
            if real.grad is not shown[real]:
                fake.grad = real.grad
    finally:
        for real, gradient in before.items():
            real.grad = gradient


def _for(real: torch.Tensor, gradient: torch.Tensor) -> torch.Tensor:
    """The gradient, or where a parameter cannot hold that (it is a part, or has no memory) one that refuses to be used."""
    if real.shape == gradient.shape and real.device == gradient.device:
        return gradient
    with _disable_current_modes():
        return torch.empty((), dtype=real.dtype, device=real.device).expand(real.shape).as_subclass(_OutOfReach)


class _OutOfReach(torch.Tensor):
    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise CaptureError(
            f"after_backward uses the gradient of a parameter that it was not given, at {users_line()}, which is a part of it, or has no "
            "memory: take the parameters of the model that after_backward is called with (model.parameters())"
        )
