"""Functions that torch.compile leaves as they are, without importing what it consists of before anybody compiles."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch

P = ParamSpec("P")
T = TypeVar("T")


def undisturbed(function: Callable[P, T]) -> Callable[P, T]:
    """The function, neither traced nor compiled where a compiled one calls it: a program is a program already."""
    disabled: list[Callable[P, T]] = []

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        if "torch._dynamo" not in sys.modules:
            return function(*args, **kwargs)
        if not disabled:
            disabled.append(torch.compiler.disable(function))
        return disabled[0](*args, **kwargs)

    return called
