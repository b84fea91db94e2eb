"""Hooks on an optimizer's step, run around the captured one. What they would see or change too early or too late is refused.

A hook before the step runs before the forward pass has, so it may change hyper-parameters, which the step then reads, and what the program
does not know of; not parameters, buffers, state or the random generator. Gradients are gone where a hook could look at them.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks
from torch.overrides import TorchFunctionMode

from lowtide.errors import StepError
from lowtide.kernels.optimizers import each_of


def run_before(model: nn.Module, optimizer: torch.optim.Optimizer, may_skip: bool = False) -> None:
    """Run the hooks that precede the step. Raises StepError for one that does what it could not do in time."""
    hooks = [*_global_optimizer_pre_hooks.values(), *optimizer._optimizer_step_pre_hooks.values()]
    if not hooks:
        return
    if may_skip:
        raise StepError(
            "hooks before the optimizer's step run only if a gradient scaler does not skip it, which is not known yet: remove them"
        )
    before = _versions(model, optimizer), torch.get_rng_state()
    with _NoGradients(optimizer):
        for hook in hooks:
            if hook(optimizer, (optimizer,), {}) is not None:
                raise StepError(f"{_text(hook)} before the optimizer's step returns other arguments for it, which a captured step has not")
    if _versions(model, optimizer) != before[0] or not torch.equal(torch.get_rng_state(), before[1]):
        raise StepError(
            f"a hook before the step of {type(optimizer).__name__} changes parameters, buffers, optimizer state or the random generator. A "
            "captured step runs such hooks before its forward pass, which would see the change too early: use after_backward"
        )


@contextmanager
def already_run(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """The optimizer's own step runs no hooks before it meanwhile."""
    tables: list[dict[Any, Any]] = [_global_optimizer_pre_hooks, *(each._optimizer_step_pre_hooks for each in each_of(optimizer))]
    tables_before = [dict(table) for table in tables]
    try:
        for table in tables:
            table.clear()
        yield
    finally:
        for table, hooks in zip(tables, tables_before, strict=True):
            table.update(hooks)


def run_after(optimizer: torch.optim.Optimizer) -> None:
    hooks = [*optimizer._optimizer_step_post_hooks.values(), *_global_optimizer_post_hooks.values()]
    if not hooks:
        return
    with _NoGradients(optimizer):
        for hook in hooks:
            hook(optimizer, (optimizer,), {})


class _NoGradients(TorchFunctionMode):
    """Raises where a hook asks for a gradient, which eager PyTorch would still have."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        super().__init__()
        self.trained = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func == _READS_GRADIENT and id(args[0]) in self.trained:
            raise StepError(
                "a hook on the optimizer's step reads a parameter's gradient, which a captured step has used and let go: use after_backward"
            )
        return func(*args, **(kwargs or {}))


_READS_GRADIENT = vars(torch._C.TensorBase)["grad"].__get__


def _versions(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[tuple[int, int]]:
    """What tells that a tensor of the caller's was written or replaced."""
    state = chain.from_iterable(entries.values() for entries in optimizer.state.values())
    tensors = (item for item in chain(model.parameters(), model.buffers(), state) if isinstance(item, torch.Tensor))
    return [(id(tensor), tensor._version) for tensor in tensors]


def _text(hook: Any) -> str:
    return f"hook {getattr(hook, '__name__', type(hook).__name__)}"
