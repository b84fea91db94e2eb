"""A plan for people and for other tools: a page, pictures, a trace, a snapshot. All read the plan and nothing else."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

from lowtide.errors import FormatError
from lowtide.placement.picture import FORMATS, check_picture
from lowtide.plan.contents import Contents
from lowtide.report.chart import svg
from lowtide.report.exports import memory_viz, save_memory_viz, save_picture, save_trace
from lowtide.report.page import page, save_page

_Writer = Callable[[Contents, "str | os.PathLike[str]"], None]
_WRITERS: dict[str, _Writer] = {".html": save_page, ".json": save_trace, ".pickle": save_memory_viz}
_PICTURES = tuple(f".{each}" for each in FORMATS)


def check_report(path: str | os.PathLike[str]) -> None:
    """Whether a report can be written so: raises FormatError for another suffix, ImportError where matplotlib is wanted and not there."""
    suffix = Path(path).suffix.lower()
    if suffix in _PICTURES:
        check_picture(path)
    elif suffix not in _WRITERS:
        raise FormatError(
            f"{os.fspath(path)}: expected a name that ends in .html (a page), {', '.join(_PICTURES)} (a picture), .json (a trace for "
            "Chrome and Perfetto) or .pickle (a snapshot for PyTorch's memory_viz)"
        )


def save(plan: Contents, path: str | os.PathLike[str]) -> None:
    """Write a plan as a page, pictures, a trace or a snapshot. Raises what `check_report` raises, and OSError."""
    check_report(path)
    _WRITERS.get(Path(path).suffix.lower(), save_picture)(plan, path)


__all__ = ["check_report", "memory_viz", "page", "save", "save_picture", "svg"]
