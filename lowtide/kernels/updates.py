"""The first update of a parameter by torch's fused kernels, which makes the parameter's state.

Later updates write the state where it lies, by torch's own operators. The first one gives it, so that a graph need not write twice into
what it has made itself.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from lowtide.kernels.library import LIBRARY, define


def _first_adam(op: Any, parameter: torch.Tensor, gradient: torch.Tensor, step: torch.Tensor, **settings: Any) -> list[torch.Tensor]:
    """Its averages of gradients and of their squares, and with `amsgrad` the largest of the latter."""
    states = _made(parameter, gradient, step, **settings)
    op([parameter], [gradient], *([each] for each in states), *([[]] if len(states) < 3 else []), [step], **settings)
    return states


def _made(parameter: torch.Tensor, gradient: torch.Tensor, step: torch.Tensor, **settings: Any) -> list[torch.Tensor]:
    count = 3 if settings["amsgrad"] else 2
    return [torch.zeros_like(parameter, memory_format=torch.preserve_format) for _ in range(count)]


def _first_sgd(op: Any, parameter: torch.Tensor, gradient: torch.Tensor, **settings: Any) -> torch.Tensor:
    """Its momentum."""
    momentum = torch.empty_like(gradient)
    op([parameter], [gradient], [momentum], is_first_step=True, **settings)
    return momentum


def _momentum(parameter: torch.Tensor, gradient: torch.Tensor, **settings: Any) -> torch.Tensor:
    return torch.empty_like(gradient)


_ADAM = "float beta1, float beta2, float weight_decay, float eps, bool amsgrad, bool maximize"
_SGD = "float dampening, bool nesterov, bool maximize"
for _suffix, _lr in (("", "float"), (".tensor_lr", "Tensor")):
    for _name in ("adam", "adamw"):
        _schema = f"first_{_name}{_suffix}(Tensor(a!) self, Tensor grad, Tensor step, *, {_lr} lr, {_ADAM}) -> Tensor[]"
        define(_schema, partial(_first_adam, getattr(torch.ops.aten, f"_fused_{_name}_")))
        torch.library.register_fake(f"lowtide::first_{_name}{_suffix}", _made, lib=LIBRARY)
    _schema = f"first_sgd{_suffix}(Tensor(a!) self, Tensor grad, *, float weight_decay, float momentum, {_lr} lr, {_SGD}) -> Tensor"
    define(_schema, partial(_first_sgd, getattr(torch.ops.aten, "_fused_sgd_")))  # noqa: B009
    torch.library.register_fake(f"lowtide::first_sgd{_suffix}", _momentum, lib=LIBRARY)
