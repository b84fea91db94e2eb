"""What fake kernels say otherwise than the real ones do: the one place for such facts.

`tests/capture/test_corrections.py` tells when one of them has gone.
"""

from __future__ import annotations

from typing import Any

import torch
from torch._ops import OpOverload

_REDUCED = (torch.bfloat16, torch.float16)


def corrected(func: OpOverload, args: tuple[Any, ...], out: Any) -> Any:
    """The results of an operator on fake tensors, as the real operator gives them."""
    if func is torch.ops.aten.native_batch_norm.default:
        return _batch_norm(args, out)
    return out


def _batch_norm(args: tuple[Any, ...], out: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """On the CPU, statistics of an input of half precision are float32 as soon as a weight, bias or running statistic is."""
    given, *others = args[:5]
    mixed = given.dtype in _REDUCED and any(other is not None and other.dtype == torch.float32 for other in others)
    if not mixed or given.device.type != "cpu":
        return out
    return (out[0], *(torch.empty_like(statistic, dtype=torch.float32) for statistic in out[1:]))
