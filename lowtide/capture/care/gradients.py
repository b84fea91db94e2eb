"""Gradients on what the caller holds itself: on its parameters for as long as `after_backward` runs, on nothing else ever."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from threading import get_ident
from typing import Any

import torch
from torch._subclasses import meta_utils
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.base.messages import warn
from lowtide.capture.care.turns import placed, replaced, undoing
from lowtide.capture.sources import Sources, users_line
from lowtide.errors import CaptureError
from lowtide.ir.graph import Source


def refuse_strangers(loss: torch.Tensor, sources: Sources) -> None:
    """Raise CaptureError where a backward pass would leave a gradient on what is no parameter of the model (nor made by the program)."""
    waiting: list[tuple[Any, Source | None]] = [(loss.grad_fn, None)]
    seen = set()
    while waiting:
        node, user = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor) and not isinstance(leaf, FakeTensor):
            raise CaptureError(_text_of(leaf, "" if user is None else f", used at {user.file}:{user.line}"))
        source = sources.of_gradient(node)
        waiting.extend((each, source) for each, _ in node.next_functions)


@contextmanager
def none_left_on(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """The same for backward passes of the program's own; what they leave is taken away, whatever happens."""
    left: list[torch.Tensor] = []
    try:
        yield
    finally:
        left.extend(tensor for tensor in tensors if isinstance(tensor, torch.Tensor) and isinstance(tensor.grad, FakeTensor))
        for tensor in left:
            tensor.grad = None
    if left:
        raise CaptureError(_text_of(left[0], ""))


def refuse_gradients_of(tensors: Iterable[tuple[str, torch.Tensor, bool]]) -> None:
    """Raise CaptureError where the program would have eager PyTorch leave a gradient on what is no parameter.

    `tensors`: their names, their fakes, and whether they required gradients before.
    """
    for name in _with_gradients(tensors):
        raise CaptureError(
            f"the program has {name} require gradients (`requires_grad_()`), and eager PyTorch would leave one in its `.grad`, which a "
            "step does not: differentiate by a tensor of the program's own (`x = x.detach().requires_grad_()`, and use that)"
        )


def warn_of_gradients_of(tensors: Iterable[tuple[str, torch.Tensor, bool]]) -> None:
    """The same of a batch, which is let go after the step as a rule."""
    for name in _with_gradients(tensors):
        warn(
            f"the program has {name} require gradients (`requires_grad_()`): a step leaves neither that nor a gradient in its `.grad` on "
            "the caller's tensor. Where you do not read them behind the step, nothing is missing"
        )


def _with_gradients(tensors: Iterable[tuple[str, torch.Tensor, bool]]) -> Iterator[str]:
    return (name for name, fake, required in tensors if fake.is_leaf and (fake.requires_grad > required or fake.grad is not None))


def _text_of(leaf: torch.Tensor, where: str) -> str:
    return (
        f"a backward pass leads to a tensor of shape {tuple(leaf.shape)} that requires gradients{where}, and is not a parameter of the "
        "model: eager PyTorch would leave a gradient on it, a step does not. If the optimizer is to train it, hold it in the model "
        "(one nn.Module that has both networks). If not, as a teacher's or a critic's weights: `network.requires_grad_(False)` before "
        "lowtide.optimize keeps the gradient that goes through it, torch.no_grad() or .detach() stops that"
    )


@contextmanager
def on_the_callers_own(parameters: Mapping[torch.Tensor, torch.Tensor]) -> Iterator[None]:
    """This thread finds on real parameters the gradients of their fakes, and fakes have those that it puts there.

    A list of parameters made beforehand, or the groups of the optimizer, are so as good as the parameters of the model that is given.
    """
    plain: Any = torch.Tensor.grad
    before = {real: None if fake.grad is None else _for(real, fake.grad) for real, fake in parameters.items()}
    now, thread = {id(real): gradient for real, gradient in before.items()}, get_ident()

    def get(tensor: torch.Tensor) -> Any:
        return now[id(tensor)] if id(tensor) in now and get_ident() == thread else plain.__get__(tensor)

    def put(tensor: torch.Tensor, gradient: Any) -> None:
        if id(tensor) in now and get_ident() == thread:
            now[id(tensor)] = gradient
        else:
            plain.__set__(tensor, gradient)

    with undoing() as undo, placed(torch.Tensor, "grad", property(get, put, lambda tensor: put(tensor, None))):
        undo(now.clear)
        yield
        for real, fake in parameters.items():
            if now[id(real)] is not before[real]:
                fake.grad = now[id(real)]


@contextmanager
def no_gradients_taken() -> Iterator[None]:
    """Fakes are made without looking at gradients, which another thread may be writing."""
    with replaced(meta_utils, "safe_grad", lambda _: lambda tensor: None):
        yield


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
