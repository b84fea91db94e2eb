"""Several optimizers as one: each has parameters, settings and state of its own, and they step one after the other.

And the first update of a parameter by torch's fused kernels, which gives the parameter's state. Later ones write it where it lies, by
torch's own operators; so a graph need not write twice into what it has made itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import chain
from typing import Any

import torch

from lowtide.kernels.library import LIBRARY, define


class Optimizers(torch.optim.Optimizer):
    """Behaves as the one that has all their groups, in their order. Nothing is copied: what it shows is theirs."""

    def __init__(self, within: Sequence[torch.optim.Optimizer]) -> None:
        self.within = tuple(within)

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        return [group for each in self.within for group in each.param_groups]

    @property
    def state(self) -> Mapping[torch.Tensor, Any]:  # type: ignore[override]
        return _States(self.within)

    def zero_grad(self, set_to_none: bool = True) -> None:
        for each in self.within:
            each.zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> None:  # type: ignore[override]
        for each in self.within:
            each.step()


def each_of(optimizer: torch.optim.Optimizer) -> tuple[torch.optim.Optimizer, ...]:
    """The optimizers that one stands for; itself where that is one."""
    return optimizer.within if isinstance(optimizer, Optimizers) else (optimizer,)


class _States(Mapping[torch.Tensor, Any]):
    def __init__(self, within: Sequence[torch.optim.Optimizer]) -> None:
        self.states = [each.state for each in within]
        self.owner = {id(item): each.state for each in within for group in each.param_groups for item in group["params"]}

    def __getitem__(self, parameter: torch.Tensor) -> Any:
        state = self.owner.get(id(parameter))
        if state is None:
            state = next((each for each in self.states if parameter in each), self.states[0])
        return state[parameter]

    def __iter__(self) -> Iterator[torch.Tensor]:
        return chain.from_iterable(self.states)

    def __len__(self) -> int:
        return sum(map(len, self.states))


def _first_adam(op: Any, parameter: torch.Tensor, gradient: torch.Tensor, step: torch.Tensor, **settings: Any) -> list[torch.Tensor]:
    """Its averages of gradients and of their squares, and with `amsgrad` the largest of the latter."""
    states = _made(parameter, gradient, step, **settings)
    op([parameter], [gradient], *([each] for each in states), *([[]] if len(states) < 3 else []), [step], **settings)
    return states


def _made(parameter: torch.Tensor, gradient: torch.Tensor, step: torch.Tensor, **settings: Any) -> list[torch.Tensor]:
    count = 3 if settings["amsgrad"] else 2
    return [torch.zeros_like(parameter, memory_format=torch.preserve_format) for _ in range(count)]


def _first_sgd(op: Any, parameter: torch.Tensor, gradient: torch.Tensor, **settings: Any) -> torch.Tensor:
    momentum = torch.empty_like(gradient)
    op([parameter], [gradient], [momentum], is_first_step=True, **settings)
    return momentum


_ADAM = "float beta1, float beta2, float weight_decay, float eps, bool amsgrad, bool maximize"
_SGD = "float dampening, bool nesterov, bool maximize"
for _suffix, _lr in (("", "float"), (".tensor_lr", "Tensor")):
    for _name in ("adam", "adamw"):
        _schema = f"first_{_name}{_suffix}(Tensor(a!) self, Tensor grad, Tensor step, *, {_lr} lr, {_ADAM}) -> Tensor[]"
        define(_schema, partial(_first_adam, getattr(torch.ops.aten, f"_fused_{_name}_")))
        torch.library.register_fake(f"lowtide::first_{_name}{_suffix}", _made, lib=LIBRARY)
    _schema = f"first_sgd{_suffix}(Tensor(a!) self, Tensor grad, *, float weight_decay, float momentum, {_lr} lr, {_SGD}) -> Tensor"
    define(_schema, partial(_first_sgd, getattr(torch.ops.aten, "_fused_sgd_")))  # noqa: B009
    torch.library.register_fake(
        f"lowtide::first_sgd{_suffix}", lambda parameter, gradient, **settings: torch.empty_like(gradient), lib=LIBRARY
    )
