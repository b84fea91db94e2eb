"""Warnings that name the user's own line, however deep in the package they are given."""

from __future__ import annotations

import contextlib
import sys
import warnings
from pathlib import Path

_PASSED_OVER = (str(Path(__file__).parents[1]), contextlib.__file__)


def warn(sentence: str, category: type[Warning] = UserWarning) -> None:
    """`warnings.warn`, at the first caller that is no file of the package's, whose context managers lie between."""
    frame, level = sys._getframe(1), 2
    while frame.f_back is not None and frame.f_code.co_filename.startswith(_PASSED_OVER):
        frame, level = frame.f_back, level + 1
    warnings.warn(sentence, category, stacklevel=level)
