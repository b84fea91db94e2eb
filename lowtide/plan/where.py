"""Places in the user's program, for people."""

from __future__ import annotations

from pathlib import PurePath

from lowtide.ir.graph import Source


def source_text(source: Source | None) -> str:
    """The module and the line: "blocks.0.mlp, model.py:12"; "" where neither is known."""
    if source is None:
        return ""
    line = f"{PurePath(source.file).name}:{source.line}"
    return f"{source.module}, {line}" if source.module else line
