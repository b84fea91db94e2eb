"""What people read: sizes, times and operators in words, and warnings that name the user's own line."""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path

_UNITS = (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10))


def bytes_text(nbytes: int) -> str:
    """A size for people: "12.34 MiB"; exact below a KiB. KiB = 2^10, MiB = 2^20, GiB = 2^30 bytes."""
    for unit, size in _UNITS:
        if nbytes >= size:
            return f"{nbytes / size:.2f} {unit}"
    return f"{nbytes} B"


def time_text(us: float) -> str:
    """A time for people: "3.10 ms"."""
    return f"{us / 1e6:.2f} s" if us >= 1e6 else f"{us / 1e3:.2f} ms" if us >= 100 else f"{us:.1f} us"


def op_text(op: str) -> str:
    """An operator without its namespace and overload: "gelu" of "aten.gelu.default"."""
    return op.split(".")[1] if op.count(".") == 2 else op


def less_text(nbytes: int, before_bytes: int) -> str:
    """How much less that is than it was: "12.5% less", or more; nothing beside nothing."""
    share = 1 - nbytes / before_bytes if before_bytes else 0.0
    return "" if not before_bytes else f"{share:.1%} less" if share >= 0 else f"{-share:.1%} more"


_PASSED_OVER = (str(Path(__file__).parents[1]), contextlib.__file__)


def warn(sentence: str, category: type[Warning] = UserWarning) -> None:
    """`warnings.warn`, at the first caller that is no file of the package's, whose context managers lie between."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PASSED_OVER):
        frame, level = frame.f_back, level + 1
    warnings.warn(sentence, category, stacklevel=level)
