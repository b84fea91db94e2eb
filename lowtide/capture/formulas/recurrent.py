"""Recurrent layers: on a GPU what cuDNN keeps to itself, and symbolic sizes.

ATen asks for numbers in C++, and takes another way through a layer of symbols than eager does.

An LSTM that oneDNN computes is written here as ATen writes it (RNN.cpp and mkldnn/RNN.cpp), a call for each layer and direction, of any
length. Whether oneDNN computes it is asked of ATen itself. All others take a step at a time, so that their length is a number.
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Sequence
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.capture.calls import name_of, resolve
from lowtide.capture.care.turns import during
from lowtide.capture.formulas.dispatch import absent_capability, calling_formulas, formula, names_called, taken_apart
from lowtide.capture.real import not_remembered
from lowtide.capture.sizes.symbols import is_symbolic, size_of
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError
from lowtide.kernels.layers import InPlaceOfLayers

_ATEN = torch.ops.aten
_LAYER = _ATEN.mkldnn_rnn_layer.default
_LSTM = 2  # as oneDNN numbers its kinds of layers


@formula(_ATEN.unsafe_chunk.default)
def _chunks(op: OpOverload, tensor: Tensor, chunks: int, dim: int = 0) -> Any:
    """Of an extent that is a number, whatever the others are."""
    extent = tensor.shape[dim]
    if is_symbolic(extent) or not extent or not any(map(is_symbolic, tensor.shape)):
        return op(tensor, chunks, dim)
    return tensor.unsafe_split(-(-extent // chunks), dim)


@formula(_ATEN.gru.input, _ATEN.rnn_tanh.input, _ATEN.rnn_relu.input)
def _stepwise(op: OpOverload, given: Tensor, *arguments: Any) -> Any:
    """`arguments` end with whether rows come first."""
    if not _is_by_cudnn(given):
        _refuse_symbolic(op, given.shape[1 if arguments[-1] else 0])
    return _by_aten(op, -4, given, *arguments)


@formula(_ATEN.lstm.data, _ATEN.gru.data, _ATEN.rnn_tanh.data, _ATEN.rnn_relu.data)
def _of_lengths(op: OpOverload, given: Tensor, *arguments: Any) -> Any:
    return _by_aten(op, -3, given, *arguments)


def _by_aten(op: OpOverload, at: int, given: Tensor, *arguments: Any) -> Any:
    """As ATen takes it apart, which looks for one buffer below all weights by their addresses: a fake's is where it begins in its own.

    `at` is where the probability of dropout stands. cuDNN's layers are told of it behind ATen's back: it would draw for them at once.
    """
    _have_addresses()
    if not _is_by_cudnn(given):
        return taken_apart(op, given, *arguments)
    with during(_dropout, arguments[at]):
        arguments = (*arguments[:at], 0.0, *arguments[at + 1 :])
        if absent_capability(given) is not None or any(map(is_symbolic, given.shape)):
            return _by_cudnn(op, given, *arguments)
        return taken_apart(op, given, *arguments)


_dropout: ContextVar[float | None] = ContextVar("dropout", default=None)


@formula(_ATEN._cudnn_rnn.default)
def _layers(op: OpOverload, *args: Any) -> Any:
    """With the program's dropout, and without a random state, which ATen hands on as eager's layers have left it."""
    dropout = _dropout.get()
    return op(*args) if dropout is None else op(*args[:11], dropout, *args[12:15], None)


def form_of(func: OpOverload, args: tuple[Any, ...]) -> OpOverload | None:
    """The operator that finds the random state of cuDNN's layers where it runs; None for others, and where they drop nothing."""
    at = _DROPOUT_OF.get(func)
    drops = at is not None and args[at] and args[at + 1] and args[at + 4] is None
    return resolve(name_of(func).replace("aten._", "lowtide.")) if drops else None


_DROPOUT_OF = {_ATEN._cudnn_rnn.default: 11, _ATEN._cudnn_rnn_backward.default: 15}  # where dropout stands, and behind it training


def _is_by_cudnn(given: Tensor) -> bool:
    """Whether eager has cuDNN compute a layer of this input. Of a GPU that is here ATen is asked, which reads sizes as numbers."""
    if given.device.type != "cuda" or absent_capability(given) is not None:
        return given.device.type == "cuda" and torch.backends.cudnn.enabled
    with _disable_current_modes():
        return torch.cudnn_is_acceptable(given.new_empty(1))


_KINDS = ("rnn_relu", "rnn_tanh", "lstm", "gru")  # as cuDNN numbers them


def _by_cudnn(
    op: OpOverload, given: Tensor, hidden: Any, params: Sequence[Tensor], has_biases: bool, layers: int, dropout: float, train: bool,
    bidirectional: bool, rows_first: Any = None,
) -> Any:  # fmt: skip
    """As ATen calls cuDNN, of a GPU that is not here, or of symbolic sizes: ATen asks both for numbers.

    Autocast has weights copied into one buffer of half precision, all matrices first.
    """
    if not isinstance(rows_first, bool):
        why = "no GPU is here: give it padded, or plan where one is"
        why = why if absent_capability(given) is not None else "a range has no such lengths: leave its dimensions out of `dynamic`"
        raise CaptureError(f"{_named(op)} has a packed sequence, of whose lengths cuDNN is asked, and {why}")
    kind = _KINDS.index(op.name().removeprefix("aten::").partition(".")[0])
    state, *cells = (hidden[0], hidden[1]) if isinstance(hidden, (list, tuple)) else (hidden,)
    projects = bool(cells) and cells[0].shape[2] != state.shape[2]
    width = (cells[0] if projects else state).shape[2]
    buffer, weights = None, list(params)
    with calling_formulas():
        if torch.is_autocast_enabled("cuda"):
            buffer, weights = _in_one_buffer(params)
            cells = [each.to(torch.float16) for each in cells]
            state, given = state.to(torch.float16), given.to(torch.float16)
        elif absent_capability(given) is None:
            buffer = _buffer_below(op, params, has_biases, layers, bidirectional, hidden)
        with torch.autocast("cuda", enabled=False):
            output, *ends = _ATEN._cudnn_rnn.default(
                given, weights, (4 if has_biases else 2) + projects, buffer, state, cells[0] if cells else None, kind, width,
                state.shape[2] if projects else 0, layers, rows_first, dropout, train, bidirectional, [], None,
            )  # fmt: skip
    return output, *ends[: 1 + bool(cells)]


def _buffer_below(
    op: OpOverload, params: Sequence[Tensor], has_biases: bool, layers: int, bidirectional: bool, hidden: Any
) -> Tensor | None:
    """The buffer in which all weights lie, as ATen makes it of their storage; None where they lie apart. ATen itself says which it is.

    Asked for one row and one place, on tensors of the same weights: they alone decide.
    """
    buffers, fakes = list[Tensor | None](), next(each.fake_mode for each in params if isinstance(each, FakeTensor))
    with _disable_current_modes(), fakes, not_remembered(fakes), torch.no_grad(), torch.autocast("cuda", enabled=False):
        _have_addresses()
        states = [each.new_empty((each.shape[0], 1, each.shape[2])) for each in (hidden if isinstance(hidden, (list, tuple)) else [hidden])]
        given = params[0].new_empty((1, 1, params[0].shape[1]))
        settings = has_biases, layers, 0.0, False, bidirectional, False
        with InPlaceOfLayers(lambda args: buffers.append(args[3])):
            op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, given, states if len(states) > 1 else states[0], params, *settings)
    (buffer,) = buffers
    if buffer is None or not buffer.numel():
        return None
    flat = _ATEN.empty.memory_format([0], dtype=buffer.dtype, layout=buffer.layout, device=buffer.device)
    whole: Tensor = _ATEN.set_.source_Storage(flat, params[0].untyped_storage())
    return whole if whole.shape == buffer.shape else whole.narrow(0, 0, buffer.shape[0])


def _in_one_buffer(params: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    buffer = _ATEN.zeros.default([sum(each.numel() for each in params)], dtype=torch.float16, layout=torch.strided, device=params[0].device)
    places, at = dict[int, int](), 0
    for index in sorted(range(len(params)), key=lambda index: params[index].dim() == 1):
        places[index] = at
        at += params[index].numel()
    parts = []
    for index, each in enumerate(params):
        part = buffer.as_strided((each.numel(), 1), (1, 1), places[index]).detach()  # no view of the buffer to autograd, as in ATen
        parts.append(part.copy_(each.view(part.shape)))
    return buffer, parts


@functools.cache
def _have_addresses() -> None:
    """Has torch say here, to nobody, what it says once in a process of addresses of fakes: ATen compares them, and reads nothing there."""
    with warnings.catch_warnings(), _disable_current_modes(), FakeTensorMode():
        warnings.simplefilter("ignore")
        torch.empty(1).data_ptr()


@formula(_ATEN.lstm.input)
def _lstm(
    op: OpOverload, given: Tensor, hidden: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, layers: int, dropout: float,
    train: bool, bidirectional: bool, rows_first: bool,
) -> Any:  # fmt: skip
    arguments = given, hidden, params, has_biases, layers, dropout, train, bidirectional, rows_first
    if not any(map(is_symbolic, (*given.shape, *hidden[0].shape))) or _is_by_cudnn(given):
        return _by_aten(op, -4, *arguments)
    if given.shape[0] != 0 and given.device.type == "cpu" and _is_by_onednn(given.dtype):
        if len(params) % (4 if has_biases else 2):
            raise CaptureError(
                f"{_named(op)} projects what its layers hand on (proj_size), which torch computes for batches of one size alone: leave its "
                "dimensions out of `dynamic`, or project by a layer of your own"
            )
        with calling_formulas():
            return _by_layers(*arguments)
    _refuse_symbolic(op, given.shape[1 if rows_first else 0])
    return _by_aten(op, -4, *arguments)


def _is_by_onednn(dtype: torch.dtype) -> bool:
    """Whether eager has oneDNN compute an LSTM, as gradients and flags are now."""
    with _disable_current_modes():
        one = torch.zeros(1, 1, 1, dtype=dtype)
        weights = [torch.zeros(4, 1, dtype=dtype), torch.zeros(4, 1, dtype=dtype)]
        return _LAYER.name() in names_called(lambda: _ATEN.lstm.input(one, [one, one], weights, False, 1, 0.0, False, False, False))


def _by_layers(
    given: Tensor, hidden: Sequence[Tensor], params: Sequence[Tensor], has_biases: bool, layers: int, dropout: float, train: bool,
    bidirectional: bool, rows_first: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    each, zeros = 4 if has_biases else 2, _ATEN.zeros.default
    states, cells = (item.contiguous() for item in hidden)
    size, directions, ends = states.shape[2], 2 if bidirectional else 1, list[tuple[Tensor, Tensor]]()
    sequence = (given.transpose(0, 1) if rows_first else given).contiguous()
    for layer in range(layers):
        outputs = []
        for direction in range(directions):
            at = len(ends)
            before, weights = (states[at], cells[at]), params[at * each : (at + 1) * each]
            made_up = (
                () if has_biases else (zeros(one.shape, dtype=one.dtype, layout=one.layout, device=one.device) for one in weights[::-1])
            )
            biases = [*weights[2:], *reversed([*made_up])]  # C++ makes the last argument first
            settings = direction > 0, (), _LSTM, size, layers, has_biases, bidirectional, rows_first, train
            output, state, cell, _ = _LAYER(sequence, weights[0], weights[1], *biases, *before, *settings)
            outputs.append(output)
            ends.append((state, cell))
        sequence = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if dropout and train and layer < layers - 1:
            sequence = torch.dropout(sequence, dropout, True)
    state, cell = (torch.stack(items) for items in zip(*ends, strict=True))
    return (sequence.transpose(0, 1) if rows_first else sequence), state, cell


def _refuse_symbolic(op: OpOverload, length: Any) -> None:
    if is_symbolic(length):
        raise CaptureError(
            f"dimension {size_of(length)}: {_named(op)} takes a step of its own for each place of a sequence, so that the program is "
            "another one for other lengths: leave the length out of `dynamic` (batches of other lengths are captured as they come), pad "
            "sequences to one length, or use an LSTM in float32 on a CPU, whose layers are one operator each"
        )


def _named(op: OpOverload) -> str:
    return f"{op.name().removeprefix('aten::').partition('.')[0]} at {users_line()}"
