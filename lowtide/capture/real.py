"""Runs an operator under fake tensors, and sees to it that what comes out looks as the real operator's results do.

    takes   an operator, its arguments, and what to ask for the looks of its real results
    leaves  fakes of those looks

Fake kernels say in places other than what real ones give: other strides, a workspace without bytes, an error for what the real kernel
takes. Whoever captures may have tried the real one on made-up data, or remember such a trial, and says so within `knowing`; where nothing
is known, the fake is believed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.capture.blocks import address, dtype_name
from lowtide.capture.calls import NEEDS_DATA, UNTRACEABLE, tensors_in, why_untraceable
from lowtide.capture.corrections import corrected, kernel
from lowtide.capture.looks import remembered
from lowtide.capture.sizes.probes import UnprobedError, bytes_left, probed
from lowtide.capture.sizes.strides import dense_stride
from lowtide.capture.sizes.symbols import FixedError, Symbols, hint, is_symbolic
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError
from lowtide.ir.graph import Node
from lowtide.ir.operators.collectives.nodes import is_collective
from lowtide.ir.result_specs import Really, Results, ResultSpec, differ, unknown

_really: ContextVar[Really] = ContextVar("really", default=unknown)


@contextmanager
def knowing(really: Really) -> Iterator[None]:
    """What is captured inside asks `really` what operators give."""
    token = _really.set(really)
    try:
        yield
    finally:
        _really.reset(token)


def run(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], call: Node, before: Sequence[Node], symbols: Symbols) -> Any:
    """The results of an operator on fake tensors, as the real one gives them.

    Raises one of NEEDS_DATA for one that needs data, CaptureError for one that cannot be run on fakes.

    `call` is the same call as the graph writes it, `before` the nodes recorded so far.
    """

    def ask(makes_bytes: int, thought: Results | None, point: Mapping[str, int] | None = None) -> Results | None:
        if is_collective(call):  # nobody takes part but the processes of the running program
            return None
        with _disable_current_modes():  # what a trial runs is no part of the program
            return _really.get()(symbols.node(call, point), symbols.nodes(before, point), makes_bytes, thought)

    def as_real(point: Mapping[str, int] | None = None) -> Any:
        real = ask(0, None, point)
        if real is None or None in real:
            raise UnprobedError
        return _structured(func, [_fake(each) for each in real if each is not None])

    try:
        out = corrected(func, args, _asked(func, args, kwargs, symbols))
    except (*NEEDS_DATA, FixedError):
        raise
    except UNTRACEABLE as error:
        raise CaptureError(why_untraceable(func, error)) from error
    except Exception:  # whatever a fake stumbles over: where the real operator takes the call its results count, else it is raised
        if func._schema.is_mutable:
            raise
        over_sizes = any(is_symbolic(extent) for each in tensors_in((*args, *kwargs.values())) for extent in each.shape)
        with suppress(UnprobedError):
            return probed(symbols, func, args, kwargs, as_real) if over_sizes else as_real()
        raise
    return _put_right(out, tensors_in((*args, *kwargs.values())), ask, symbols)


def _asked(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], symbols: Symbols) -> Any:
    """What the fake kernel says; where it takes no symbolic sizes, or takes them for numbers, what it says at several points.

    Raises what it raises.
    """
    try:
        run = kernel(func, args, kwargs)

        def ask(*args: Any, **kwargs: Any) -> Any:
            with _not_remembered(func, tensors_in((*args, *kwargs.values()))):
                return run(*args, **kwargs)

        return remembered(func, args, kwargs, ask) if run is func else ask(*args, **kwargs)
    except NEEDS_DATA:
        raise
    except (FixedError, RuntimeError, *UNTRACEABLE) as error:
        if symbols.env is None:
            raise
        try:
            return probed(symbols, func, args, kwargs)
        except Exception:  # not known for all batches, or an error that only some numbers raise: the first one says more
            raise error from None


@contextmanager
def _not_remembered(func: OpOverload, given: Sequence[torch.Tensor]) -> Iterator[None]:
    """Have the fake kernel of several results run: torch remembers how each of them looked, but not which of them were one tensor."""
    mode = next((each.fake_mode for each in given if isinstance(each, FakeTensor)), None)
    if mode is None or len(func._schema.returns) < 2:
        yield
        return
    before, mode.cache_enabled = mode.cache_enabled, False
    try:
        yield
    finally:
        mode.cache_enabled = before


def _put_right(out: Any, given: Sequence[torch.Tensor], ask: Callable[..., Results | None], symbols: Symbols) -> Any:
    """Results with new fakes for those that look otherwise than real ones. Views of arguments, and what shares a storage, are left."""
    pieces, addresses = list(out) if isinstance(out, (list, tuple)) else [out], set(map(address, given))
    dense = [isinstance(each, torch.Tensor) and each.layout is torch.strided and each.device.type != "meta" for each in pieces]
    fresh = [is_dense and address(piece) not in addresses for is_dense, piece in zip(dense, pieces, strict=True)]
    if not any(fresh):
        return out
    made = [piece for piece, is_fresh in zip(pieces, fresh, strict=True) if is_fresh]
    shared = len({address(piece) for piece in made}) < len(made)
    thought = [_look(piece) if is_fresh and not shared else None for piece, is_fresh in zip(pieces, fresh, strict=True)]
    real = ask(sum(hint(piece.untyped_storage().nbytes()) for piece in made), tuple(thought))
    if real is None or not differ(tuple(thought), real):
        return out
    over_sizes = any(is_symbolic(extent) for each in given for extent in each.shape)

    def instead(which: int, look: ResultSpec, piece: torch.Tensor) -> torch.Tensor:
        if over_sizes and look.dtype == "uint8" and len(look.shape) == 1 and len(pieces) > 1:
            return piece.new_empty(bytes_left(symbols, lambda point: ((ask(0, None, point) or real)[which] or look).nbytes))
        return _instead(look, piece, given)

    right = [
        piece if mine is None or look is None or look == mine else instead(which, look, piece)
        for which, (piece, mine, look) in enumerate(zip(pieces, thought, real, strict=True))
    ]
    return type(out)(right) if isinstance(out, (list, tuple)) else right[0]


def _structured(func: OpOverload, pieces: list[torch.Tensor]) -> Any:
    """Results as the operator returns them: one, several, or a list."""
    returns = func._schema.returns
    if len(returns) == 1 and isinstance(returns[0].type, torch.TensorType):
        return pieces[0]
    return pieces if len(returns) == 1 else tuple(pieces)


def _look(tensor: torch.Tensor) -> ResultSpec:
    nbytes, offset = hint(tensor.untyped_storage().nbytes()), hint(tensor.storage_offset())
    shape, stride = tuple(map(hint, tensor.shape)), tuple(map(hint, tensor.stride()))
    return ResultSpec(dtype_name(tensor.dtype), shape, stride, offset, nbytes, str(tensor.device))


def _instead(look: ResultSpec, fake: torch.Tensor, given: Sequence[torch.Tensor]) -> torch.Tensor:
    """A fake of this look for one that looks otherwise.

    Of symbolic extents it is dense with its dimensions in that order, or has strides of the tensors that were given; it lies on a storage
    of its own size, or of that of a given one. Other points of the range are tried when the operators are measured.
    """
    if not any(map(is_symbolic, (*fake.shape, *fake.stride(), fake.untyped_storage().nbytes()))):
        return _fake(look)
    order = sorted(range(fake.dim()), key=lambda dim: (look.stride[dim], look.shape[dim]))
    known = {hint(step): step for tensor in given for step in tensor.stride()}
    for stride in (dense_stride(fake.shape, order), [known.get(step, step) for step in look.stride]):
        made = torch.empty_strided(fake.shape, stride, dtype=getattr(torch, look.dtype), device=look.device)
        larger = (made.new_empty(each.numel()).as_strided(fake.shape, stride) for each in given if hint(each.numel()) > hint(made.numel()))
        for each in (made, *larger):
            if _look(each).is_like(look):
                return each
    raise CaptureError(
        f"the results of an operator at {users_line()} lie otherwise than torch's fake kernel says ({look}), in a way that is not "
        "known for other batches: leave its dimensions out of `dynamic`"
    )


def _fake(look: ResultSpec) -> torch.Tensor:
    """A fake of this look on a storage of its own; the fake mode is on."""
    dtype: torch.dtype = getattr(torch, look.dtype)
    plain = torch.empty_strided(look.shape, look.stride, dtype=dtype, device=look.device)
    if plain.untyped_storage().nbytes() == look.nbytes and look.offset == 0:
        return plain
    flat = torch.empty(-(-look.nbytes // dtype.itemsize), dtype=dtype, device=look.device)
    return flat.as_strided(look.shape, look.stride, look.offset)
