"""Functions that torch.compile leaves as they are, without importing what it consists of before anybody compiles."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
from torch._C._dynamo.eval_frame import get_eval_frame_callback
from torch.compiler import is_dynamo_compiling

P = ParamSpec("P")
T = TypeVar("T")


def undisturbed(function: Callable[P, T]) -> Callable[P, T]:
    """The function, neither traced nor compiled where a compiled one calls it: a program is a program already."""
    disabled: Callable[P, T] | None = None

    @wraps(function)
    def called(*args: P.args, **kwargs: P.kwargs) -> T:
        nonlocal disabled
        if "torch._dynamo" not in sys.modules or (not is_dynamo_compiling() and get_eval_frame_callback() is None):
            return function(*args, **kwargs)  # nobody compiles: to switch that off takes longer than to look
        if disabled is None:
            disabled = torch.compiler.disable(function)
        return disabled(*args, **kwargs)

    return called
