"""A GPU that is not here, as a program meets it while it is captured: torch is answered as by the machine that is simulated.

Fake tensors may lie on any device that torch knows. Three ask for the device itself: torch's functions on its properties; the choice of
an attention and of cuDNN (here, and in `recurrent.py`); and autograd's engine, for streams, in whose place another one stands.

Of attentions it is what `sdp_utils.cpp` chooses between: flash attention, the memory-efficient one, and plain products. cuDNN's own is
left out, which takes the same memory as flash attention.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses import fake_tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.autograd.graph import GradientEdge

from lowtide.capture.care.turns import Replacing, all_replaced, for_this_thread, placed, undoing
from lowtide.capture.formulas.dispatch import absent_capability, as_on_absent, calling_formulas, wants_gradient
from lowtide.errors import CaptureError

_UNREACHED = (
    "One of the differentiated Tensors appears to not have been used in the graph. Set allow_unused=True if this is the desired behavior."
)


@contextmanager
def as_on(name: str, capability: tuple[int, int], memory_bytes: int, engine: Any, evaluated: Callable[[], Any]) -> Iterator[None]:
    """While this lasts, this thread finds such a device where it looks for a GPU. `engine` has the operators of `cuda/backward.cpp`, and
    `evaluated` tells the node whose gradient it computes now, or None."""
    without_device = property(for_this_thread(lambda _: True, vars(FakeTensorMode)["avoid_device_init"].fget))
    functions: list[tuple[Any, str, Replacing]] = [
        *((torch.cuda, function, partial(_always, answer)) for function, answer in _answers(name, capability, memory_bytes).items()),
        (fake_tensor, "init_gpu_context", partial(_always, None)),  # torch 2.11 does not ask the mode whether it may
        (torch.autograd, "_engine_run_backward", lambda _: partial(_backward, engine)),
        (torch._C, "_current_graph_task_id", lambda _: engine.current),
        (torch._C, "_current_autograd_node", lambda usual: lambda: evaluated() or usual()),
    ]
    with undoing() as undo:
        if engine.guard():
            undo(engine.unguard)
        kernels = {torch.ops.aten.scaled_dot_product_attention.default: attention}
        with placed(FakeTensorMode, "avoid_device_init", without_device), all_replaced(functions), as_on_absent(capability, kernels):
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
        "is_current_stream_capturing": False,
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


_ATEN = torch.ops.aten
_LOW = (torch.float16, torch.bfloat16)
_BIAS_ALIGNED = 16  # elements, of what is added to the products


def attention(
    op: OpOverload, query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
    is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
) -> Tensor:  # fmt: skip
    """What `scaled_dot_product_attention` does there."""
    options: dict[str, Any] = {"scale": scale, "enable_gqa": enable_gqa}
    capability = absent_capability(query)
    if capability is None:
        return op(query, key, value, attn_mask, dropout_p, is_causal, **options)  # type: ignore[no-any-return]
    if torch.is_autocast_enabled("cuda"):  # casts before ATen chooses, the last argument first
        attn_mask = None if attn_mask is None else _cast(attn_mask)
        value, key, query = map(_cast, (value, key, query))
    with calling_formulas(), torch.autocast("cuda", enabled=False):
        if _suits_flash(query, key, value, attn_mask, is_causal, enable_gqa, capability):
            return _by_flash(query, key, value, dropout_p, is_causal, scale)
        if _suits_efficient(query, key, value, attn_mask, capability):
            return _by_efficient(query, key, value, attn_mask, dropout_p, is_causal, scale)
        composite = torch._C.DispatchKey.CompositeImplicitAutograd
        return op._op_dk(composite, query, key, value, attn_mask, dropout_p, is_causal, **options)  # type: ignore[no-any-return]


def _cast(tensor: Tensor) -> Tensor:
    low = tensor.is_floating_point() and tensor.dtype is not torch.float64
    return tensor.to(torch.get_autocast_dtype("cuda")) if low else tensor


def _suits_flash(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, causal: bool, grouped: bool, on: tuple[int, int]) -> bool:
    width, heads = query.shape[-1], (key.shape[-3], value.shape[-3])
    return (
        torch.backends.cuda.flash_sdp_enabled()
        and on >= (8, 0)
        and _are_alike(query, key, value, _LOW)
        and mask is None
        and width == key.shape[-1] == value.shape[-1] <= 256
        and not (width > 192 and on in ((8, 6), (8, 9), (12, 0), (12, 1)) and wants_gradient(query, key, value))
        and not (causal and query.shape[-2] != key.shape[-2])
        and (heads[0] == heads[1] and query.shape[-3] % heads[0] == 0 if grouped else heads == (query.shape[-3],) * 2)
        and (width == 1 or _last_lie_dense(query, key, value))
    )


def _suits_efficient(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, on: tuple[int, int]) -> bool:
    aligned = 1 if on < (7, 0) else 8 if query.dtype in _LOW else 4 if on >= (8, 0) else 1
    return (
        torch.backends.cuda.mem_efficient_sdp_enabled()
        and _are_alike(query, key, value, (torch.float32, torch.float16, *((torch.bfloat16,) if on >= (8, 0) else ())))
        and query.shape[-1] == key.shape[-1]
        and all(width > 0 and width % aligned == 0 for width in (query.shape[-1], value.shape[-1]))
        and query.shape[-3] == key.shape[-3] == value.shape[-3]
        and _last_lie_dense(query, key, value, *(() if mask is None else (mask,)))
    )


def _are_alike(query: Tensor, key: Tensor, value: Tensor, dtypes: tuple[torch.dtype, ...]) -> bool:
    return (
        query.dim() == key.dim() == value.dim() == 4
        and query.dtype == key.dtype == value.dtype
        and query.dtype in dtypes
        and query.shape[0] == key.shape[0] == value.shape[0]
        and query.shape[-2] != 0 != key.shape[-2]
    )


def _last_lie_dense(*tensors: Tensor) -> bool:
    return all(each.stride(-1) == 1 for each in tensors)


def _by_flash(query: Tensor, key: Tensor, value: Tensor, dropout_p: float, is_causal: bool, scale: float | None) -> Tensor:
    """Of widths that are multiples of 8: others are padded, and what comes of that is cut off."""
    width = query.shape[-1]
    padded = (each if width % 8 == 0 else F.pad(each, (0, 8 - width % 8)) for each in (query, key, value))
    scale = 1 / width**0.5 if scale is None else scale
    result: Tensor = _ATEN._scaled_dot_product_flash_attention.default(*padded, dropout_p, is_causal, False, scale=scale)[0]
    return result if width % 8 == 0 else _ATEN.slice.Tensor(result, -1, 0, width)


def _by_efficient(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float | None
) -> Tensor:
    """With a mask that is added to the products, of rows that begin at multiples of 16 elements."""
    if mask is not None:
        if mask.dtype is torch.bool:
            mask = torch.where(mask, 0.0, _ATEN.scalar_tensor.default(float("-inf"), dtype=query.dtype, device=mask.device))
        if missing := -mask.shape[-1] % _BIAS_ALIGNED:
            mask = _ATEN.slice.Tensor(F.pad(mask, (0, missing)), -1, 0, mask.shape[-1])
        mask = mask.expand(*query.shape[:2], query.shape[2], key.shape[2])
    lasting = wants_gradient(query, key, value)
    result: Tensor = _ATEN._scaled_dot_product_efficient_attention.default(
        query, key, value, mask, lasting, dropout_p, is_causal, scale=scale
    )[0]
    return result
