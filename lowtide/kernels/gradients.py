"""Gradients that eager PyTorch makes of more than they need: a layer norm's, and that of a cross entropy's scores.

A layer norm without a weight: its gradient follows from its result, and its input need not be kept. With y = (x - mean) * rstd the
gradient is rstd * (g - mean(g) - y * mean(g * y)). Elsewhere than on a CPU it is that of a norm of y, whose mean is 0 and whose deviation
is 1, times rstd.

A cross entropy: the gradient of its scores goes where their logarithms of probabilities lay. Eager PyTorch makes a gradient for these
first, which is zero but for one element of each row, and from both that of the scores: two more tensors of the largest size that a
language model has. Here both are done for some rows at a time, by the same kernels, which look at each row by itself: the bits are the
same.
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
    given, normed, into, scale = grad.view(rows, -1), y.view(rows, -1), out.view(rows, -1), rstd.view(rows, 1)
    if y.device.type == "cpu" and not SWITCHED_OFF and y.dtype in _NUMBERS and rstd.dtype == y.dtype:
        _gradients(given.numpy(), normed.numpy(), scale.view(-1).numpy(), into.numpy())
        return out
    step = max(1, _AT_ONCE // max(1, normed.shape[1])) if y.device.type == "cpu" else rows
    none, one = torch.zeros_like(scale[:step]), torch.ones_like(scale[:step])
    for begin in range(0, rows, step):
        chunk = slice(begin, begin + step)
        count, width = len(scale[chunk]), normed.shape[1]
        gradients = torch.ops.aten.native_layer_norm_backward(
            given[chunk], normed[chunk], [width], none[:count], one[:count], None, None, [True, False, False]
        )[0]
        torch.mul(gradients, scale[chunk], out=into[chunk])
    return out


@kernel(nogil=True)
def _gradients(grad: Any, y: Any, rstd: Any, out: Any) -> None:
    """[rows, width] the gradient, of each row by itself."""
    rows, width = grad.shape
    whole = width // _LANES * _LANES
    sums, products = np.empty(_LANES, grad.dtype), np.empty(_LANES, grad.dtype)
    for row in range(rows):
        given, normed, into = grad[row], y[row], out[row]
        sums[:] = 0
        products[:] = 0
        for begin in range(0, whole, _LANES):
            one, other = given[begin : begin + _LANES], normed[begin : begin + _LANES]
            for at in range(_LANES):
                sums[at] += one[at]
                products[at] += one[at] * other[at]
        for at in range(whole, width):
            sums[at - whole] += given[at]
            products[at - whole] += given[at] * normed[at]
        mean, share, scale = sums.sum() / width, products.sum() / width, rstd[row]
        for at in range(width):
            into[at] = scale * (given[at] - mean - normed[at] * share)


define("layer_norm_backward(Tensor grad, Tensor result, Tensor rstd) -> Tensor", layer_norm_backward)


_TURNS, _LEAST = 16, 2**16  # so many at most, as all threads wait for one another at each; elements of one
_OF_SCORES = getattr(torch.ops.aten, "_log_softmax_backward_data")  # noqa: B009  as graphs name it: it has no name without a dash
_PER_ELEMENT = 0  # as torch numbers reductions
_SCHEMA = (
    "(Tensor grad, Tensor{} log_probabilities, Tensor labels, Tensor? weight, int reduction, int ignore_index, Tensor total_weight) "
    "-> Tensor{}"
)


def cross_entropy_backward(grad: torch.Tensor, log_probabilities: torch.Tensor, *others: Any) -> torch.Tensor:
    """[rows, classes] that of the scores: `aten::nll_loss_backward` of these arguments, through `aten::_log_softmax_backward_data`."""
    return _fill(torch.empty_like(log_probabilities), grad, log_probabilities, *others)


def cross_entropy_backward_(grad: torch.Tensor, log_probabilities: torch.Tensor, *others: Any) -> torch.Tensor:
    """The same in the place of `log_probabilities`."""
    return _fill(log_probabilities, grad, log_probabilities, *others)


def _fill(
    out: torch.Tensor,
    grad: torch.Tensor,
    given: torch.Tensor,
    labels: torch.Tensor,
    weight: torch.Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: torch.Tensor,
) -> torch.Tensor:
    rows, classes = given.shape
    on_cpu = given.device.type == "cpu"
    step = max(1, -(-rows // _TURNS), _LEAST // max(1, classes))
    first = given.new_empty((min(step, rows), classes))
    for begin in range(0, rows, step):
        chunk = slice(begin, min(begin + step, rows))
        some, share = given[chunk], grad[chunk] if reduction == _PER_ELEMENT else grad
        of_logarithms, like = first[: chunk.stop - begin], given.new_empty(()).expand(some.shape)  # only its shape is asked for
        torch.ops.aten.nll_loss_backward.grad_input(
            share, like, labels[chunk], weight, reduction, ignore_index, total_weight, grad_input=of_logarithms
        )
        if on_cpu or out is not given:
            _OF_SCORES.out(of_logarithms, some, 1, given.dtype, out=out[chunk])
        else:  # other kernels may read what they have written
            out[chunk] = _OF_SCORES.default(of_logarithms, some, 1, given.dtype)
    return out


define(f"cross_entropy_backward{_SCHEMA.format('', '')}", cross_entropy_backward)
define(f"cross_entropy_backward_{_SCHEMA.format('(a!)', '(a!)')}", cross_entropy_backward_)
