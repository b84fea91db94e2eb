"""Layers as operators of lowtide's own: gradients of norms and cross entropies, places of max-pooling, statistics of norms, cuDNN's RNNs.

A layer norm without a weight: its gradient follows from its result, and its input need not be kept. With y = (x - mean) * rstd the
gradient is rstd * (g - mean(g) - y * mean(g * y)). Elsewhere than on a CPU it is that of a norm of y, whose mean is 0 and whose deviation
is 1, times rstd.

A cross entropy: the gradient of its scores goes where their logarithms of probabilities lay. Eager PyTorch makes a gradient for these
first, which is zero but for one element of each row, and from both that of the scores: two more tensors of the largest size that a
language model has. Here both are done for some rows at a time, by the same kernels, which look at each row by itself: the bits are the
same.

Max-pooling: its indices are kept as the place in the window, a byte or two where torch holds eight. An index is that of the greatest
element in its plane. The place is how far that is from where the window begins within the plane, which is less than a window's rows times
the plane's width. The gradient is added up by a kernel that finds elements from that; of types that it cannot compute with, and elsewhere
than on a CPU, by torch's own, from indices that are found again for a few planes at a time.

Norms that update running statistics on the side are functions here: such a one returns its results, then copies of the statistics that
were updated.

Recurrent layers of cuDNN with dropout leave their random state with ATen. It makes that state, one for a device, of a number of the default
generator's when the first such layer runs, and anew after the generator was seeded or its state was put back. It hands it to `_cudnn_rnn`,
which moves it on, and keeps other streams from it meanwhile. So these operators take what ATen's take, a state left out, and have ATen run
them where it would: within a layer that one of their numbers makes.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from lowtide.base.kernels import SWITCHED_OFF, kernel
from lowtide.kernels.draws import OF_ATEN, STATES
from lowtide.kernels.library import LIBRARY, define

_NUMBERS = (torch.float32, torch.float64)  # what kernels can compute with
_LANES = 32  # sums that are added up beside one another, so that processors do it by vectors
_AT_ONCE = 2**16  # elements, of other types on a CPU: so that they stay in the cache
_INDICES_AT_ONCE = 2**16  # elements of indices, on a CPU
_INDICES_ELSEWHERE = 2**24


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


def pool_places(indices: torch.Tensor, extents: list[int], stride: list[int], padding: list[int], dtype: torch.dtype) -> torch.Tensor:
    """What `indices` [..., spatial] of planes of these extents are behind the beginnings of their windows."""
    places = torch.empty_like(indices, dtype=dtype)
    begins = _begins(indices.shape[-len(extents) :], extents, stride, padding, indices.device)
    for chunk in _chunks(indices, len(extents)):
        given, chunk_places = _planes(indices, chunk, len(extents)), _planes(places, chunk, len(extents))
        if _by_kernels(indices):
            _shift(given.reshape(-1).numpy(), -begins.reshape(-1).numpy(), chunk_places.view(-1).numpy())
        else:
            chunk_places.copy_(given - begins)
    return places


def max_pool2d_backward(
    grad: torch.Tensor,
    places: torch.Tensor,
    extents: list[int],
    kernel_size: list[int],
    stride: list[int],
    padding: list[int],
    dilation: list[int],
    ceil_mode: bool,
) -> torch.Tensor:
    """The gradient of `aten::max_pool2d_with_indices`, of places in the place of indices. All lie in memory row by row."""
    begins = _begins(grad.shape[-2:], extents, stride, padding, grad.device)
    out = grad.new_empty((*grad.shape[:-2], *extents))
    if _by_kernels(grad) and grad.dtype in _NUMBERS:
        _add_up(grad.view(-1).numpy(), places.view(-1).numpy(), begins.reshape(-1).numpy(), out.view(-1).numpy())
        return out
    for chunk in _chunks(places, 2):
        gradient, chunk_out = _planes(grad, chunk, 2), _planes(out, chunk, 2)
        indices = _indices(_planes(places, chunk, 2), begins)
        like = grad.new_empty(()).expand(chunk_out.shape)  # only its shape is asked for
        torch.ops.aten.max_pool2d_with_indices_backward.grad_input(
            gradient, like, kernel_size, stride, padding, dilation, ceil_mode, indices, grad_input=chunk_out
        )
    return out


def _indices(places: torch.Tensor, begins: torch.Tensor) -> torch.Tensor:
    """[planes, spatial] the indices of places."""
    if not _by_kernels(places):
        return places.to(torch.int64).add_(begins)
    indices = torch.empty(places.shape, dtype=torch.int64)
    _shift(places.view(-1).numpy(), begins.reshape(-1).numpy(), indices.view(-1).numpy())
    return indices


def _begins(counts: torch.Size, extents: list[int], stride: list[int], padding: list[int], device: torch.device) -> torch.Tensor:
    """[spatial] the index of the first element that each window may have."""
    begins = torch.zeros((), dtype=torch.int64, device=device)
    for count, extent, step, pad in zip(counts, extents, stride, padding, strict=True):
        first = torch.arange(count, device=device).mul_(step).sub_(pad).clamp_(min=0)
        begins = begins.unsqueeze(-1) * extent + first
    return begins


def _chunks(indices: torch.Tensor, spatial: int) -> Iterator[slice]:
    at_once = _INDICES_AT_ONCE if indices.device.type == "cpu" else _INDICES_ELSEWHERE
    each, count = indices.shape[-spatial:].numel(), indices.shape[:-spatial].numel()
    step = max(1, at_once // max(1, each))
    yield from (slice(begin, begin + step) for begin in range(0, count, step))


def _planes(x: torch.Tensor, chunk: slice, spatial: int) -> torch.Tensor:
    return x.view(-1, *x.shape[-spatial:])[chunk]


def _by_kernels(x: torch.Tensor) -> bool:
    return x.device.type == "cpu" and not SWITCHED_OFF


@kernel(nogil=True)
def _shift(numbers: Any, by: Any, shifted: Any) -> None:
    """The numbers of planes, one after another, each moved on by that of its window."""
    for first in range(0, len(numbers), len(by)):
        given, shifted_there = numbers[first : first + len(by)], shifted[first : first + len(by)]
        for at in range(len(by)):
            shifted_there[at] = given[at] + by[at]


@kernel(nogil=True)
def _add_up(gradients: Any, places: Any, begins: Any, out: Any) -> None:
    """Each gradient added to its element, plane after plane, in the order in which torch adds them."""
    count = len(begins)
    extent = len(out) * count // max(1, len(gradients))  # of a plane
    for plane in range(len(gradients) // count if count else 0):
        first = plane * count
        given, where, plane_out = (
            gradients[first : first + count],
            places[first : first + count],
            out[plane * extent : (plane + 1) * extent],
        )
        plane_out[:] = 0
        for at in range(count):
            plane_out[begins[at] + where[at]] += given[at]


define("pool_places(Tensor indices, int[] extents, int[] stride, int[] padding, ScalarType dtype) -> Tensor", pool_places)
define(
    "max_pool2d_backward(Tensor grad, Tensor places, int[] extents, int[] kernel_size, int[] stride, int[] padding, int[] dilation, "
    "bool ceil_mode) -> Tensor",
    max_pool2d_backward,
)


def _define(op: Any) -> None:
    places = [at for at, argument in enumerate(op._schema.arguments) if argument.name in ("running_mean", "running_var")]

    def functional(*args: Any) -> tuple[torch.Tensor, ...]:
        given = [arg.clone() if at in places else arg for at, arg in enumerate(args)]
        return (*op(*given), *(given[at] for at in places))

    name, _, rest = str(op._schema).removeprefix("aten::").partition("(")
    define(f"{name}_functional({rest.removesuffix(')')}, Tensor, Tensor)", functional)


for _name in (
    "cudnn_batch_norm", "miopen_batch_norm", "batch_norm_gather_stats", "batch_norm_gather_stats_with_counts", "batch_norm_update_stats",
):  # fmt: skip
    _define(getattr(torch.ops.aten, _name).default)


def cudnn_batch_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, mean: None, variance: None, *rest: float) -> Any:
    """Once more: the very kernel, beside running statistics that nobody reads, since without any cuDNN might take another."""
    return torch.ops.aten.cudnn_batch_norm(x, weight, bias, torch.zeros_like(weight), torch.ones_like(weight), *rest)


_RUNNING = "Tensor? running_mean, Tensor? running_var, bool training, float exponential_average_factor, float epsilon"
define(f"cudnn_batch_norm(Tensor input, Tensor weight, Tensor? bias, {_RUNNING}) -> (Tensor, Tensor, Tensor, Tensor)", cudnn_batch_norm)


_ATEN = torch.ops.aten


def cudnn_rnn(*args: Any) -> Any:
    """The layers, with the state that ATen has for them now."""
    states, device, dropout = STATES.get(), args[0].device, args[11]

    def run(given: tuple[Any, ...]) -> Any:
        states[device] = given[15]
        return _ATEN._cudnn_rnn.default(*args[:15], given[15])

    if states is not OF_ATEN:
        if device not in states:
            states[device] = _ATEN._cudnn_init_dropout_state(dropout, True, 0, dtype=torch.uint8, device=device)
        return run((*args[:15], states[device]))
    one = args[4].view(-1)[:1].view(1, 1, 1)
    with torch.no_grad(), InPlaceOfLayers(run) as layer:
        composite = torch._C.DispatchKey.CompositeImplicitAutograd  # beneath autograd a mode is handed layers whole
        _ATEN.rnn_tanh.input._op_dk(composite, one, one, [one[0], one[0]], False, 1, dropout, True, False, False)
    assert layer.out is not None, "whether cuDNN is switched on is compared before"
    return layer.out


def cudnn_rnn_backward(*args: Any) -> Any:
    """Their gradient. Raises RuntimeError where they have not run, as where `verify` computes in double what follows them."""
    if (state := STATES.get().get(args[0].device)) is None:
        raise RuntimeError("what recurrent layers of cuDNN with dropout keep for their gradient is of their own precision")
    return _ATEN._cudnn_rnn_backward.default(*args[:19], state, *args[20:])


class InPlaceOfLayers(TorchDispatchMode):
    """Calls `run` with what ATen hands to recurrent layers of cuDNN, in their place."""

    def __init__(self, run: Callable[[tuple[Any, ...]], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.run, self.out = run, None

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        if func is not _ATEN._cudnn_rnn.default:
            return func(*args, **(kwargs or {}))
        self.out = self.run(args)
        return (args[0], args[4], *[args[0].view(-1)[:0]] * 3)  # whose cells, reserve and weights nobody reads


for _kernel in (cudnn_rnn, cudnn_rnn_backward):
    define(str(getattr(_ATEN, f"_{_kernel.__name__}").default._schema).removeprefix("aten::_"), _kernel)
torch.library.register_fake("lowtide::cudnn_rnn", _ATEN._cudnn_rnn.default, lib=LIBRARY)
