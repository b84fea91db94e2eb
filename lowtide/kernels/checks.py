"""What a program checks of what only the running step knows."""

from __future__ import annotations

import builtins

import torch

from lowtide.kernels.library import LIBRARY, define


def require(flag: torch.Tensor, expected: bool, error: str, text: str) -> None:
    """Raise an exception of Python's own with this text unless a flag is as expected."""
    if bool(flag.item()) is expected:
        return
    kind = getattr(builtins, error, None)
    raise (kind if isinstance(kind, type) and issubclass(kind, Exception) else RuntimeError)(text)


def _require(flag: torch.Tensor, expected: bool, error: str, text: str) -> None:
    """Of a flag that is not known nothing can be said."""


define("require(Tensor flag, bool expected, str error, str text) -> ()", require)
torch.library.register_fake("lowtide::require", _require, lib=LIBRARY)
