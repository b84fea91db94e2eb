"""The gradient of a layer norm from its result: of one without a weight, whose result is what its gradient is about.

With y = (x - mean) * rstd the gradient is rstd * (g - mean(g) - y * mean(g * y)): that of a norm of y, whose mean is 0 and whose deviation
is 1, times rstd. Rows are taken few at a time, so that they stay in the cache.
"""

from __future__ import annotations

import torch

from lowtide.kernels.library import define

_AT_ONCE = 2**16  # elements, on a CPU


def layer_norm_backward(grad: torch.Tensor, y: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """Like `y`, which lies row by row, as does `grad`; `rstd` has an extent of 1 along the dimensions that were normed."""
    rows, out = rstd.numel(), torch.empty_like(y)
    given, made, into, scale = grad.view(rows, -1), y.view(rows, -1), out.view(rows, -1), rstd.view(rows, 1)
    step = max(1, _AT_ONCE // max(1, made.shape[1])) if y.device.type == "cpu" else rows
    none, one = torch.zeros_like(scale[:step]), torch.ones_like(scale[:step])
    for begin in range(0, rows, step):
        part = slice(begin, begin + step)
        count, width = len(scale[part]), made.shape[1]
        found = torch.ops.aten.native_layer_norm_backward(
            given[part], made[part], [width], none[:count], one[:count], None, None, [True, False, False]
        )[0]
        torch.mul(found, scale[part], out=into[part])
    return out


define("layer_norm_backward(Tensor grad, Tensor result, Tensor rstd) -> Tensor", layer_norm_backward)
