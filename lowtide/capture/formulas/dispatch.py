"""Stands before chosen operators of ATen while a capture runs on this thread, and sees what autocast does beneath them.

ATen asks in places whether a dispatch mode is active (`isTensorSubclassLike`, `_may_require_fw_or_bw_grad`) and then computes the same
mathematics by other operators, with other last bits. A capture is such a mode. So the operators that ask have a kernel of lowtide's at a
dispatch key that torch keeps for wrappers of all operators and does not use itself. The key is looked at only where it is switched on,
for the thread that captures: others never come here. It stands before autograd and before composite operators are taken
apart, so calls from within C++ come here, too.

Autocast casts what operators' own kernels call, and lets the operator itself pass. Such a kernel is written in operators, for every device
alike. Where autocast changes what it calls, the calls are recorded in place of the operator. Whether it does is asked of the kernel itself,
on fakes, so that no list can fall behind. A dispatch mode cannot see whether autocast is on, as all above it is switched off there; so that
is noted on the way to it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode, _disable_current_modes

from lowtide.capture.calls import tensors_in
from lowtide.capture.care.turns import during
from lowtide.capture.control import take_called

_NAME = "TESTING_ONLY_GenericMode"
_KEY = torch._C._parse_dispatch_key(_NAME) or torch._C.DispatchKey.Undefined
_KEYS = torch._C.DispatchKeySet(_KEY)
_absent: ContextVar[tuple[int, int] | None] = ContextVar("absent", default=None)
_EVERY_OPERATOR = torch.library.Library("_", "IMPL")  # held for as long as the process lives
_has_kernel = torch._C._dispatch_has_kernel_for_dispatch_key
_KERNELS = ("CompositeExplicitAutograd", "CompositeExplicitAutogradNonFunctional")
_THESE_TOO = {"aten::_safe_softmax", "aten::mvlgamma", "aten::trace"}  # beside kernels for nested tensors or for a CPU; look at no memory
_OTHERS = ("CPU", "CUDA", "AutocastCPU", "AutocastCUDA", "SparseCPU", "NestedTensorCPU")
_under_autocast: ContextVar[OpOverload | None] = ContextVar("under_autocast", default=None)  # the operator that was called so
_known: dict[tuple[Any, ...], bool] = {}  # whether autocast changes a call, by operator, device and what else decides
_EVERY_OPERATOR.fallback(torch.library.fallthrough_kernel, _NAME)
_LIBRARIES: dict[OpOverload | None, torch.library.Library] = {None: _EVERY_OPERATOR}

F = TypeVar("F", bound=Callable[..., Any])


@contextmanager
def as_eager() -> Iterator[None]:
    """What runs inside, on this thread, computes by the formulas of this room."""
    take_called(_KEY)
    with torch._C._IncludeDispatchKeyGuard(_KEY):
        yield


def as_aten() -> AbstractContextManager[None]:
    """What runs inside computes by ATen's own formulas again."""
    return torch._C._ExcludeDispatchKeyGuard(_KEYS)


def calling_formulas() -> AbstractContextManager[None]:
    """What runs inside, within a formula, computes by formulas again, as what an operator without one calls does."""
    return torch._C._SetExcludeDispatchKeyGuard(_KEY, False)


@contextmanager
def as_on_absent(capability: tuple[int, int], kernels: Mapping[OpOverload, Callable[..., Any]]) -> Iterator[None]:
    """While this lasts, formulas on a GPU answer for one of this capability, which is not here, and which ATen would ask.

    `kernels` are formulas of that time alone: at all others such an operator calls others that have formulas.
    """
    token, library = _absent.set(capability), torch.library.Library("aten", "IMPL")
    try:
        for op, kernel in kernels.items():
            library.impl(op, functools.partial(_called, kernel, op), _NAME)
        yield
    finally:
        library._destroy()
        _absent.reset(token)


def computing_device(device: torch.device) -> torch.device:
    """Where what a program decides by is computed while it is captured: on the host in the place of a GPU that is not here."""
    return torch.device("cpu") if device.type == "cuda" and _absent.get() is not None else device


def absent_capability(tensor: torch.Tensor) -> tuple[int, int] | None:
    """That of the GPU on which a fake tensor is said to lie, where it is not here."""
    return _absent.get() if tensor.device.type == "cuda" else None


def taken_apart(op: OpOverload, *args: Any) -> Any:
    """What a composite operator does, within its formula."""
    with calling_formulas():
        return op._op_dk(torch._C.DispatchKey.CompositeImplicitAutograd, *args)


def formula(*ops: OpOverload) -> Callable[[F], F]:
    """Registers a function `(op, *args, **kwargs)` as what `ops` do under `as_eager`; within it they do what they always do."""

    def register(kernel: F) -> F:
        for op in ops:
            library = _LIBRARIES[op] = torch.library.Library(op.namespace, "IMPL")
            library.impl(op, functools.partial(_called, kernel, op), _NAME)
        return kernel

    return register


def _called(kernel: Callable[..., Any], op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    with as_aten():
        return kernel(op, *args, **kwargs)


class FormulaFunction(torch.autograd.Function):
    """An operator with eager's gradient."""

    @classmethod
    def of(cls, *args: Any) -> torch.Tensor:
        result: torch.Tensor = cls.apply(*args)  # type: ignore[no-untyped-call]
        return result


def wants_gradient(*tensors: Any) -> bool:
    """Whether autograd will ask for the gradient of one of these. Under torch.func's transforms ATen asks nothing else than in eager."""
    if not torch.is_grad_enabled() or torch._C._are_functorch_transforms_active():
        return False
    return any(isinstance(item, torch.Tensor) and item.requires_grad for item in tensors)


def _operators() -> Iterator[OpOverload]:
    """Those that every device computes by other operators, and those that a GPU does."""
    for name in sorted(_THESE_TOO.union(*map(torch._C._dispatch_get_registrations_for_dispatch_key, _KERNELS))):
        space, _, full = name.partition("::")
        base, _, overload = full.partition(".")
        if space != "aten" or (name not in _THESE_TOO and any(_has_kernel(name, key) for key in _OTHERS)):
            continue
        op = getattr(getattr(torch.ops.aten, base, None), overload or "default", None)
        if op is not None and op not in _LIBRARIES and _computes(op):
            yield op


def _computes(op: OpOverload) -> bool:
    """Whether it makes tensors of tensors, and of nothing that a kernel in Python cannot be handed."""
    types = [str(argument.type) for argument in op._schema.arguments]
    if op._schema.is_mutable or op.is_view or torch.Tag.nondeterministic_seeded in op.tags:
        return False
    handed = any("Tensor" in each for each in types) and not any("Storage" in each or "Generator" in each for each in types)
    return handed and any("Tensor" in str(each.type) for each in op._schema.returns)


@formula(*_operators())
def _noted(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    if not torch._C._is_any_autocast_enabled():
        return op(*args, **kwargs)
    with during(_under_autocast, op):
        return op(*args, **kwargs)


def calls_within(func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], tensors: list[torch.Tensor]) -> Callable[[], Any] | None:
    """What calls the others in place of the operator, from within a dispatch mode, where autocast is on and changes them."""
    if _under_autocast.get() is not func or not tensors:
        return None
    kind = tensors[0].device.type
    key = next((key for key in _KERNELS if _has_kernel(func.name(), key)), "CUDA")
    if key == "CUDA" != kind.upper():
        return None
    autograd, autocast = torch._C.DispatchKey.AutogradFunctionality, getattr(torch._C.DispatchKey, f"Autocast{kind.upper()}")

    def kernel() -> Any:
        # where autograd is passed by, composite operators would come here whole
        with during(_under_autocast, None), torch.no_grad(), torch._C._SetExcludeDispatchKeyGuard(autograd, False):
            return func._op_dk(getattr(torch._C.DispatchKey, key), *args, **kwargs)

    def cast() -> Any:
        with torch._C._SetExcludeDispatchKeyGuard(autocast, False):
            return kernel()

    call = (func, kind, torch.get_autocast_dtype(kind), *(tensor.dtype for tensor in tensors))
    if call not in _known:
        try:
            _known[call] = _calls_of(cast) != _calls_of(kernel)
        except Exception:  # a call that fails does so where it is recorded, too
            return None
    return cast if _known[call] else None


def before_autocast(op: OpOverload, *args: Any) -> tuple[Any, ...]:
    """The arguments as autocast hands them to an operator that it runs in full precision; the same ones where it casts none.

    What it does with an operator is another matter on each device: on some it tells the operator of what dtype its result is to be.
    """
    given = next(item for item in args if isinstance(item, torch.Tensor))
    kind = given.device.type
    listed = _has_kernel(op.name(), f"Autocast{kind.upper()}")
    if not listed or not torch.is_autocast_enabled(kind) or not any(map(_is_low, args)):
        return args
    if (call := (op, kind, given.dim())) not in _known:
        with _disable_current_modes(), FakeTensorMode(), torch.no_grad():
            alike = [
                torch.empty([1] * item.dim(), dtype=item.dtype, device=kind) if isinstance(item, torch.Tensor) else item for item in args
            ]
            _known[call] = "aten::_to_copy" in names_called(lambda: op(*alike))
    return tuple(item.to(torch.float32) if _known[call] and _is_low(item) else item for item in args)


def _is_low(item: Any) -> bool:
    return isinstance(item, torch.Tensor) and item.dtype in (torch.float16, torch.bfloat16)


def names_called(kernel: Callable[[], Any]) -> list[str]:
    """The operators that it calls beneath autograd, by name."""
    return [name for name, _ in _calls_of(kernel)]


def _calls_of(kernel: Callable[[], Any]) -> list[tuple[str, list[torch.dtype]]]:
    calls = _Calls()
    with calls:
        kernel()
    return calls.entries


class _Calls(TorchDispatchMode):
    """Takes down what is called, and of what dtypes the results are."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.entries: list[tuple[str, list[torch.dtype]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.namespace != "prim":  # questions, which autocast asks as well: `prim::device` of a fake
            self.entries.append((func.name(), [tensor.dtype for tensor in tensors_in((out,))]))
        return out
