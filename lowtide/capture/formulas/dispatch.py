"""Stands before chosen operators of ATen while a capture runs on this thread.

ATen asks in places whether a dispatch mode is active (`isTensorSubclassLike`, `_may_require_fw_or_bw_grad`) and then computes the same
mathematics by other operators, with other last bits. A capture is such a mode. So the operators that ask have a kernel of lowtide's at a
dispatch key that torch keeps for wrappers of all operators and does not use itself. The key is looked at only where it is switched on,
for the thread that captures: others never come here. It stands before autograd and before composite operators are taken
apart, so calls from within C++ come here, too.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any, TypeVar

import torch
from torch._ops import OpOverload

from lowtide.capture.control import take_called

_NAME = "TESTING_ONLY_GenericMode"
_KEY = torch._C._parse_dispatch_key(_NAME) or torch._C.DispatchKey.Undefined
_KEYS = torch._C.DispatchKeySet(_KEY)
_absent: ContextVar[tuple[int, int] | None] = ContextVar("absent", default=None)
_EVERY_OPERATOR = torch.library.Library("_", "IMPL")  # held for as long as the process lives
_EVERY_OPERATOR.fallback(torch.library.fallthrough_kernel, _NAME)
_LIBRARIES: dict[OpOverload | None, torch.library.Library] = {None: _EVERY_OPERATOR}

F = TypeVar("F", bound=Callable[..., Any])


@contextmanager
def as_eager() -> Iterator[None]:
    """What runs inside, on this thread, computes by the formulas of this room."""
    take_called(_KEY)
    with torch._C._IncludeDispatchKeyGuard(_KEY):
        yield


@contextmanager
def as_aten() -> Iterator[None]:
    """What runs inside computes by ATen's own formulas again."""
    with torch._C._ExcludeDispatchKeyGuard(_KEYS):
        yield


@contextmanager
def calling_formulas() -> Iterator[None]:
    """What runs inside, within a formula, computes by formulas again, as what an operator without one calls does."""
    with torch._C._SetExcludeDispatchKeyGuard(_KEY, False):
        yield


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


def has_formula(op: OpOverload) -> bool:
    """Whether something stands before it already."""
    return op in _LIBRARIES


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
