"""Composite operators of which eager takes another path than ATen does under a dispatch mode: products, resizing, views of zeros.

Products of many matrices: ATen decides in C++ as which product of matrices it computes them.

It spreads one matrix over the many where that one has no gradient, and folds the many into one where it has; under a dispatch mode it
folds always. And up to torch 2.11 it decides of numbers alone, so that symbolic sizes get torch's own account of the decision in Python.
That ends a product of many by many in another kind of view than ATen does: such a product stands here, but under autocast, which
casts before ATen decides.

Resizing pictures whose sizes are symbolic: ATen computes the size of the result in C++, of numbers alone.

Eager's own operator is called with the size that ATen would have computed.

Views of zeros without memory, as forward derivatives have them: ATen makes some of them beneath dispatch modes.

What it makes then is no fake, and lies on the meta device. Without the key that tells such zeros, a view is one as any other.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._ops import OpOverload

import lowtide.kernels.operators  # noqa: F401  (defines lowtide::masked_sum)
from lowtide.capture.formulas.dispatch import before_autocast, calling_formulas, formula, wants_gradient
from lowtide.capture.sizes.symbols import multiplied
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError

_ATEN = torch.ops.aten


@formula(_ATEN.matmul.default)
def _matmul(op: OpOverload, one: Tensor, other: Tensor) -> Tensor:
    if one.dim() == other.dim() == 3 and (single := _single(one, other)) is not None and not _has_gradient(single):
        return _spread(one, other, single)
    if max(one.dim(), other.dim()) < 3 or not any(isinstance(extent, torch.SymInt) for extent in (*one.shape, *other.shape)):
        return op(one, other)  # type: ignore[no-any-return]
    if one.shape[:-2] == other.shape[:-2] and one.dim() > 2 and not torch.is_autocast_enabled(one.device.type):
        return _many_by_many(one, other)
    with enable_python_dispatcher():
        return op(one, other)  # type: ignore[no-any-return]


def _single(one: Tensor, other: Tensor) -> Tensor | None:
    """Of the two the one that stands alone before many."""
    singles = [each for each in (one, other) if isinstance(each.shape[0], int) and each.shape[0] == 1]
    return singles[0] if len(singles) == 1 else None


def _has_gradient(single: Tensor) -> bool:
    """Whether ATen finds that it requires one, which looks at what autocast made of it."""
    return single.requires_grad and (torch.is_grad_enabled() or _cast(single) is None)


def _cast(single: Tensor) -> torch.dtype | None:
    """What autocast makes of it; None where it leaves it."""
    kind, listed = single.device.type, single.is_floating_point() and single.dtype is not torch.float64
    cast = torch.get_autocast_dtype(kind) if listed and torch.is_autocast_enabled(kind) else single.dtype
    return None if cast is single.dtype else cast


def _spread(one: Tensor, other: Tensor, single: Tensor) -> Tensor:
    """The one matrix as many views of it. Autocast casts before ATen spreads; what has a gradient it casts in `bmm`, as ever."""
    count = (other if single is one else one).shape[0]
    if (cast := _cast(single)) is not None:
        one, other = (each.to(cast) if each is single else each for each in (one, other))
    left, right = (each.expand(count, *each.shape[1:]).reshape(count, *each.shape[1:]) for each in (one, other))
    result: Tensor = _ATEN._unsafe_view.default(left.bmm(right), (count, one.shape[1], other.shape[2]))
    return result


def _many_by_many(one: Tensor, other: Tensor) -> Tensor:
    batch = one.shape[:-2]
    left, right = (each.expand(each.shape).reshape(math.prod(batch), *each.shape[-2:]) for each in (one, other))
    result: Tensor = _ATEN._unsafe_view.default(left.bmm(right), (*batch, one.shape[-2], other.shape[-1]))
    return result


_RESIZING = [
    getattr(_ATEN, name).vec
    for name in (
        *(f"{stem}{dims}d" for stem in ("upsample_nearest", "_upsample_nearest_exact") for dims in (1, 2, 3)),
        "upsample_linear1d", "upsample_bilinear2d", "_upsample_bilinear2d_aa", "upsample_bicubic2d", "_upsample_bicubic2d_aa",
        "upsample_trilinear3d",
    )
]  # fmt: skip


@formula(*_RESIZING)
def _resized(op: OpOverload, given: Tensor, size: Sequence[Any] | None, *further: Any) -> Tensor:
    """`further` are settings, and factors."""
    if not any(isinstance(extent, torch.SymInt) for extent in (*given.shape, *(size or ()))):
        return op(given, size, *further)  # type: ignore[no-any-return]
    *settings, factors = further
    pairs = zip(given.shape[2:], factors or (), strict=True)
    result = size if size is not None else [multiplied(extent, float(factor)) for extent, factor in pairs]
    scales: Sequence[float | None] = factors or [None] * len(result)
    return op._overloadpacket.default(given, result, *settings, *scales)  # type: ignore[no-any-return]


_ZEROS = torch._C.DispatchKeySet(torch._C.DispatchKey.ZeroTensor)


@formula(torch.ops.aten.view.default, torch.ops.aten.as_strided.default)
def _view(op: OpOverload, given: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    with torch._C._ExcludeDispatchKeyGuard(_ZEROS):
        return op(given, *args, **kwargs)  # type: ignore[no-any-return]


_MEAN = 1
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


@formula(_ATEN.mvlgamma.out, _ATEN.special_multigammaln.out)
def _mvlgamma_into(op: OpOverload, values: Tensor, p: int, *, out: Tensor) -> Tensor:
    """Its kernel calls the form that returns, whose own sum autocast casts."""
    with calling_formulas():
        return _ATEN.clone.out(_ATEN.mvlgamma.default(values, p), out=out)  # type: ignore[no-any-return]


@formula(*(getattr(_ATEN, name).default for name in ("linalg_polar",) if hasattr(_ATEN, name)))
def _polar(op: OpOverload, matrix: Tensor) -> Any:
    """The products in its kernel are those that autocast casts, and no capture sees them."""
    if torch.is_autocast_enabled(matrix.device.type):
        raise CaptureError(f"{op} at {users_line()} multiplies in half precision under autocast: call it with autocast disabled")
    return op(matrix)


@formula(_ATEN.cross_entropy_loss.default)
def _cross_entropy(
    op: OpOverload, logits: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = _MEAN, ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:  # fmt: skip
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
