"""Which optimizer a training loop means: the torch optimizer within a framework's wrapper, whose `step` is its class's own."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from lowtide.errors import CaptureError
from lowtide.kernels.optimizers import Optimizers

# Wrappers whose step is that of the optimizer within, by the name of a class among their bases (frameworks make subclasses on the fly).
_PASS_ON = frozenset({"LightningOptimizer", "_FabricOptimizer", "AcceleratedOptimizer"})
_WITHIN = ("optimizer", "_optimizer")


def torch_optimizer(optimizer: Any) -> Any:
    """The optimizer that does the work: itself, or what frameworks' wrappers hold; several of a list as one.

    Raises CaptureError for wrappers that lead nowhere, and for optimizers of a list that share a parameter.
    """
    if isinstance(optimizer, (list, tuple)):
        return _together([torch_optimizer(each) for each in optimizer])
    *_, innermost = _from_outside_in(optimizer)
    if _passes_on(innermost):
        raise CaptureError(f"no optimizer was found within this {type(innermost).__name__}: give the torch optimizer that it wraps")
    return innermost


def _together(optimizers: list[Any]) -> Any:
    seen: dict[int, int] = {}
    for number, each in enumerate(optimizers):
        for parameter in (item for group in each.param_groups for item in group["params"]):
            if seen.setdefault(id(parameter), number) != number:
                raise CaptureError(
                    f"optimizers {seen[id(parameter)]} and {number} of the list both train a parameter of shape {tuple(parameter.shape)}, "
                    "each with state of its own: give each parameter to one of them"
                )
    return optimizers[0] if len(optimizers) == 1 else Optimizers(optimizers)


def scalers_within(optimizer: Any) -> Iterator[Any]:
    """The gradient scalers that wrappers around an optimizer use in their step."""
    for each in _from_outside_in(optimizer):
        if _passes_on(each) and (scaler := getattr(each, "scaler", None)) is not None:
            yield scaler


def counters_of(optimizer: Any) -> tuple[Callable[[], None], ...]:
    """What a framework does around each step of its wrapper: Lightning counts steps there under manual optimization (`global_step`)."""
    given = optimizer if isinstance(optimizer, (list, tuple)) else (optimizer,)
    wrappers = (each for one in given for each in _from_outside_in(one) if _passes_on(each))
    return tuple(partial(_count, each) for each in wrappers if hasattr(each, "_on_before_step"))


def _count(wrapper: Any) -> None:
    """Both at once, after a step: of one that fails nothing has begun. They are looked up now, as Lightning sets them for each batch."""
    wrapper._on_before_step()
    wrapper._on_after_step()


def accumulates_over(optimizer: Any) -> int:
    """Over how many batches a wrapper holds back the step of the optimizer within: 1 where it does not (`Accelerator`)."""
    states = (getattr(each, "gradient_state", None) for each in _from_outside_in(optimizer) if _passes_on(each))
    return max((int(getattr(state, "num_steps", 1)) for state in states if state is not None), default=1)


def _from_outside_in(optimizer: Any) -> list[Any]:
    """A wrapper, what it wraps, and so on. A ring of wrappers, or one that holds nothing, ends with a wrapper."""
    if isinstance(optimizer, (list, tuple)):
        return [each for item in optimizer for each in _from_outside_in(item)]
    seen = [optimizer]
    while _passes_on(seen[-1]):
        within = next((item for name in _WITHIN if isinstance(item := getattr(seen[-1], name, None), torch.optim.Optimizer)), None)
        if within is None or any(within is other for other in seen):
            break
        seen.append(within)
    return seen


def steps_as_its_class(optimizer: torch.optim.Optimizer) -> bool:
    """Whether `optimizer.step` is its class's; a learning-rate scheduler's wrapper around that, which only counts, is as good."""
    own = vars(optimizer).get("step")
    if own is None:
        return True
    return bool(getattr(own, "_wrapped_by_lr_sched", False)) and getattr(own, "__wrapped__", None) is type(optimizer).step


def refuse_unknown_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise CaptureError for an optimizer whose step does what its class does not say."""
    name = type(optimizer).__name__
    if not steps_as_its_class(optimizer):
        raise CaptureError(
            f"the step of this {name} was replaced (`optimizer.step = ...`), and a captured step would not call the replacement: "
            "override `step` in a class, or use after_backward"
        )
    if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
        raise CaptureError(
            f"this {name} has each process step its part of the parameters alone: make the optimizer itself for all of them, and give "
            'lowtide.optimize parallel=lowtide.Parallel(shard="optimizer"), which keeps a part of its state on each'
        )
    for attribute, item in vars(optimizer).items():
        if holds_optimizer(item):
            raise CaptureError(
                f"this {name} steps another optimizer, which it keeps in its attribute {attribute!r}; what its own step does beside cannot "
                f"be captured: give what is within (`optimizer=optimizer.{attribute}`, also a list) if those steps are all that is wanted"
            )


def _passes_on(optimizer: Any) -> bool:
    return any(base.__name__ in _PASS_ON for base in type(optimizer).__mro__)


def holds_optimizer(item: Any) -> bool:
    """Whether it is an optimizer, or a list, tuple or dictionary of some."""
    pieces = item if isinstance(item, (list, tuple)) else item.values() if type(item) is dict else (item,)
    return any(isinstance(piece, torch.optim.Optimizer) for piece in pieces)
