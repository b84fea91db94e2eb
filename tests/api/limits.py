"""The smallest peak of a step."""

from __future__ import annotations

from collections.abc import Callable

from lowtide.errors import BudgetError


def smallest_peak(optimized: Callable[[int], object], memory_bytes: int = 1) -> int:
    """What the error names where `optimized(memory_bytes)` is refused after a search; the first refusal, of the impossible, is without."""
    try:
        optimized(memory_bytes)
    except BudgetError as error:
        return error.smallest_peak_bytes if error.searched else smallest_peak(optimized, error.smallest_peak_bytes)
    return memory_bytes
