"""Runs an operator under fake tensors, and sees to it that what comes out looks as the real operator's results do.

    takes   an operator, its arguments, and what to ask for the looks of its real results
    leaves  fakes of those looks

Fake kernels say in places other than what real ones give: other strides, a workspace without bytes, an error for what the real kernel
takes. Whoever captures may have tried the real one on made-up data, or remember such a trial, and says so within `knowing`. Where nothing
is known, the fake is believed, but for operators that are known to be wrong (`corrections.py`).

What fake kernels have said is remembered by how their arguments look: most operators of a program are called alike many times. torch
remembers as well, at ten times the price: it goes over all that a fake tensor can be. Remembered here is what plain tensors of known sizes
give: new dense results on storages of their own, a view of the first argument, or that argument, which was written. All else is asked
again. In calls over lists each tensor of a list counts so. What is known of tensors' data, of optimizers' counts mostly, is computed with.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from contextvars import ContextVar
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils._mode_utils import no_dispatch
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.capture import calls
from lowtide.capture.blocks import address, dtype_name
from lowtide.capture.calls import NEEDS_DATA, UNTRACEABLE, tensors_in, why_untraceable
from lowtide.capture.care.turns import during
from lowtide.capture.corrections import corrected, kernel
from lowtide.capture.sizes.probes import UnprobedError, bytes_left, dense_stride, probed
from lowtide.capture.sizes.symbols import FixedError, Symbols, hint, is_symbolic
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError
from lowtide.ir.graph import Node
from lowtide.ir.operators.nodes import is_collective
from lowtide.ir.result_specs import Really, Results, ResultSpec, differ, pieces_of, unknown

_MOST = 20_000  # looks; what comes later is asked for each time
_SIMPLE = frozenset({int, bool, float, complex, str, type(None), torch.dtype, torch.device, torch.layout, torch.memory_format})
_NEW, _VIEW, _WRITTEN = "new", "view", "written"
_known: dict[Any, Any] = {}


class _UnlikeError(Exception):
    """An argument of which more than its look counts."""


_AS_VIEW = torch.ops.aten.as_strided.default._op_dk  # by the kernel for what has no memory: torch may have none for the device


def remembered(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], ask: Callable[..., Any]) -> Any:
    """What `ask(*args, **kwargs)` says under fake tensors, which has the operator run. Raises what that raises."""
    kind = _kind_of(func)
    if kind is None:
        return ask(*args, **kwargs)
    tensors: list[FakeTensor] = []
    try:
        described = [*_looks((args, tuple(kwargs.items())), tensors, kind is _WRITTEN or calls.is_over_lists(func))]
    except _UnlikeError:
        return ask(*args, **kwargs)
    known_data = {each.constant is not None for each in tensors}
    if len(known_data) != 1 or (kind is _WRITTEN and not _lie_apart(tensors)):
        return ask(*args, **kwargs)
    specs = _known.get(key := (func, torch.get_default_dtype(), *known_data, *described))
    if specs is None:
        out = ask(*args, **kwargs)
        specs = _said(out, kind, tensors, True in known_data)
        if specs is not None and len(_known) < _MOST:
            _known[key] = specs
        return out
    mode, data = tensors[0].fake_mode, list[torch.Tensor]()
    if True in known_data:  # of few elements, with which fake kernels go on computing
        with no_dispatch():
            data = pieces_of(func(*_data(args), **{name: _data(item) for name, item in kwargs.items()}))
    if kind is _WRITTEN:
        return args[0] if func._schema.returns else None
    with no_dispatch():
        if kind is _VIEW:
            shape, stride, offset = specs
            viewed = _AS_VIEW(torch._C.DispatchKey.Meta, tensors[0], shape, stride, tensors[0].storage_offset() + offset)
            return FakeTensor(mode, viewed, tensors[0].fake_device)
        fakes = [FakeTensor(mode, torch.empty_strided(*layout, dtype=dtype, device="meta"), device) for layout, dtype, device in specs]
    for fake, real in zip(fakes, data, strict=False):
        fake.constant = real
        mode.fake_tensor_converter.add_constant_storage_mapping(fake)
    return _structured(func, fakes)


@functools.cache
def _kind_of(func: OpOverload) -> str | None:
    """Whether an operator makes tensors, or gives a view of its first argument, or writes that and returns it; None for any other."""
    schema = func._schema
    aliases = [argument.alias_info for argument in schema.arguments]
    over_lists = calls.is_over_lists(func)
    if func.namespace != "aten" or not (schema.returns or over_lists):
        return None
    if any(str(each.type) != ("List[Tensor]" if over_lists else "Tensor") for each in schema.returns):
        return None
    if {torch.Tag.dynamic_output_shape, torch.Tag.inplace_view} & {*func.tags}:
        return None
    if schema.returns and not any(aliases) and not any(each.alias_info for each in schema.returns):
        return _NEW
    first, result = aliases[0] if aliases else None, schema.returns[0].alias_info if schema.returns else None
    if first is None or (result is None and not over_lists) or any(aliases[1:]) or len(schema.returns) > 1:
        return None
    if not first.is_write:
        return _VIEW if func.is_view else None
    return _WRITTEN if func.overloadpacket.__name__.endswith("_") else None


def _looks(item: Any, tensors: list[FakeTensor], written: bool) -> Iterator[Any]:
    """What of an argument decides. Numbers do not where a tensor is `written`, which stays as it is, or results look like what is read."""
    kind = type(item)
    if kind is FakeTensor:
        shape, stride = tuple(item.shape), item.stride()
        if item.fake_mode.shape_env is not None:  # storages may be of symbolic sizes where shapes are not
            raise _UnlikeError
        if not _is_plain(item) or not all(type(extent) is int for extent in (*shape, *stride, item.storage_offset())):
            raise _UnlikeError
        tensors.append(item)
        yield next(index for index, each in enumerate(tensors) if each is item)
        yield item.dtype, item.fake_device, shape, stride
    elif kind is tuple or kind is list:
        yield len(item)
        for each in item:
            yield from _looks(each, tensors, written)
    elif kind in _SIMPLE:
        yield kind
        if not written or (kind is not float and kind is not complex):
            yield item
    else:
        raise _UnlikeError


def _is_plain(tensor: FakeTensor) -> bool:
    return tensor.layout is torch.strided and not tensor.is_conj() and not tensor.is_neg()


def _data(item: Any) -> Any:
    """An argument with what tensors hold in the place of their fakes."""
    if type(item) is FakeTensor:
        return item.constant
    return type(item)(map(_data, item)) if type(item) in (tuple, list) else item


def _lie_apart(tensors: list[FakeTensor]) -> bool:
    different = {id(each): each for each in tensors}.values()
    return len(set(map(address, different))) == len(different)


def _said(out: Any, kind: str, given: list[FakeTensor], known_data: bool) -> Any:
    """What to remember of an answer; None where more than looks counts."""
    pieces = given if kind is _WRITTEN else pieces_of(out)
    if any((piece.constant is None) is known_data for piece in pieces if type(piece) is FakeTensor) or (known_data and kind is _VIEW):
        return None
    if kind is _WRITTEN:
        return True if out is given[0] or out is None else None
    if any(type(piece) is not FakeTensor or not _is_plain(piece) or piece.fake_mode is not given[0].fake_mode for piece in pieces):
        return None
    if any(type(extent) is not int for piece in pieces for extent in (*piece.shape, *piece.stride(), piece.storage_offset())):
        return None
    layouts = [(tuple(piece.shape), piece.stride()) for piece in pieces]
    if kind is _VIEW:
        same = address(out) == address(given[0]) and out.dtype is given[0].dtype and out.fake_device == given[0].fake_device
        return (*layouts[0], out.storage_offset() - given[0].storage_offset()) if same else None
    with no_dispatch():
        dense = [torch.empty_strided(*layout, dtype=piece.dtype, device="meta") for layout, piece in zip(layouts, pieces, strict=True)]
    sizes = [(plain.untyped_storage().nbytes(), piece.untyped_storage().nbytes()) for plain, piece in zip(dense, pieces, strict=True)]
    apart = len({*map(address, pieces), *map(address, given)}) == len(pieces) + len({*map(address, given)})
    if not apart or any(one != two for one, two in sizes) or any(piece.storage_offset() for piece in pieces):
        return None
    return [(layout, piece.dtype, piece.fake_device) for layout, piece in zip(layouts, pieces, strict=True)]


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
    return _put_right(func, out, tensors_in((*args, *kwargs.values())), ask, symbols)


def _asked(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], symbols: Symbols) -> Any:
    """What the fake kernel says; where it takes no symbolic sizes, or takes them for numbers, what it says at several points.

    Raises what it raises.
    """
    try:
        run = kernel(func, args, kwargs)

        def ask(*args: Any, **kwargs: Any) -> Any:
            mode = next((each.fake_mode for each in tensors_in((*args, *kwargs.values())) if isinstance(each, FakeTensor)), None)
            if mode is None or len(func._schema.returns) < 2:
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
    """Have fake kernels run: of several results torch remembers the looks, but not which were one tensor; and it holds given storages."""
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
    return _structured(func, right)


def _structured(func: OpOverload, pieces: Sequence[torch.Tensor]) -> Any:
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
