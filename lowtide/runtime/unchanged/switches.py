"""torch's global switches that choose what a program does."""

from __future__ import annotations

from typing import Any

import torch
from torch.backends import mha
from torch.nn.modules.module import (
    _global_backward_hooks,
    _global_backward_pre_hooks,
    _global_forward_hooks,
    _global_forward_hooks_always_called,
    _global_forward_hooks_with_kwargs,
    _global_forward_pre_hooks,
)

_KERNELS = (  # which choose how something is computed
    torch._C._get_deterministic_algorithms,
    torch._C._get_deterministic_algorithms_warn_only,
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
    return (meaning(), mha._is_fastpath_enabled, *[ask() for ask in _KERNELS])


def meaning() -> tuple[Any, ...]:
    """The positions of those that choose what is computed, not by which kernels alone."""
    found = torch.get_default_dtype(), torch._C._len_torch_function_stack()
    return (*found, *map(_cast, _AUTOCAST_DEVICES)) if torch._C._is_any_autocast_enabled() else found


def _cast(device: str) -> torch.dtype | None:
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else None


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
