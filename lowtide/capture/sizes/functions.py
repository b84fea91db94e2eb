"""Functions that take numbers alone, called with symbolic sizes: `math.sqrt(x.shape[1])`, `torch.linspace(0, 1, x.shape[1])`.

While a capture lasts, on its thread, what they compute is recorded of the size. `len()` and `range()` cannot be among them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _get_current_dispatch_mode, _pop_mode_temporarily

from lowtide.capture.care.turns import replaced
from lowtide.capture.sizes.numbers import fractions_noted, function_of_size
from lowtide.capture.sizes.symbols import is_symbolic
from lowtide.ir.operators.names import MATH_FUNCTIONS

_ATEN = torch.ops.aten
_SYMBOLIC = (torch.SymInt, torch.SymFloat)
_OTHERS = {"ceil", "floor", "pow", "fabs"}  # which torch has for sizes, or which take two numbers
_Function = Callable[..., Any]


@contextmanager
def called_with_sizes() -> Iterator[None]:
    """While this lasts, they follow sizes."""
    with ExitStack() as stack:
        stack.enter_context(fractions_noted())
        for name in sorted(MATH_FUNCTIONS - _OTHERS):
            stack.enter_context(replaced(math, name, partial(function_of_size, name)))
        for owner, name, of in (
            (torch, "tensor", _tensor),
            (torch, "linspace", partial(_spaced, _ATEN.linspace.default)),
            (torch, "logspace", partial(_spaced, _ATEN.logspace.default)),
        ):
            stack.enter_context(replaced(owner, name, of))
        yield


def _tensor(plain: _Function) -> _Function:
    def tensor(data: Any, *, dtype: torch.dtype | None = None, **settings: Any) -> torch.Tensor:
        items = data if isinstance(data, (list, tuple)) else (data,)
        if not any(isinstance(each, _SYMBOLIC) for each in items):
            return plain(data, dtype=dtype, **settings)  # type: ignore[no-any-return]
        whole = all(is_symbolic(each) or isinstance(each, int) for each in items)
        made = [torch.full((), each, dtype=dtype or (torch.int64 if whole else torch.get_default_dtype()), **settings) for each in items]
        return made[0] if items is not data else torch.stack(made)

    return tensor


def _spaced(op: OpOverload, plain: _Function) -> _Function:
    def spaced(start: Any, end: Any, steps: Any, *base: Any, **settings: Any) -> torch.Tensor:
        known = settings.keys() <= {"dtype", "device", "base"} and not any(isinstance(each, torch.Tensor) for each in (start, end))
        if not is_symbolic(steps) or not known or _get_current_dispatch_mode() is None:
            return plain(start, end, steps, *base, **settings)  # type: ignore[no-any-return]
        base = (*base, *([settings.pop("base")] if "base" in settings else []))
        settings["device"] = torch.device(settings.get("device") or torch.get_default_device())
        with _pop_mode_temporarily() as recorder:  # the operator itself takes a number: it is recorded without being called
            return recorder.__torch_dispatch__(op, (), (start, end, steps, *base), {**settings, "pin_memory": False})  # type: ignore[no-any-return]

    return spaced
