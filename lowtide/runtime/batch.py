"""What a batch must look like, seen in some microseconds where it does, and the messages for one that does not.

Its tensors are plain: dense numbers in memory of their own kind, with nothing of torch's between them and their reader. Programs run
beneath autograd and kernels read addresses, so that what torch puts around tensors elsewhere would go unseen.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, reduce
from operator import or_
from typing import Any, NoReturn, TypeAlias

import numpy as np
import torch
from torch import is_grad_enabled
from torch._C import _dispatch_keys
from torch.autograd import forward_ad

from lowtide.errors import BatchError, CaptureError, FormatError
from lowtide.ir import tree
from lowtide.ir.result_specs import same_strides
from lowtide.ir.sizes import reach
from lowtide.runtime.caller import describe

_NO_MEMORY_OF_ITS_OWN = ("meta",)
_PARAMETERS = (torch.nn.Parameter,)
_TRANSFORM = "torch.vmap, torch.func.grad or the like"
_OUTSIDE = "call it outside, on a whole batch, or give torch.func the model itself"
_PLAIN_KEYS = ("CPU", "CUDA", "MPS", "XPU", "HPU", "MTIA", "PrivateUse1", "Meta", "ADInplaceOrView", "AutogradCPU", "AutogradOther")
_CASTS = ("AutocastCPU", "AutocastCUDA", "AutocastMPS", "AutocastXPU", "AutocastHPU", "AutocastMTIA", "AutocastPrivateUse1")
_OF_AUTOGRAD = ("ADInplaceOrView", "AutogradFunctionality")  # which tensors made in inference mode are without
_BY_KEY = (
    (("FuncTorchBatched", "FuncTorchGradWrapper"), f"a tensor within {_TRANSFORM}", _OUTSIDE),
    (("Functionalize",), "a tensor within torch.func.functionalize", _OUTSIDE),
    (("ZeroTensor",), "zeros without memory, as autograd makes them", "pass a clone"),
    (("Quantized",), "a quantized tensor", "pass it with .dequantize()"),
)


def _bits(names: Iterable[str]) -> int:
    """Dispatch keys as bits; none for what this torch does not have."""
    keys = torch._C.DispatchKey
    keysets = [getattr(keys, name) for name in names if hasattr(keys, name)]
    return reduce(or_, (torch._C.DispatchKeySet(key).raw_repr() for key in keysets), 0)


_PLAIN_BITS, BESIDE_AUTOGRAD = _bits((*_PLAIN_KEYS, *_CASTS)), ~_bits(_OF_AUTOGRAD)


# asked at each call, the smallest included: looking their names up takes as long as they do
_transforms, _tracing = torch._C._functorch.peek_interpreter_stack, torch._C._get_tracing_state
_modes = torch._C._len_torch_dispatch_stack


def dispatched(tensor: torch.Tensor) -> int:
    """A number that tells layout, device type, laziness and whatever torch puts around a tensor; not whether autograd looks."""
    return int(torch._C._dispatch_keys(tensor).raw_repr()) & BESIDE_AUTOGRAD


def unlike_plain(tensor: torch.Tensor) -> tuple[str, str] | None:
    """What a tensor is instead of a plain one, and what to do about it; None for a plain one."""
    keys = torch._C._dispatch_keys(tensor)
    for names, kind, remedy in _BY_KEY:
        if any(keys.has(getattr(torch._C.DispatchKey, name)) for name in names):
            return kind, remedy
    if tensor.is_nested or tensor.layout is not torch.strided:
        return (
            "a nested tensor" if tensor.is_nested else f"a tensor of layout {tensor.layout}"
        ), "pass it dense or padded, with a mask beside it"
    if tensor.is_conj() or tensor.is_neg():
        return "a lazy conjugate or negative view", "pass it with resolve_conj() and resolve_neg()"
    if type(tensor) is not torch.Tensor and type(tensor) not in _PARAMETERS:
        return f"a {type(tensor).__name__}", _remedy(tensor)
    if dispatched(tensor) & ~_PLAIN_BITS:
        return f"a tensor of {keys}", "pass a plain one"
    if forward_ad._current_level >= 0 and forward_ad.unpack_dual(tensor).tangent is not None:
        return "a dual tensor of forward differentiation", "pass its primal, or call the model itself"
    return _without_memory(tensor)


def is_differentiated(tensors: Iterable[torch.Tensor]) -> bool:
    """Whether somebody may wait for a derivative by one of them: eager PyTorch would make it."""
    if forward_ad._current_level >= 0:
        return True
    if is_grad_enabled():
        for tensor in tensors:  # asked at each call: `any` takes three times as long
            if tensor.requires_grad:
                return True
    return False


def refuse_surroundings() -> None:
    """Raise BatchError where torch puts something around every tensor that is made here."""
    if _transforms() is not None:
        raise BatchError(f"called within {_TRANSFORM}, which puts wrappers around what a program makes: {_OUTSIDE}")
    if _tracing() is not None:
        raise BatchError("called within torch.jit.trace, which would keep what a program makes as constants: trace the model itself")
    modes = torch._C._TorchDispatchModeKey
    if _modes() and any(map(torch._C._get_dispatch_mode, (modes.FAKE, modes.PROXY, modes.FUNCTIONAL))):
        raise BatchError("called within a FakeTensorMode or a tracer such as make_fx, where tensors have no numbers: call it outside")


def _remedy(tensor: torch.Tensor) -> str:
    """What to do about a tensor of a class of its own, whose methods and torch functions a program does not have."""
    if hasattr(tensor, "full_tensor"):
        return "pass it with .to_local() or .full_tensor()"
    if torch._C._dispatch_keys(tensor).has(torch._C.DispatchKey.Python):
        return "pass the plain tensor that it stands for"
    return "pass it with .as_subclass(torch.Tensor)"


def _without_memory(tensor: torch.Tensor) -> tuple[str, str] | None:
    if tensor.device.type in _NO_MEMORY_OF_ITS_OWN or not tensor.numel():
        return None
    if (tensor.storage_offset() + reach(tensor.shape, tensor.stride())) * tensor.element_size() > tensor.untyped_storage().nbytes():
        return "a tensor whose memory was let go", "pass one that has its numbers"
    return None


class TensorSpecs:
    """Of tensors on a CPU, each an argument by itself."""

    def __init__(self, each: Iterable[tuple[tuple[int, ...], tuple[int, ...], torch.dtype]]) -> None:
        """Of tensors with these shapes, strides and dtypes."""
        self._each = [
            (shape, stride, dtype, dispatched(torch.empty(0, dtype=dtype, device="cpu")), reach(shape, stride))
            for shape, stride, dtype in each
        ]

    def hold(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Whether these are arguments like them; False may also be said of what only looks alike to a longer look."""
        if kwargs or len(args) != len(self._each):
            return False
        for arg, (shape, stride, dtype, keys, least) in zip(args, self._each, strict=True):
            # what `dispatched` asks, without a call of it: this is a third of what a small frozen function takes
            if type(arg) is not torch.Tensor or _dispatch_keys(arg).raw_repr() & BESIDE_AUTOGRAD != keys:
                return False
            if arg.shape != shape or arg.dtype is not dtype:
                return False
            if arg.stride() != stride and not same_strides(shape, arg.stride(), stride):
                return False
            if arg.untyped_storage().nbytes() < (arg.storage_offset() + least) * arg.itemsize:  # its memory was let go
                return False
        return not is_differentiated(args)


# By tensor of a batch its shape and strides; behind them, where there are any, the places of what are no tensors.
BatchShape: TypeAlias = "tuple[tuple[tuple[int, ...], tuple[int, ...]] | tuple[str, ...], ...]"

_META = torch.device("meta")
_PLAIN = (type(None), bool, int, float, str)  # what a file holds of leaves that are no tensors
_MOST_EXTENT = 2**31
_LONGEST = 80  # letters of a value in one message
_OTHERWISE = (
    "make a tensor of what changes (torch.as_tensor)",
    "put a text that it reads into a dictionary or an attribute that loss leads to, before the step: each is captured once, and kept",
)
_MOST_NAMES = 12  # of leaves in one message
_DIFFERENTIATED = "is differentiated, and no derivative by the batch is made here: pass it detached, or call the model itself"


def shape_of(args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchShape:
    items = [*args, *kwargs.values()]
    if all(type(item) is torch.Tensor for item in items):
        return tuple((tuple(item.shape), item.stride()) for item in items)
    return _shape(tree.flatten((args, kwargs))[0])  # looking into what may be a structure takes longer


def _shape(leaves: Sequence[tree.Leaf]) -> BatchShape:
    shapes = [(tuple(leaf.value.shape), leaf.value.stride()) for leaf in leaves if isinstance(leaf.value, torch.Tensor)]
    others = tuple(leaf.where for leaf in leaves if not isinstance(leaf.value, torch.Tensor))
    return (*shapes, others) if others else tuple(shapes)


def described(shape: BatchShape) -> str:
    return f"a batch of {', '.join(str(list(each[0])) for each in shape if isinstance(each[0], tuple))}"


class NewShapeError(BatchError):
    """A batch that is unlike the captured one in nothing but shapes or strides, or in how many leaves it has that are no tensors."""

    def __init__(self, message: str, difference: str, shape: BatchShape, *, restructured: bool = False) -> None:
        super().__init__(message)
        self.difference, self.shape, self.restructured = difference, shape, restructured

    def beyond(self, extents: str) -> NewShapeError:
        """The same of a batch that lies out of a range of these extents."""
        difference = f"{self.difference}; the range is {extents}"
        if self.restructured:
            return self
        return NewShapeError(f"{difference}: declare a wider one, or see Shapes(on_new_shape=...)", difference, self.shape)


class OtherValueError(BatchError):
    """A batch that has another value in the place of one that is no tensor."""


@dataclass(frozen=True)
class BatchSpec:
    """The leaves of a batch as captured: for a tensor its shape, strides, dtype and device, for anything else the value itself."""

    leaves: tuple[tuple[str, Any], ...]
    training: bool = False  # whether batches come from a loader over a data set
    unread: frozenset[str] = frozenset()  # leaves that are no tensors, and may be any value of their types

    @classmethod
    def of(cls, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, training: bool = False) -> BatchSpec:
        """The specification of this batch; tensors on the meta device are taken to lie on `device`.

        Raises CaptureError for a tensor that is no plain one, BatchError within what torch puts around all tensors.
        """
        refuse_surroundings()
        specs = [(_name(leaf.where), _look(leaf.value, device)) for leaf in tree.flatten((args, kwargs))[0]]
        for where, spec in specs:
            if isinstance(spec, _NotPlain):
                raise CaptureError(f"batch {where} is {spec.kind}: plain dense tensors can be captured; {spec.remedy}")
        return cls(tuple(specs), training)

    @cached_property
    def specs(self) -> TensorSpecs | None:
        """By which a batch like it is recognised at once; None where not each leaf is a tensor on a CPU and an argument by itself."""
        tensors = [spec for _, spec in self.leaves if isinstance(spec, _TensorSpec) and spec.device.type == "cpu"]
        if [where for where, _ in self.leaves] != [f"[{at}]" for at in range(len(tensors))]:
            return None
        return TensorSpecs((spec.shape, spec.stride, spec.dtype) for spec in tensors)

    def is_tensor_like(self, leaf: int, dtype: str, shape: tuple[Any, ...], stride: tuple[Any, ...]) -> bool:
        spec = self.leaves[leaf][1]
        if not isinstance(spec, _TensorSpec) or (str(spec.dtype).removeprefix("torch."), spec.shape) != (dtype, shape):
            return False
        return same_strides(shape, spec.stride, stride)

    def made_up(self) -> list[Any]:
        """Leaves like these, on a CPU: tensors of zeros. What lies between their elements is not touched, and takes no memory."""
        return [_zeros(spec) if isinstance(spec, _TensorSpec) else spec for _, spec in self.leaves]

    def rows(self) -> list[Any]:
        """What a file keeps of it. Raises BatchError for a leaf that text cannot hold."""
        return [[where, _row(where, spec)] for where, spec in self.leaves]

    @classmethod
    def from_rows(cls, rows: Any) -> BatchSpec:
        """What `rows` has written. Raises FormatError for what cannot be one."""
        if not isinstance(rows, list) or not all(isinstance(row, list) and len(row) == 2 and isinstance(row[0], str) for row in rows):
            raise FormatError("expected a batch as a list of [where, what]")
        return cls(tuple((where, _from_row(row)) for where, row in rows))

    def leaves_of(self, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device = _META) -> Sequence[Any]:
        """The leaves of another batch like it; tensors on the meta device are taken to lie on `device`.

        Raises BatchError that says which argument is unlike, what was expected and what came.
        """
        refuse_surroundings()
        specs = self.specs
        if specs is not None and specs.hold(args, kwargs) and not (self.training and any(arg.requires_grad for arg in args)):
            return args
        leaves, _ = tree.flatten((args, kwargs))
        names = [_name(leaf.where) for leaf in leaves]
        expected = [where for where, _ in self.leaves]
        if names != expected:
            difference, at = _other_structure(expected, names), [leaf.where for leaf in leaves if isinstance(leaf.value, torch.Tensor)]
            if [where for where, spec in self.leaves if isinstance(spec, (_TensorSpec, _NotPlain))] == list(map(_name, at)):
                raise NewShapeError(difference, difference, _shape(leaves), restructured=True)
            raise BatchError(difference)
        items = [leaf.value for leaf in leaves]
        pairs = zip(self.leaves, items, strict=True)
        reshaped = [where for (where, wanted), item in pairs if not self._is_alike(where, wanted, item, device)]
        if reshaped:
            self._refuse_shape(reshaped[0], leaves)
        return items

    def other_values(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
        """The leaves of a batch like it that have other values than tensors in their places, by where they stand in (args, kwargs)."""
        pairs = zip(self.leaves, tree.flatten((args, kwargs))[0], strict=True)
        return {
            leaf.where: leaf.value for (_, wanted), leaf in pairs if type(leaf.value) is type(wanted) and not _equal(leaf.value, wanted)
        }

    def with_unread(self, where: Iterable[str]) -> BatchSpec:
        """The same where these, too, may be any values of their types."""
        return replace(self, unread=self.unread.union(map(_name, where)))

    def unread_in(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> set[str]:
        """Where in (args, kwargs) leaves stand that may be any values."""
        return {leaf.where for leaf in tree.flatten((args, kwargs))[0] if _name(leaf.where) in self.unread}

    def _refuse_shape(self, where: str, leaves: Sequence[tree.Leaf]) -> NoReturn:
        wanted, got = next((spec, leaf.value) for (name, spec), leaf in zip(self.leaves, leaves, strict=True) if name == where)
        spec = _look(got, _META)
        difference = f"batch {where}: expected {wanted}, got {spec}"
        raise NewShapeError(difference + _advice(spec, wanted, self.training), difference, _shape(leaves))

    def _is_alike(self, where: str, wanted: Any, got: Any, device: torch.device) -> bool:
        """False where a tensor has another shape or other strides. Raises BatchError for what differs otherwise."""
        spec = _look(got, device)
        if not isinstance(wanted, _TensorSpec):
            if where in self.unread and type(got) is type(wanted):
                return True
            if isinstance(got, torch.Tensor) or type(got) is not type(wanted) or not _equal(got, wanted):
                kind = "another" if _in_words(got) == _in_words(wanted) else _in_words(got)
                raise OtherValueError(
                    f"batch {where}: the step was captured with {_in_words(wanted)}, got {kind}; values that are not tensors are fixed at "
                    f"capture: leave out of the batch what the program does not read, and {_OTHERWISE[isinstance(wanted, str)]}"
                )
        elif not isinstance(got, torch.Tensor):
            raise BatchError(f"batch {where}: expected {wanted}, got a {type(got).__name__}")
        elif got.requires_grad and isinstance(spec, _TensorSpec) and (self.training or torch.is_grad_enabled()):
            raise BatchError(f"batch {where} {_DIFFERENTIATED}")
        elif not wanted.is_like(spec):
            if isinstance(spec, _TensorSpec) and (spec.dtype, spec.device) == (wanted.dtype, wanted.device):
                return False
            raise BatchError(f"batch {where}: expected {wanted}, got {spec}{_advice(spec, wanted, self.training)}")
        return True


@dataclass(frozen=True)
class _NotPlain:
    """The look of a tensor that is no dense one."""

    kind: str
    remedy: str

    def __str__(self) -> str:
        return self.kind


@dataclass(frozen=True)
class _TensorSpec:
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    def is_like(self, other: Any) -> bool:
        """Whether a leaf can stand for one that looks so: strides that mean nothing may differ."""
        if not isinstance(other, _TensorSpec) or (self.shape, self.dtype, self.device) != (other.shape, other.dtype, other.device):
            return False
        return same_strides(self.shape, self.stride, other.stride)

    def __str__(self) -> str:
        return describe(self.shape, self.stride, self.dtype, self.device)


def _zeros(spec: _TensorSpec) -> torch.Tensor:
    return torch.as_strided(torch.empty(reach(spec.shape, spec.stride), dtype=spec.dtype, device="cpu"), spec.shape, spec.stride).zero_()


def _row(where: str, spec: Any) -> dict[str, Any]:
    if isinstance(spec, _TensorSpec):
        return {"dtype": str(spec.dtype).removeprefix("torch."), "shape": list(spec.shape), "stride": list(spec.stride)}
    if type(spec) not in _PLAIN:
        raise BatchError(f"batch {where}: expected tensors, numbers, texts and None, which a file can hold, got a {type(spec).__name__}")
    return {"value": spec}


def _from_row(row: Any) -> Any:
    match row:
        case {"value": value, **more} if not more and type(value) in _PLAIN:
            return value
        case {"dtype": str(name), "shape": list(shape), "stride": list(stride), **more} if not more:
            dtype = getattr(torch, name, None)
            sizes = all(type(size) is int and 0 <= size < _MOST_EXTENT for size in (*shape, *stride))
            if isinstance(dtype, torch.dtype) and sizes and len(shape) == len(stride):
                return _TensorSpec(tuple(shape), tuple(stride), dtype, torch.device("cpu"))
    raise FormatError(f"expected a leaf of a batch as dtype, shape and stride, or as a value, got {str(row)[:80]}")


def _look(item: Any, device: torch.device) -> Any:
    if not isinstance(item, torch.Tensor):
        return item
    if unlike := unlike_plain(item):
        return _NotPlain(*unlike)
    return _TensorSpec(tuple(item.shape), item.stride(), item.dtype, device if item.device.type == "meta" else item.device)


def _other_structure(expected: list[str], theirs: list[str]) -> str:
    """Which leaf is missing or too much, and what was expected and found."""
    missing, new = [where for where in expected if where not in theirs], [where for where in theirs if where not in expected]
    differences = [f"{', '.join(_some(names))} {what}" for names, what in ((missing, "is missing"), (new, "was not there")) if names]
    wanted, got = ", ".join(_some(expected)) or "nothing", ", ".join(_some(theirs)) or "nothing"
    return f"{'; '.join(differences) or 'another order'}: expected a batch of {wanted}; got {got}"


def _some(names: list[str]) -> list[str]:
    return names if len(names) <= _MOST_NAMES else [*names[:_MOST_NAMES], f"and {len(names) - _MOST_NAMES} more"]


def _in_words(item: Any) -> str:
    """A leaf that is no tensor, in a sentence: of an array its look alone."""
    if isinstance(item, np.ndarray):
        return f"a NumPy array of {item.dtype}{list(item.shape)}"
    text = repr(item)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _equal(one: Any, two: Any) -> bool:
    """Whether two values are one; arrays compare element by element."""
    try:
        return one is two or bool(np.array_equal(one, two) if isinstance(one, np.ndarray) else one == two)
    except Exception:  # of a class of the caller's own, whose comparison is no truth value
        return False


def _advice(spec: _TensorSpec | _NotPlain, wanted: _TensorSpec, training: bool) -> str:
    """What helps against the usual differences."""
    if isinstance(spec, _NotPlain):
        return f"; {spec.remedy}"
    if spec.device != wanted.device:
        return f"; move it with .to({str(wanted.device)!r})"
    if spec.dtype != wanted.dtype:
        return f"; convert it with .to({wanted.dtype}), or call lowtide.optimize again if the model has another dtype now"
    if spec.shape == wanted.shape:
        return "; copy it with .contiguous()" if wanted.stride == torch.empty(wanted.shape, device="meta").stride() else ""
    if spec.shape[1:] == wanted.shape[1:]:
        size = wanted.shape[0] if wanted.shape else 1
        loader = "; a loader with drop_last=True gives batches of one size"
        return loader if training else f"; pad or cut it to {size} rows, or optimize the model for this size too"
    return ""


def _name(where: str) -> str:
    """ "[0][1]['x']" is the path within (args, kwargs): argument 1, its item 'x'. "[1]['x']" is the keyword argument x."""
    return where.removeprefix("[0]") if where.startswith("[0]") else where.removeprefix("[1]")
