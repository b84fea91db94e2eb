"""A step that has to be captured anew again and again: told once, then ended."""

from __future__ import annotations

import warnings

from lowtide.errors import StepError

_WARNED_AT, _ENDED_AT = 5, 16


class Recaptures:
    """How many calls in a row were captured anew."""

    def __init__(self) -> None:
        self._in_a_row = 0

    def none(self) -> None:
        """A call found its program."""
        self._in_a_row = 0

    def one_more(self, change: str) -> None:
        """A call has to be captured, because of `change`. Warns at the fifth in a row; raises StepError after sixteen."""
        self._in_a_row += 1
        why = f": {change}" if change else ""
        remedy = "keep what changes from step to step in a buffer, or where the program does not read it"
        if self._in_a_row > _ENDED_AT:
            raise StepError(
                f"each of the last {_ENDED_AT} calls had to be captured anew, since something had changed that the program rests on{why}; "
                f"{remedy}"
            )
        if self._in_a_row == _WARNED_AT:
            warnings.warn(f"lowtide has captured the step anew in {_WARNED_AT} calls in a row{why}; {remedy}", stacklevel=4)
