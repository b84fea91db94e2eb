"""A gradient scaler's part of a training step: the loss scaled, gradients unscaled and checked, the scale updated, the step skipped.

All of it is operators of the graph, with the numbers of `torch.amp.GradScaler`. Skipping is a node that ends the program (`py.stop_if`):
all that happens in a step that is skipped, too, comes before it, and every write of the optimizer after.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from lowtide.capture.care.turns import replaced
from lowtide.capture.draft import Draft
from lowtide.capture.optimizers.scalars import Guard
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError
from lowtide.ir.graph import Kind, Node, Slot, Value
from lowtide.ir.operators.nodes import is_random
from lowtide.ir.operators.row import ITEM, STOP

_TENSORS = ("_scale", "_growth_tracker")
_SETTINGS = ("_growth_factor", "_backoff_factor", "_growth_interval")
_METHODS = ("scale", "unscale_", "step", "update")


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

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        return loss * self.scale

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


@contextmanager
def scalers_refused() -> Iterator[None]:
    """A scaler that the user's own functions call would be left with fake tensors: its methods raise CaptureError instead."""

    def refuse(*args: Any, **kwargs: Any) -> NoReturn:
        raise CaptureError(
            f"a GradScaler is used at {users_line()}: give it to lowtide (`Training(scaler=scaler)`), which scales the loss, unscales "
            "the gradients before after_backward, skips the step where they are not finite, and updates the scale"
        )

    with ExitStack() as stack:
        for name in _METHODS:
            stack.enter_context(replaced(torch.amp.GradScaler, name, lambda _: refuse))
        yield


def _unscaled(gradient: torch.Tensor, inverse: torch.Tensor) -> torch.Tensor:
    """The product is taken in float32 where the gradient is of half precision."""
    if gradient.dtype is torch.bfloat16:
        return (gradient.float() * inverse).to(gradient.dtype)
    return gradient * inverse
