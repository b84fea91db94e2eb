"""Memory that was freed, given back to the system: the C library keeps it otherwise, for what may come."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any


def give_back() -> None:
    """Give back what is free. Takes about a millisecond; does nothing where the C library knows no such thing."""
    trim = _trim()
    if trim is not None:
        trim(0)


@cache
def _trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim  # of glibc
    except (OSError, TypeError, AttributeError):
        return None
