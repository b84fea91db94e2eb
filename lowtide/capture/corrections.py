"""Fake kernels that are wrong, as the table of `ir.operators` says, and how each is put right.

`tests/capture/test_corrections.py` tells when one of them has gone.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch._decomp import decomposition_table
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.capture import calls
from lowtide.capture.blocks import address
from lowtide.capture.calls import tensors_in
from lowtide.capture.sizes.probes import strides_of_view
from lowtide.capture.sizes.symbols import Extent, is_symbolic, sizes_of
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError
from lowtide.ir.operators.row import Fake

_ATEN = torch.ops.aten
_QUANTISING = tuple(f"aten::{name}" for name in ("quantize_per_", "empty_quantized", "_empty_affine", "_empty_per_channel", "_make_per_"))
_REDUCED = (torch.bfloat16, torch.float16)


def kernel(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[..., Any]:
    """What gives an operator's results on fake tensors: the operator itself, or one that knows better than its fake."""
    wrong = calls.row(func).fake
    if func._schema.name.startswith(_QUANTISING):  # its fake is no quantised tensor
        raise CaptureError(
            f"operator {calls.name_of(func)} at {users_line()} makes a quantised tensor, which cannot be captured: quantise outside of the "
            "step, or round floating-point numbers as torch.fake_quantize_per_tensor_affine does"
        )
    if wrong is Fake.STRIDES_OF_VIEWS:
        return functools.partial(_viewed, func)
    sizes = (*args, *(extent for each in tensors_in(args) for extent in each.shape)) if wrong is Fake.FIXES_SIZES else ()
    if any(map(is_symbolic, sizes)):
        return _OVER_SIZES.get(func.overloadpacket) or decomposition_table[func]
    if wrong is Fake.MISSING:
        return lambda first, *_, **__: torch.empty_like(first)
    if wrong is Fake.CUDNN_RNN and len(func._schema.returns) == 4:
        return _gradients_of_layers
    return _least_squares if wrong is Fake.ASKS_DATA_FOR_SHAPES and _shapes_are_fixed(*args, **kwargs) else func


def _unfolded(given: torch.Tensor, kernel: Any, dilation: Any, padding: Any, stride: Any) -> torch.Tensor:
    places = [
        (extent + 2 * pad - apart * (size - 1) - 1) // step + 1
        for extent, size, apart, pad, step in zip(given.shape[-2:], kernel, dilation, padding, stride, strict=True)
    ]
    return given.new_empty((*given.shape[:-3], given.shape[-3] * math.prod(kernel), math.prod(places)))


def _folded(given: torch.Tensor, size: Any, kernel: Any, *settings: Any) -> torch.Tensor:
    return given.new_empty((*given.shape[:-2], given.shape[-2] // math.prod(kernel), *size))


def _spaced(first: Any, last: Any, count: Extent, *base: float, **options: Any) -> torch.Tensor:
    return torch.empty(count, **options)


_OVER_SIZES: dict[Any, Any] = {_ATEN.im2col: _unfolded, _ATEN.col2im: _folded, _ATEN.linspace: _spaced, _ATEN.logspace: _spaced}


def _layers(args: tuple[Any, ...], out: tuple[Any, ...]) -> tuple[Any, ...]:
    """Recurrent layers of cuDNN, which leave the buffer that they made of their weights."""
    output, *states, buffer = out
    flat = buffer if buffer is not None else output.new_empty(sum(each.numel() for each in args[1]), dtype=args[1][0].dtype)
    return _by_places(output, args[10], args[14]), *states, flat


def _gradients_of_layers(given: torch.Tensor, weights: Sequence[torch.Tensor], _: int, buffer: torch.Tensor, *args: Any) -> tuple[Any, ...]:
    """Those of the weights lie in one buffer, as the weights do in theirs; where they do not, matrices lie before biases."""
    hidden, cell, whole, at, gradients = *args[:2], buffer.new_empty(buffer.shape), 0, dict[int, torch.Tensor]()
    for index in sorted(range(len(weights)), key=lambda index: weights[index].dim() == 1):
        weight = weights[index]
        offset = weight.storage_offset() - buffer.storage_offset() if address(weight) == address(buffer) else at
        gradients[index] = whole.as_strided(weight.shape, weight.stride(), offset)
        at += weight.numel()
    of_cell = None if cell is None else cell.new_empty(cell.shape)
    of_weights = [gradients[index] for index in range(len(weights))] if args[17][3] else []
    return _by_places(given, args[10], args[14]), hidden.new_empty(hidden.shape), of_cell, of_weights


def _by_places(like: torch.Tensor, rows_first: bool, lengths: Sequence[int]) -> torch.Tensor:
    """What lies with the first place of all sequences first, also where rows come first."""
    rows, *places = like.shape
    return like.new_empty((places[0], rows, places[1])).transpose(0, 1) if rows_first and not lengths else like.new_empty(like.shape)


def _viewed(func: OpOverload, tensor: torch.Tensor, shape_or_dtype: Sequence[int] | torch.dtype) -> torch.Tensor:
    """A view with the real kernel's strides, which that one gives without data as well.

    The fake keeps strides along extents of 1 where the real kernel makes them anew. Kernels read those too: whether channels lie last
    depends on them. Where it has seen another view of a tensor without elements, it gives the next one a storage of its own.
    """
    symbolic = any(map(is_symbolic, (*tensor.shape, *tensor.stride())))
    if isinstance(shape_or_dtype, torch.dtype) or symbolic:
        view: torch.Tensor = func(tensor, shape_or_dtype)
        stride = _strides_of_view(func, tensor, shape_or_dtype, view)
        if sizes_of(view.stride()) == sizes_of(stride) and address(view) == address(tensor):
            return view
        return (view if isinstance(shape_or_dtype, torch.dtype) else tensor).as_strided(view.shape, stride, view.storage_offset())
    like = _without_data(func, tensor, shape_or_dtype)
    return tensor.as_strided(like.shape, like.stride(), tensor.storage_offset())


def _strides_of_view(
    func: OpOverload, tensor: torch.Tensor, shape_or_dtype: Sequence[int] | torch.dtype, view: torch.Tensor
) -> Sequence[Extent]:
    if not any(map(is_symbolic, (*tensor.shape, *tensor.stride()))):
        return _without_data(func, tensor, shape_or_dtype).stride()
    return view.stride() if isinstance(shape_or_dtype, torch.dtype) else strides_of_view(tensor.shape, tensor.stride(), view.shape)


def _without_data(func: OpOverload, tensor: torch.Tensor, shape_or_dtype: Sequence[int] | torch.dtype) -> torch.Tensor:
    with _disable_current_modes():
        like: torch.Tensor = func(torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device="meta"), shape_or_dtype)
        return like


def _shapes_are_fixed(a: torch.Tensor, b: torch.Tensor, rcond: Any = None, *, driver: str | None = None) -> bool:
    """Residuals are given where the rank is full, which two of the drivers find out; without more rows than columns there are none."""
    return driver in (None, "gels", "gelsy") or a.shape[-2] <= a.shape[-1]


def _least_squares(a: torch.Tensor, b: torch.Tensor, rcond: Any = None, *, driver: str | None = None) -> tuple[torch.Tensor, ...]:
    """Solution, residuals, rank and singular values, each in the layout of LAPACK's."""
    driver = driver or ("gelsy" if a.device.type == "cpu" else "gels")
    batch, rows, columns = a.shape[:-2], a.shape[-2], a.shape[-1]
    is_vector = b.dim() == 1 or (b.dim() == a.dim() - 1 and b.shape == a.shape[:-1])
    given = 1 if is_vector else b.shape[-1]
    solution = a.new_empty((*batch, given, max(rows, columns))).mT[..., :columns, :]
    residuals = a.new_empty((*batch, given) if driver == "gels" and rows > columns else (0,), dtype=a.real.dtype)
    rank = a.new_empty((0,) if driver == "gels" else batch, dtype=torch.int64)
    values = a.new_empty((*batch, min(rows, columns)) if driver in ("gelss", "gelsd") else (0,), dtype=a.real.dtype)
    return solution.squeeze(-1) if is_vector else solution, residuals, rank, values


def corrected(func: OpOverload, args: tuple[Any, ...], out: Any) -> Any:
    """The results of an operator on fake tensors, as the real operator gives them."""
    wrong = calls.row(func).fake
    if wrong is Fake.LOSS_OF_ONE and args[0].dim() <= 1:
        return (out[0].new_empty(()), *out[1:])
    if wrong is Fake.KEEPS_ELEMENTS and out.dim() == 0:
        return out.new_empty(math.prod(torch.broadcast_shapes(args[0].shape, args[1].shape))).as_strided((), ())
    if wrong is Fake.CUDNN_RNN and len(out) == 5:
        return _layers(args, out)
    return _batch_norm(args, out) if wrong is Fake.STATISTICS_TYPE else out


def _batch_norm(args: tuple[Any, ...], out: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
    """On the CPU, statistics of an input of half precision are float32 as soon as a weight, bias or running statistic is."""
    given, *others = args[:5]
    mixed = given.dtype in _REDUCED and any(other is not None and other.dtype == torch.float32 for other in others)
    if not mixed or given.device.type != "cpu":
        return out
    return (out[0], *(torch.empty_like(statistic, dtype=torch.float32) for statistic in out[1:]))
