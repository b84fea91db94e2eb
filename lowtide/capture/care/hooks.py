"""What hangs on the caller's own tensors, parameters and modules: hooks and gradients.

Hooks are code of the program like any other: what they do to tensors is part of the graph, what they do beside it is followed. Torch's own
around all modules do not run.

No gradient ever lies on the caller's tensors: what a program does to parameters, it does to their fakes (`fakes.py`).
"""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import nn
from torch._subclasses import meta_utils
from torch._subclasses.fake_tensor import FakeTensor
from torch.nn.modules import module as torch_module

from lowtide.base.messages import warn
from lowtide.capture.care.turns import all_replaced, replaced
from lowtide.capture.fakes import FakeModel
from lowtide.capture.sources import Sources, is_torchs, users_line
from lowtide.errors import CaptureError
from lowtide.ir.graph import Source

Hook = Callable[..., Any]
_NAMES = ("_forward_pre_hooks", "_forward_hooks", "_backward_pre_hooks", "_backward_hooks")
_LATE = "register_post_accumulate_grad_hook"
_CALLS = ("_call_impl", "_get_backward_hooks", "_get_backward_pre_hooks")


@contextmanager
def hooks_on_fakes(fakes: FakeModel) -> Iterator[None]:
    """Hooks of parameters run for their fakes. Those that the program leaves on a parameter are refused."""
    for real, fake in fakes.parameters.items():
        for hook in (real._backward_hooks or {}).values() if fake.requires_grad else ():
            fake.register_hook(hook)
    before = {fake: len(fake._backward_hooks or ()) for fake in fakes.parameters.values()}
    calls = [(nn.Module, name, _without_torchs_hooks) for name in _CALLS] if any(map(_around_all, _NAMES)) else []
    with all_replaced((*calls, (torch.Tensor, _LATE, lambda _: _refuse_late))):
        yield
    for real, fake in fakes.parameters.items():
        if len(fake._backward_hooks or ()) > before[fake]:
            raise CaptureError(
                f"the program registers a hook on the gradient of {fakes.names[real]} and leaves it there: eager PyTorch would have one "
                "more at each step; register it once, before lowtide.optimize, or remove() it in after_backward"
            )


def _around_all(name: str) -> dict[int, Hook]:
    """The table of hooks that run around every module, of all threads."""
    table: dict[int, Hook] = vars(torch_module)[f"_global{name}"]
    return table


def _without_torchs_hooks(call: Callable[..., Any]) -> Callable[..., Any]:
    """A function of torch's that calls a module or finds its hooks, with tables of its own among the names of its file.

    They hold the hooks that there are at the time, and none of torch's own, as those of `torch.utils.module_tracker` hold on to graphs of
    autograd. What is no function of that file is left: somebody has put another one there.
    """
    torchs, names = inspect.unwrap(call), dict(vars(torch_module))
    if getattr(torchs, "__globals__", None) is not vars(torch_module):
        return call
    own = types.FunctionType(torchs.__code__, names, torchs.__name__, torchs.__defaults__, torchs.__closure__)

    def calling(*args: Any, **kwargs: Any) -> Any:
        for name in _NAMES:
            names[f"_global{name}"] = {key: hook for key, hook in _around_all(name).items() if not is_torchs(hook)}
        return own(*args, **kwargs)

    return calling


def _refuse_late(tensor: torch.Tensor, hook: Hook) -> Any:
    raise CaptureError(
        f"the program registers a hook that runs after a gradient is accumulated, at {users_line()}, which a captured step would "
        "not run: use after_backward"
    )


def hooks_beside(models: Iterable[nn.Module]) -> list[Hook]:
    """What is called with the gradients of their parameters, and around all modules."""
    of_gradients = [hook for model in models for each in model.parameters() for hook in (each._backward_hooks or {}).values()]
    return [*of_gradients, *(hook for name in _NAMES for hook in _around_all(name).values() if not is_torchs(hook))]


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
    """Raise CaptureError where eager PyTorch would leave a gradient on what is no parameter, for the program to read in the next step.

    `tensors`: their names, their fakes, and whether they required gradients before.
    """
    for name in _with_gradients(tensors):
        raise CaptureError(
            f"the program has {name} require gradients (`requires_grad_()`), and eager PyTorch would leave one in its `.grad`, which a "
            "step does not: differentiate by a tensor of the program's own (`x = x.detach().requires_grad_()`, and use that)"
        )


def warn_of_gradients_of(tensors: Iterable[tuple[str, torch.Tensor, bool]]) -> None:
    """The same of a batch, which is let go after the step as a rule, and of a buffer of which the program reads neither."""
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
        "(one nn.Module that has both networks). If the loss alone differentiates by it (torch.autograd.grad), let the loss do so by "
        "`x = x.detach().requires_grad_()`. If not, as a teacher's or a critic's weights: `network.requires_grad_(False)` before "
        "lowtide.optimize keeps the gradient that goes through it, torch.no_grad() or .detach() stops that"
    )


def no_gradients_taken() -> AbstractContextManager[None]:
    """Fakes are made without looking at gradients, which another thread may be writing."""
    return replaced(meta_utils, "safe_grad", lambda _: lambda tensor: None)
