"""The gradient of a cross entropy's scores where their logarithms of probabilities lay.

Eager PyTorch makes a gradient for these first, which is zero but for one element of each row, and from both that of the scores: two more
tensors of the largest size that a language model has. Here both are done for some rows at a time, by the same kernels, which look at each
row by itself: the bits are the same.
"""

from __future__ import annotations

import torch

from lowtide.kernels.library import define

_TURNS, _LEAST = 16, 2**16  # so many at most, as all threads wait for one another at each; elements of one
_OF_SCORES = getattr(torch.ops.aten, "_log_softmax_backward_data")  # noqa: B009  as graphs name it: it has no name without a dash
_PER_ELEMENT = 0  # as torch numbers reductions
_SCHEMA = (
    "(Tensor grad, Tensor{} log_probabilities, Tensor labels, Tensor? weight, int reduction, int ignore_index, Tensor total_weight) "
    "-> Tensor{}"
)


def cross_entropy_backward(
    grad: torch.Tensor, log_probabilities: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor | None, reduction: int,
    ignore_index: int, total_weight: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """[rows, classes] that of the scores: `aten::nll_loss_backward` of these arguments, through `aten::_log_softmax_backward_data`."""
    out = torch.empty_like(log_probabilities)
    return _fill(out, grad, log_probabilities, labels, weight, reduction, ignore_index, total_weight)


def cross_entropy_backward_(
    grad: torch.Tensor, log_probabilities: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor | None, reduction: int,
    ignore_index: int, total_weight: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
    """The same in the place of `log_probabilities`."""
    return _fill(log_probabilities, grad, log_probabilities, labels, weight, reduction, ignore_index, total_weight)


def _fill(
    out: torch.Tensor, grad: torch.Tensor, given: torch.Tensor, labels: torch.Tensor, weight: torch.Tensor | None, reduction: int,
    ignore_index: int, total_weight: torch.Tensor,
) -> torch.Tensor:  # fmt: skip
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
