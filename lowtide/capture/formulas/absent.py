"""A GPU that is not here, as a program meets it while it is captured: torch is answered as by the machine that is simulated.

Fake tensors may lie on any device that torch knows. Three ask for the device itself: torch's functions on its properties; the choice of
an attention and of cuDNN (`attention.py`, `recurrent.py`); and autograd's engine, for streams, in whose place another one stands.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import GradientEdge

from lowtide.capture.care.turns import for_this_thread, placed, replaced, undoing
from lowtide.capture.formulas.attention import attention
from lowtide.capture.formulas.dispatch import as_on_absent
from lowtide.errors import CaptureError

_UNREACHED = (
    "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this is the desired behavior."
)


@contextmanager
def as_on(name: str, capability: tuple[int, int], memory_bytes: int, engine: Any, evaluated: Callable[[], Any]) -> Iterator[None]:
    """While this lasts, this thread finds such a device where it looks for a GPU. `engine` has the operators of `cuda/backward.cpp`, and
    `evaluated` tells the node whose gradient it computes now, or None."""
    without_device = property(for_this_thread(lambda _: True, vars(FakeTensorMode)["avoid_device_init"].fget))
    with undoing() as undo, ExitStack() as stack:
        if engine.guard():
            undo(engine.unguard)
        stack.enter_context(placed(FakeTensorMode, "avoid_device_init", without_device))
        for question, answer in _answers(name, capability, memory_bytes).items():
            stack.enter_context(replaced(torch.cuda, question, partial(_always, answer)))
        stack.enter_context(replaced(torch.autograd, "_engine_run_backward", lambda _: partial(_backward, engine)))
        stack.enter_context(replaced(torch._C, "_current_graph_task_id", lambda _: engine.current))
        stack.enter_context(replaced(torch._C, "_current_autograd_node", lambda usual: lambda: evaluated() or usual()))
        stack.enter_context(as_on_absent(capability, {torch.ops.aten.scaled_dot_product_attention.default: attention}))
        yield


def _always(answer: Any, _: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args, **kwargs: answer


def _answers(name: str, capability: tuple[int, int], memory_bytes: int) -> dict[str, Any]:
    """What torch.cuda's functions return, whatever they are asked about the device."""
    major, minor = capability
    return {
        "is_available": True,
        "device_count": 1,
        "current_device": 0,
        "is_bf16_supported": major >= 8,
        "get_device_name": name,
        "get_device_capability": capability,
        "synchronize": None,
        "get_device_properties": SimpleNamespace(name=name, major=major, minor=minor, total_memory=memory_bytes),
    }


def _backward(
    engine: Any, roots: Sequence[Any], grads: Sequence[torch.Tensor | None], keeps_graph: bool, creates_graph: bool,
    inputs: Sequence[Any] = (), allow_unreachable: bool = True, accumulate_grad: bool = False,
) -> tuple[torch.Tensor | None, ...]:  # fmt: skip
    """In the place of torch's function, which gives this to its engine."""
    if any(isinstance(each, GradientEdge) for each in (*roots, *inputs)):
        raise CaptureError(
            "gradients of edges (torch.autograd.graph.get_gradient_edge) are followed only where there is a GPU: give tensors"
        )
    grads_found = engine.backward(list(roots), list(grads), keeps_graph, creates_graph, list(inputs), accumulate_grad)
    if not allow_unreachable and any(each is None for each in grads_found):
        raise RuntimeError(_UNREACHED)
    return tuple(grads_found)
