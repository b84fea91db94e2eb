"""Which tensors are plain: dense numbers in memory of their own kind, with nothing of torch's between them and who reads them.

Programs run beneath autograd and kernels read addresses, so that what torch puts around tensors elsewhere would go unseen.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import or_

import torch
from torch import is_grad_enabled
from torch.autograd import forward_ad

from lowtide.errors import BatchError
from lowtide.ir.sizes import reach

_NO_MEMORY_OF_ITS_OWN = ("meta",)
_PARAMETERS = (torch.nn.Parameter,)
_TRANSFORM = "torch.vmap, torch.func.grad or the like"
_OUTSIDE = "call it outside, on a whole batch, or give torch.func the model itself"
_PLAIN_KEYS = ("CPU", "CUDA", "MPS", "XPU", "HPU", "MTIA", "PrivateUse1", "Meta", "ADInplaceOrView", "AutogradCPU", "AutogradOther")
_CASTS = ("AutocastCPU", "AutocastCUDA", "AutocastMPS", "AutocastXPU", "AutocastHPU", "AutocastMTIA", "AutocastPrivateUse1")
_OF_AUTOGRAD = ("ADInplaceOrView", "AutogradFunctionality")  # which tensors made in inference mode are without
_BY_KEY = (
    (("FuncTorchBatched", "FuncTorchGradWrapper"), f"a tensor within {_TRANSFORM}", _OUTSIDE),
    (("Functionalize",), "a tensor within torch.func.functionalize", _OUTSIDE),
    (("ZeroTensor",), "zeros without memory, as autograd makes them", "pass a clone"),
    (("Quantized",), "a quantized tensor", "pass it with .dequantize()"),
)


def _bits(names: Iterable[str]) -> int:
    """Dispatch keys as bits; none for what this torch does not have."""
    keys = torch._C.DispatchKey
    keysets = [getattr(keys, name) for name in names if hasattr(keys, name)]
    return reduce(or_, (torch._C.DispatchKeySet(key).raw_repr() for key in keysets), 0)


_PLAIN, BESIDE_AUTOGRAD = _bits((*_PLAIN_KEYS, *_CASTS)), ~_bits(_OF_AUTOGRAD)


# asked at each call, the smallest included: looking their names up takes as long as they do
_transforms, _tracing = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
_modes = torch._C._len_torch_dispatch_stack


def dispatched(tensor: torch.Tensor) -> int:
    """A number that tells layout, device type, laziness and whatever torch puts around a tensor; not whether autograd looks."""
    return int(torch._C._dispatch_keys(tensor).raw_repr()) & BESIDE_AUTOGRAD


def unlike_plain(tensor: torch.Tensor) -> tuple[str, str] | None:
    """What a tensor is instead of a plain one, and what to do about it; None for a plain one."""
    keys = torch._C._dispatch_keys(tensor)
    for names, kind, remedy in _BY_KEY:
        if any(keys.has(getattr(torch._C.DispatchKey, name)) for name in names):
            return kind, remedy
    if tensor.is_nested or tensor.layout is not torch.strided:
        return (
            "a nested tensor" if tensor.is_nested else f"a tensor of layout {tensor.layout}"
        ), "pass it dense or padded, with a mask beside it"
    if tensor.is_conj() or tensor.is_neg():
        return "a lazy conjugate or negative view", "pass it with resolve_conj() and resolve_neg()"
    if type(tensor) is not torch.Tensor and type(tensor) not in _PARAMETERS:
        return f"a {type(tensor).__name__}", _remedy(tensor)
    if dispatched(tensor) & ~_PLAIN:
        return f"a tensor of {keys}", "pass a plain one"
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        return "a dual tensor of forward differentiation", "pass its primal, or call the model itself"
    return _without_memory(tensor)


def is_differentiated(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether somebody may wait for a derivative by one of them: eager PyTorch would make it."""
    if forward_ad._current_level >= 0:
        return True
    if is_grad_enabled():
        for tensor in tensors:  # asked at each call: `any` takes three times as long
            if tensor.requires_grad:
                return True
    return False


def refuse_surroundings() -> None:
    """Raise BatchError where torch puts something around every tensor that is made here."""
    if _transforms() is not None:
        raise BatchError(f"called within {_TRANSFORM}, which puts wrappers around what a program makes: {_OUTSIDE}")
    if _tracing() is not None:
        raise BatchError("called within torch.jit.trace, which would keep what a program makes as constants: trace the model itself")
    modes = torch._C._TorchDispatchModeKey
    if _modes() and any(map(torch._C._get_dispatch_mode, (modes.FAKE, modes.PROXY, modes.FUNCTIONAL))):
        raise BatchError("called within a FakeTensorMode or a tracer such as make_fx, where tensors have no numbers: call it outside")


def _remedy(tensor: torch.Tensor) -> str:
    """What to do about a tensor of a class of its own, whose methods and torch functions a program does not have."""
    if hasattr(tensor, "full_tensor"):
        return "pass it with .to_local() or .full_tensor()"
    if torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python):
        return "pass the plain tensor that it stands for"
    return "pass it with .as_subclass(torch.Tensor)"


def _without_memory(tensor: torch.Tensor) -> tuple[str, str] | None:
    if tensor.device.type in _NO_MEMORY_OF_ITS_OWN or not tensor.numel():
        return None
    if (tensor.storage_offset() + reach(tensor.shape, tensor.stride())) * tensor.element_size() > tensor.untyped_storage().nbytes():
        return "a tensor whose memory was let go", "pass one that has its numbers"
    return None
