"""The gradient of a layer norm from its result: of one without a weight, whose result is what its gradient is about. A batch norm.

With y = (x - mean) * rstd the gradient is rstd * (g - mean(g) - y * mean(g * y)). Elsewhere than on a CPU it is that of a norm of y, whose
mean is 0 and whose deviation is 1, times rstd.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from lowtide.base.kernels import SWITCHED_OFF, kernel
from lowtide.kernels.library import define

_NUMBERS = (torch.float32, torch.float64)  # what the kernel can compute with
_LANES = 32  # sums that are added up beside one another, so that processors do it by vectors
_AT_ONCE = 2**16  # elements, of other types on a CPU: so that they stay in the cache


def layer_norm_backward(grad: torch.Tensor, y: torch.Tensor, rstd: torch.Tensor) -> torch.Tensor:
    """Like `y`, which lies row by row, as does `grad`; `rstd` has an extent of 1 along the dimensions that were normed."""
    rows, out = rstd.numel(), torch.empty_like(y)
    given, made, into, scale = grad.view(rows, -1), y.view(rows, -1), out.view(rows, -1), rstd.view(rows, 1)
    if y.device.type == "cpu" and not SWITCHED_OFF and y.dtype in _NUMBERS and rstd.dtype == y.dtype:
        _gradients(given.numpy(), made.numpy(), scale.view(-1).numpy(), into.numpy())
        return out
    step = max(1, _AT_ONCE // max(1, made.shape[1])) if y.device.type == "cpu" else rows
    none, one = torch.zeros_like(scale[:step]), torch.ones_like(scale[:step])
    for begin in range(0, rows, step):
        chunk = slice(begin, begin + step)
        count, width = len(scale[chunk]), made.shape[1]
        found = torch.ops.aten.native_layer_norm_backward(
            given[chunk], made[chunk], [width], none[:count], one[:count], None, None, [True, False, False]
        )[0]
        torch.mul(found, scale[chunk], out=into[chunk])
    return out


@kernel(nogil=True)
def _gradients(grad: Any, y: Any, rstd: Any, out: Any) -> None:
    """[rows, width] the gradient, of each row by itself."""
    rows, width = grad.shape
    whole = width // _LANES * _LANES
    sums, products = np.empty(_LANES, grad.dtype), np.empty(_LANES, grad.dtype)
    for row in range(rows):
        given, made, into = grad[row], y[row], out[row]
        sums[:] = 0
        products[:] = 0
        for begin in range(0, whole, _LANES):
            one, other = given[begin : begin + _LANES], made[begin : begin + _LANES]
            for at in range(_LANES):
                sums[at] += one[at]
                products[at] += one[at] * other[at]
        for at in range(whole, width):
            sums[at - whole] += given[at]
            products[at - whole] += given[at] * made[at]
        mean, share, scale = sums.sum() / width, products.sum() / width, rstd[row]
        for at in range(width):
            into[at] = scale * (given[at] - mean - made[at] * share)


define("layer_norm_backward(Tensor grad, Tensor result, Tensor rstd) -> Tensor", layer_norm_backward)


def cudnn_batch_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, mean: None, variance: None, *rest: float) -> Any:
    """Once more: the very kernel, beside running statistics that nobody reads, since without any cuDNN might take another."""
    return torch.ops.aten.cudnn_batch_norm(x, weight, bias, torch.zeros_like(weight), torch.ones_like(weight), *rest)


_RUNNING = "Tensor? running_mean, Tensor? running_var, bool training, float exponential_average_factor, float epsilon"
define(f"cudnn_batch_norm(Tensor input, Tensor weight, Tensor? bias, {_RUNNING}) -> (Tensor, Tensor, Tensor, Tensor)", cudnn_batch_norm)
