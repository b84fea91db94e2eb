"""ortools, which most solvers here need: asked for when one runs, as few callers run any."""

from __future__ import annotations

import sys
from importlib import import_module


def need_ortools(solver: object) -> None:
    """Raises ImportError, saying what to do, where ortools is missing or cannot be imported any more."""
    if "highspy" in sys.modules and "ortools" not in sys.modules:
        raise ImportError(
            f"{solver!r} needs ortools, which cannot share a process with highspy: run it in a process that imports no highspy"
        )
    try:
        import_module("ortools")
    except ImportError as error:
        raise ImportError(f"{solver!r} needs ortools, which is not installed: pip install ortools") from error
