"""Composite operators of which eager takes another path than ATen does under a dispatch mode."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload

import lowtide.kernels  # noqa: F401  (defines lowtide::masked_sum)
from lowtide.capture.formulas.autocast import before_autocast
from lowtide.capture.formulas.dispatch import calling_formulas, formula, wants_gradient

_ATEN, _MEAN = torch.ops.aten, 1


_VALUES_ALONE: dict[OpOverload, Callable[..., Tensor]] = {
    _ATEN.linalg_svdvals.default: lambda matrix, driver=None: _ATEN._linalg_svd.default(matrix, False, False, driver=driver)[1],
    _ATEN.linalg_eigvalsh.default: lambda matrix, triangle="L": _ATEN._linalg_eigh.default(matrix, triangle, False)[0],
    _ATEN.linalg_eigvals.default: _ATEN._linalg_eigvals.default,
}


@formula(*_VALUES_ALONE)
def _values_alone(op: OpOverload, matrix: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Singular values and eigenvalues: eager computes the vectors only where a gradient needs them."""
    if wants_gradient(matrix):
        return op(matrix, *args, **kwargs)  # type: ignore[no-any-return]
    return _VALUES_ALONE[op](*before_autocast(op, matrix), *args, **kwargs)


_RANKS = {
    _ATEN.linalg_matrix_rank.out: _ATEN.linalg_matrix_rank.default,
    _ATEN.linalg_matrix_rank.out_tol_tensor: _ATEN.linalg_matrix_rank.tol_tensor,
    _ATEN.linalg_matrix_rank.atol_rtol_tensor_out: _ATEN.linalg_matrix_rank.atol_rtol_tensor,
    _ATEN.linalg_matrix_rank.atol_rtol_float_out: _ATEN.linalg_matrix_rank.atol_rtol_float,
}


@formula(*_RANKS)
def _rank_into(op: OpOverload, *args: Any, out: Tensor, **kwargs: Any) -> Tensor:
    """Under a dispatch mode ATen counts into a tensor of its own, and leaves `out` as it was."""
    with calling_formulas():
        rank = _RANKS[op](*args, **kwargs)
    return torch.sum(rank.unsqueeze(-1), -1, dtype=out.dtype, out=out)


@formula(_ATEN.cross_entropy_loss.default)
def _cross_entropy(
    op: OpOverload,
    logits: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    """With weights and label smoothing the mean divides by the weights of the targets that count, which eager selects."""
    classes = target.is_floating_point() and target.shape == logits.shape
    if weight is None or weight.requires_grad or not label_smoothing or reduction != _MEAN or classes:
        return op(logits, target, weight, reduction, ignore_index, label_smoothing)  # type: ignore[no-any-return]
    device = logits.device.type
    autocast = torch.is_autocast_enabled(device)
    logits, _, weight = before_autocast(op, logits, target, weight)
    listed = torch._C._dispatch_has_kernel_for_dispatch_key(op.name(), f"Autocast{device.upper()}")
    with torch.autocast(device, enabled=autocast and not listed):
        return _smoothed(logits, target, weight, ignore_index, label_smoothing)


def _smoothed(logits: Tensor, target: Tensor, weight: Any, ignore_index: int, label_smoothing: float) -> Tensor:
    """ATen's `cross_entropy_loss_label_smoothing` for the mean over weighted classes, in its order."""
    dim = 0 if logits.dim() == 1 else 1
    log_probabilities = torch.log_softmax(logits, dim, logits.dtype)
    loss = _ATEN.nll_loss_nd.default(log_probabilities, target, weight, _MEAN, ignore_index)
    shape = [-1 if at == dim else 1 for at in range(logits.dim())]
    smooth = -(log_probabilities * weight.view(shape)).sum(dim)
    ignored = target == ignore_index
    smooth.masked_fill_(ignored, 0.0)
    total = torch.ops.lowtide.masked_sum(weight.gather(0, target.masked_fill(ignored, 0).flatten()), ~ignored.flatten())
    mean: Tensor = smooth.sum() / total
    result: Tensor = (1 - label_smoothing) * loss + mean * (label_smoothing / logits.shape[dim])
    return result
