"""What a training loop has around an optimizer: a framework's wrapper, and a gradient scaler.

The torch optimizer within a wrapper is the one whose `step` is its class's own.

A gradient scaler's part of a step: the loss scaled, gradients unscaled and checked, the scale updated, the step skipped. All of it is
operators of the graph, with the numbers of `torch.amp.GradScaler`. Skipping is a node that ends the program (`py.stop_if`): all that
happens in a step that is skipped, too, comes before it, and every write of the optimizer after.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.capture.care.turns import all_replaced
from lowtide.capture.draft import Draft
from lowtide.capture.optimizers.own_code import own_attributes
from lowtide.capture.optimizers.scalars import Guard
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError
from lowtide.ir.graph import Kind, Node, Slot, Value
from lowtide.ir.operators.nodes import is_random
from lowtide.ir.operators.row import ITEM, STOP
from lowtide.kernels.optimizers import Optimizers

# Wrappers whose step is that of the optimizer within, by the name of a class among their bases (frameworks make subclasses on the fly).
_PASS_ON = frozenset({"LightningOptimizer", "_FabricOptimizer", "AcceleratedOptimizer"})
_WITHIN = ("optimizer", "_optimizer")
_TENSORS = ("_scale", "_growth_tracker")
_SETTINGS = ("_growth_factor", "_backoff_factor", "_growth_interval")
_METHODS = ("scale", "unscale_", "step", "update")


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


def begin(optimizer: torch.optim.Optimizer) -> None:
    """What bitsandbytes' optimizers do in their first step, before they step: settings of single parameters, by their ids."""
    if type(optimizer).__module__.startswith("bitsandbytes.") and own_attributes(optimizer).get("initialized") is False:
        optimizer.check_overrides()  # type: ignore[attr-defined]
        optimizer.initialized = True  # type: ignore[attr-defined]


def refuse_unknown_step(optimizer: torch.optim.Optimizer) -> None:
    """Raise CaptureError for an optimizer whose step does what its class does not say."""
    name, own = type(optimizer).__name__, own_attributes(optimizer).get("step")
    counts = getattr(own, "_wrapped_by_lr_sched", False) and getattr(own, "__wrapped__", None) is type(optimizer).step
    if own is not None and not counts:  # a learning-rate scheduler's wrapper only counts
        raise CaptureError(
            f"the step of this {name} was replaced (`optimizer.step = ...`), and a captured step would not call the replacement: "
            "override `step` in a class, or use after_backward"
        )
    if any(base.__name__ == "ZeroRedundancyOptimizer" for base in type(optimizer).__mro__):
        raise CaptureError(
            f"this {name} has each process step its part of the parameters alone: make the optimizer itself for all of them, and give "
            'lowtide.optimize parallel=lowtide.Parallel(shard="optimizer"), which keeps a part of its state on each'
        )
    for attribute, item in own_attributes(optimizer).items():
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


@dataclass(frozen=True)
class ScalerTrace:
    """An enabled scaler with fakes for its tensors."""

    scaler: torch.amp.GradScaler
    scale: torch.Tensor
    tracker: torch.Tensor

    @classmethod
    def of(cls, scaler: torch.amp.GradScaler, draft: Draft, mode: FakeTensorMode, device: torch.device) -> ScalerTrace:
        """Declare what the scaler holds as inputs; it makes its tensors in its first step."""
        with mode:
            fakes = torch.full((), 1.0, dtype=torch.float32, device=device), torch.full((), 0, dtype=torch.int32, device=device)
        for name, fake in zip(_TENSORS, fakes, strict=True):
            draft.add_input(fake, Slot("scaler", (name,)), Kind.STATE, f"scaler.{name}")
        return cls(scaler, *fakes)

    def guards(self) -> tuple[Guard, ...]:
        """The scaler's numbers are part of the program."""
        return tuple(Guard(Slot("scaler", (name,)), "eq", getattr(self.scaler, name), True) for name in (*_SETTINGS, "_enabled"))

    @torch.no_grad()
    def unscale(self, parameters: Iterable[torch.Tensor]) -> torch.Tensor:
        """Divide gradients by the scale; 1.0 if one of them has an element that is not finite, else 0.0."""
        inverse = self.scale.double().reciprocal().float()
        infinite = []
        for parameter in parameters:
            if parameter.grad is None or not parameter.grad.numel():
                continue
            if parameter.grad.dtype is torch.float16:
                raise CaptureError("gradients of float16 cannot be unscaled, in eager PyTorch neither: keep parameters in float32")
            low, high = torch.aminmax(parameter.grad)  # a NaN is both, an infinity is one of them
            infinite.append(torch.isfinite(low).logical_and(torch.isfinite(high)).logical_not())
            parameter.grad = _unscaled(parameter.grad, inverse)
        if not infinite:
            raise CaptureError("no parameter of the optimizer has a gradient from this loss: there is nothing to unscale")
        return torch.stack(infinite).any().float()

    def update(self, infinite: torch.Tensor) -> None:
        torch._amp_update_scale_(self.scale, self.tracker, infinite, *(getattr(self.scaler, name) for name in _SETTINGS))


def stop_if(infinite: torch.Tensor, results: Iterable[Value], draft: Draft) -> Node:
    """Record that the program ends here if something is `infinite`; by then, `results` exist and all that was recorded so far has acted."""
    stop = draft.emit_scalar(ITEM, (draft.value(infinite),))
    acting = tuple(node for node in draft.nodes if node.writes or is_random(node))
    node = Node(STOP, (stop, *dict.fromkeys(results)), (), after=acting)
    draft.nodes.append(node)
    return node


def scalers_refused() -> AbstractContextManager[None]:
    """A scaler that the user's own functions call would be left with fake tensors: its methods raise CaptureError instead."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise CaptureError(
            f"a GradScaler is used at {users_line()}: give it to lowtide (`Training(scaler=scaler)`), which scales the loss, unscales "
            "the gradients before after_backward, skips the step where they are not finite, and updates the scale"
        )

    return all_replaced((torch.amp.GradScaler, name, lambda _: refuse) for name in _METHODS)


def _unscaled(gradient: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """The product is taken in float32 where the gradient is of half precision."""
    if gradient.dtype is torch.bfloat16:
        return (gradient.float() * inverse).to(gradient.dtype)
    return gradient * inverse
