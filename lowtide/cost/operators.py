"""Operators and what else torch calls by name, from text that may come from anywhere."""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib import import_module
from typing import Any

import torch
from torch._ops import OpOverload

from lowtide.errors import FormatError
from lowtide.ir.graph import Arg, Atom, Value
from lowtide.kernels.apart import apart, origin

_OPERATOR = re.compile(r"[A-Za-z_]\w*(\.[A-Za-z_]\w*){2}", re.ASCII)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*", re.ASCII)


def operator(name: str) -> OpOverload:
    """The operator "aten.add.Tensor". Raises FormatError for what is no such name, or names nothing that this torch has."""
    if not _OPERATOR.fullmatch(name):
        raise FormatError(f"expected an operator's name such as 'aten.add.Tensor', got {name!r}")
    namespace, base, overload = name.split(".")
    if namespace == "lowtide":
        import_module("lowtide.kernels.operators")  # which defines them
    if (source := origin(name)) is not None:
        apart(operator(source[0]), source[1])
    try:
        resolved: OpOverload = getattr(getattr(getattr(torch.ops, namespace), base), overload)
    except AttributeError as error:
        raise FormatError(f"expected an operator of torch {torch.__version__}, got {name!r}: import the library that defines it") from error
    return resolved


def of_torch(name: str) -> Any:
    """`torch.float32` and the like, by name. Raises FormatError for what is no such name."""
    if not _IDENTIFIER.fullmatch(name):
        raise FormatError(f"expected a name such as 'float32', got {name!r}")
    try:
        return getattr(torch, name)
    except AttributeError as error:
        raise FormatError(f"expected a dtype, layout or memory format of torch {torch.__version__}, got {name!r}") from error


def atom(kind: str, name: str) -> Any:
    """An argument that only torch can spell. Raises FormatError for what is none."""
    return torch.device(name) if kind == "device" else of_torch(name)


def argument(arg: Arg, values: Mapping[Value, Any]) -> Any:
    """What torch is called with for a graph's argument, of what stands for values. Raises FormatError."""
    if isinstance(arg, Value):
        return values[arg]
    if isinstance(arg, tuple):
        return [argument(each, values) for each in arg]
    return atom(arg.kind, arg.name) if isinstance(arg, Atom) else arg


def dtype_name(dtype: torch.dtype) -> str:
    """ "float32" for torch.float32."""
    return str(dtype).removeprefix("torch.")
