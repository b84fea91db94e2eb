"""torch's global switches that choose what a program does."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_hooks_always_called,
    _global_forward_hooks_with_kwargs,
    _global_forward_pre_hooks,
)

_ASKED = (
    torch.get_default_dtype,
    torch.are_deterministic_algorithms_enabled,
    torch.is_deterministic_algorithms_warn_only_enabled,
    torch.backends.mha.get_fastpath_enabled,
    torch._C._get_mkldnn_enabled,
    torch._C._get_nnpack_enabled,
    torch._C._get_cudnn_enabled,
    torch._C._get_flash_sdp_enabled,
    torch._C._get_mem_efficient_sdp_enabled,
    torch._C._get_math_sdp_enabled,
    torch._C._get_cudnn_sdp_enabled,
    torch._C._get_math_sdp_allow_fp16_bf16_reduction,
)
_AUTOCAST_DEVICES = ("cpu", "cuda")


def switches() -> tuple[Any, ...]:
    """Their positions now; some microseconds."""
    cast = [(torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in _AUTOCAST_DEVICES]
    return (*[ask() for ask in _ASKED], *cast, torch._C._len_torch_function_stack())


def global_hooks() -> dict[str, Any]:
    """The tables of hooks that run around every module, by name."""
    return {
        "before forward": _global_forward_pre_hooks,
        "after forward": _global_forward_hooks,
        "after forward, always": _global_forward_hooks_always_called,
        "after forward, with keywords": _global_forward_hooks_with_kwargs,
        "before backward": _global_backward_pre_hooks,
        "after backward": _global_backward_hooks,
    }
