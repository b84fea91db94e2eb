"""Runs an operator under fake tensors, and sees to it that what comes out looks as the real operator's results do.

    takes   an operator, its arguments, and what to ask for the looks of its real results
    leaves  fakes of those looks

Fake kernels say in places other than what real ones give: other strides, a workspace without bytes, an error for what the real kernel
takes. Whoever captures may have tried the real one on made-up data, or remember such a trial, and says so within `knowing`. Where nothing
is known, the fake is believed, but for operators that are known to be wrong (`corrections.py`).

What fake kernels have said is remembered by how their arguments look (`looks.py`). torch remembers as well, at ten times the price: it goes
over all that a fake tensor can be. In calls over lists each tensor of a list counts. What is known of tensors' data, of optimizers' counts
mostly, is computed with.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.capture.blocks import address, dtype_name
from lowtide.capture.calls import NEEDS_DATA, UNTRACEABLE, tensors_in, why_untraceable
from lowtide.capture.care.turns import during
from lowtide.capture.corrections import corrected, kernel
from lowtide.capture.looks import VIEW, WRITTEN, NoLookError, ResultLayout, fakes_of, kind_of, layouts_of, look_of
from lowtide.capture.sizes.probes import UnprobedError, bytes_left, dense_stride, probed
from lowtide.capture.sizes.symbols import FixedError, Symbols, hint, is_symbolic
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError
from lowtide.ir.graph import Node
from lowtide.ir.operators.nodes import is_collective
from lowtide.ir.result_specs import Really, Results, ResultSpec, differ, pieces_of, unknown

_MOST = 20_000  # looks; what comes later is asked for each time
_known: dict[Any, tuple[ResultLayout, ...]] = {}


def remembered(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], ask: Callable[..., Any]) -> Any:
    """What `ask(*args, **kwargs)` says under fake tensors, which has the operator run. Raises what that raises."""
    kind, tensors = kind_of(func), list[FakeTensor]()
    if kind is None:
        return ask(*args, **kwargs)
    try:
        look_key = look_of(func, args, kwargs, tensors)
    except NoLookError:
        return ask(*args, **kwargs)
    known_data = {each.constant is not None for each in tensors}
    if len(known_data) != 1 or (kind is WRITTEN and not _lie_apart(tensors)):
        return ask(*args, **kwargs)
    layouts = _known.get(key := (*known_data, look_key))
    if layouts is None:
        out = ask(*args, **kwargs)
        resized = kind is WRITTEN and look_of(func, args, kwargs, []) != look_key  # where the real kernel may raise
        layouts = None if resized else _said(func, out, tensors, True in known_data)
        if layouts is not None and len(_known) < _MOST:
            _known[key] = layouts
        return out
    data, mode = list[torch.Tensor](), tensors[0].fake_mode
    if True in known_data:  # of few elements, with which fake kernels go on computing
        with no_dispatch():
            data = pieces_of(func(*_data(args), **{name: _data(item) for name, item in kwargs.items()}))
    if kind is WRITTEN:
        return args[0] if func._schema.returns else None
    # The converter knows later of what data others are views.
    fakes = [mode.fake_tensor_converter.from_real_tensor(mode, each, make_constant=True) for each in data]
    return structured(func, fakes or fakes_of(func, layouts, tensors[0]))


def _data(item: Any) -> Any:
    """An argument with what tensors hold in the place of their fakes."""
    if type(item) is FakeTensor:
        return item.constant
    return type(item)(map(_data, item)) if type(item) in (tuple, list) else item


def _lie_apart(tensors: list[FakeTensor]) -> bool:
    different = {id(each): each for each in tensors}.values()
    return len(set(map(address, different))) == len(different)


def _said(func: OpOverload, out: Any, given: list[FakeTensor], known_data: bool) -> tuple[ResultLayout, ...] | None:
    """What to remember of an answer; None where more than looks counts."""
    pieces = given if (kind := kind_of(func)) is WRITTEN else pieces_of(out)
    if any((piece.constant is None) is known_data for piece in pieces if type(piece) is FakeTensor) or (known_data and kind is VIEW):
        return None
    return layouts_of(func, out, given)


_really: ContextVar[Really] = ContextVar("really", default=unknown)


def knowing(really: Really) -> AbstractContextManager[None]:
    """What is captured inside asks `really` what operators give."""
    return during(_really, really)


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
        return structured(func, [_fake(each) for each in real if each is not None])

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
    return _put_right(func, out, tensors_in((*args, *kwargs.values())), ask, symbols)


def _asked(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], symbols: Symbols) -> Any:
    """What the fake kernel says; where it takes no symbolic sizes, or takes them for numbers, what it says at several points.

    Raises what it raises.
    """
    try:
        run = kernel(func, args, kwargs)

        def ask(*args: Any, **kwargs: Any) -> Any:
            mode = next((each.fake_mode for each in tensors_in((*args, *kwargs.values())) if isinstance(each, FakeTensor)), None)
            if mode is None or (len(func._schema.returns) < 2 and not func._schema.is_mutable):
                return run(*args, **kwargs)
            with not_remembered(mode):
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
def not_remembered(mode: FakeTensorMode) -> Iterator[None]:
    """Have fake kernels run. torch remembers how results look, but not which were one tensor, nor that what was written got another size.

    And it holds the storages that it was given.
    """
    before, mode.cache_enabled = mode.cache_enabled, False
    try:
        yield
    finally:
        mode.cache_enabled = before


def _put_right(func: OpOverload, out: Any, given: Sequence[torch.Tensor], ask: Callable[..., Results | None], symbols: Symbols) -> Any:
    """Results with new fakes for those that look otherwise than real ones. Views of arguments, and what shares a storage, are left."""
    pieces, addresses = pieces_of(out), set(map(address, given))
    dense = [isinstance(each, torch.Tensor) and each.layout is torch.strided and each.device.type != "meta" for each in pieces]
    fresh = [is_dense and address(piece) not in addresses for is_dense, piece in zip(dense, pieces, strict=True)]
    if not any(fresh):
        return out
    new_pieces = [piece for piece, is_fresh in zip(pieces, fresh, strict=True) if is_fresh]
    shared = len({address(piece) for piece in new_pieces}) < len(new_pieces)
    thought = [_look(piece) if is_fresh and not shared else None for piece, is_fresh in zip(pieces, fresh, strict=True)]
    real = ask(sum(hint(piece.untyped_storage().nbytes()) for piece in new_pieces), tuple(thought))
    if real is None or not differ(tuple(thought), real):
        return out
    over_sizes = any(is_symbolic(extent) for each in given for extent in each.shape)

    def instead(which: int, spec: ResultSpec, piece: torch.Tensor) -> torch.Tensor:
        if over_sizes and spec.dtype == "uint8" and len(spec.shape) == 1 and len(pieces) > 1:
            return piece.new_empty(bytes_left(symbols, lambda point: ((ask(0, None, point) or real)[which] or spec).nbytes))
        return _instead(spec, piece, given)

    right = [
        piece if mine is None or spec is None or spec == mine else instead(which, spec, piece)
        for which, (piece, mine, spec) in enumerate(zip(pieces, thought, real, strict=True))
    ]
    return structured(func, right)


def structured(func: OpOverload, pieces: Sequence[torch.Tensor]) -> Any:
    """Results as the operator returns them: one, several, a list, or several of which one is a list."""
    lists = [isinstance(each.type, torch.ListType) for each in func._schema.returns]
    if True not in lists:
        return pieces[0] if len(lists) == 1 else tuple(pieces)
    at, behind = lists.index(True), len(pieces) - len(lists) + lists.index(True) + 1
    return pieces if len(lists) == 1 else (*pieces[:at], pieces[at:behind], *pieces[behind:])


def _look(tensor: torch.Tensor) -> ResultSpec:
    nbytes, offset = hint(tensor.untyped_storage().nbytes()), hint(tensor.storage_offset())
    shape, stride = tuple(map(hint, tensor.shape)), tuple(map(hint, tensor.stride()))
    return ResultSpec(dtype_name(tensor.dtype), shape, stride, offset, nbytes, str(tensor.device))


def _instead(spec: ResultSpec, fake: torch.Tensor, given: Sequence[torch.Tensor]) -> torch.Tensor:
    """A fake of this look for one that looks otherwise.

    Of symbolic extents it is dense with its dimensions in that order, or has strides of the tensors that were given; it lies on a storage
    of its own size, or of that of a given one. Other points of the range are tried when the operators are measured.
    """
    if not any(map(is_symbolic, (*fake.shape, *fake.stride(), fake.untyped_storage().nbytes()))):
        return _fake(spec)
    order = sorted(range(fake.dim()), key=lambda dim: (spec.stride[dim], spec.shape[dim]))
    known = {hint(step): step for tensor in given for step in tensor.stride()}
    for stride in (dense_stride(fake.shape, order), [known.get(step, step) for step in spec.stride]):
        empty = torch.empty_strided(fake.shape, stride, dtype=getattr(torch, spec.dtype), device=spec.device)
        larger = (
            empty.new_empty(each.numel()).as_strided(fake.shape, stride) for each in given if hint(each.numel()) > hint(empty.numel())
        )
        for each in (empty, *larger):
            if _look(each).is_like(spec):
                return each
    raise CaptureError(
        f"the results of an operator at {users_line()} lie otherwise than torch's fake kernel says ({spec}), in a way that is not "
        "known for other batches: leave its dimensions out of `dynamic`"
    )


def _fake(spec: ResultSpec) -> torch.Tensor:
    """A fake of this look on a storage of its own; the fake mode is on."""
    dtype: torch.dtype = getattr(torch, spec.dtype)
    plain = torch.empty_strided(spec.shape, spec.stride, dtype=dtype, device=spec.device)
    if plain.untyped_storage().nbytes() == spec.nbytes and spec.offset == 0:
        return plain
    flat = torch.empty(-(-spec.nbytes // dtype.itemsize), dtype=dtype, device=spec.device)
    return flat.as_strided(spec.shape, spec.stride, spec.offset)
