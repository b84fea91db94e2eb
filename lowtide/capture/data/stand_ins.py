"""Operators of torch's own for which there are other kernels while a program is recorded, however the program comes to them.

A function that is an operator may be called by name, as a method, or by an object that was taken from torch long before: replacing names
would miss some of these. So the dispatcher is told, for as long as any program is recorded; calls on the tensors of nobody who
records go on to torch's own kernel.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

# Takes torch's own kernel and the operator's arguments; those at the end that are the schema's defaults may be left out.
Kernel: TypeAlias = Callable[..., Any]

_KEYS = ("AutogradCPU", "AutogradCUDA")  # above what these operators are made of, which autograd has to see
_lock = threading.Lock()
_recording: dict[int, Mapping[OpOverload, Kernel]] = {}  # by the identity of the mode whose tensors are meant
_libraries: list[torch.library.Library] = []  # one while anything is recorded


@contextmanager
def standing_in(mode: FakeTensorMode, kernels: Mapping[OpOverload, Kernel]) -> Iterator[None]:
    """While this lasts, `kernels` are the operators' on tensors of `mode`. May be entered again within itself."""
    with _lock:
        before = _recording.get(id(mode))
        _recording[id(mode)] = kernels
        if not _libraries:
            _libraries.append(_registered(kernels))
    try:
        yield
    finally:
        with _lock:
            del _recording[id(mode)]
            if before is not None:
                _recording[id(mode)] = before
            if not _recording:
                _libraries.pop()._destroy()


def _registered(ops: Mapping[OpOverload, Kernel]) -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    for op in ops:
        for key in _KEYS:
            library.impl(op, partial(_run, op), key)
    return library


def _run(op: OpOverload, *args: Any, **kwargs: Any) -> Any:
    """The kernel of whoever records the tensors that are given; torch's own where nobody does."""
    own = partial(op._op_dk, torch._C.DispatchKey.CompositeImplicitAutograd)
    modes = (id(arg.fake_mode) for arg in (*args, *kwargs.values()) if isinstance(arg, FakeTensor))
    kernels = next((_recording[mode] for mode in modes if mode in _recording), None)
    return own(*args, **kwargs) if kernels is None else kernels[op](own, *args, **kwargs)
