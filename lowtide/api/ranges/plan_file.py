"""`plan=`, as users give it: a plan of one shape, or the file that the step of a range has written."""

from __future__ import annotations

import os
from typing import Any

from lowtide.api.ranges.notation import AUTO
from lowtide.base.files import read_utf8
from lowtide.errors import FormatError
from lowtide.plan.plan import Plan
from lowtide.planning.limits import Limit, Memory
from lowtide.ranges.range_json import WrittenRange, is_range, read_range


def loaded(plan: Plan | str | os.PathLike[str] | None, dynamic: Any) -> tuple[Plan | None, WrittenRange | None]:
    """A plan of one shape, or those of a range; None for what it is not. Raises TypeError, FormatError, CheckError and OSError."""
    if plan is None:
        return None, None
    if not isinstance(plan, (str, os.PathLike)):
        if dynamic is not None:
            raise TypeError(
                "plan: expected with `dynamic` the path of what step.save(path) has written for that range, got a plan of one shape"
            )
        return plan, None
    text, where = read_utf8(plan), os.fspath(plan)
    if dynamic is None and not is_range(text):
        return Plan.load(plan), None
    if dynamic is None or dynamic == AUTO:
        raise FormatError(f"{where}: expected with dynamic={dynamic!r} a plan of one shape, or the range itself: {_remedy(text)}")
    try:
        return None, read_range(text)
    except FormatError as error:
        raise FormatError(f"{where}: {error}") from error


def limit_of(saved: WrittenRange) -> Limit:
    """What plans of a range keep to."""
    return Limit(None if saved.memory_bytes is None else Memory(saved.memory_bytes), saved.latency)


def _remedy(text: str) -> str:
    if not is_range(text):
        return "this is a plan of one shape, leave `dynamic` out to use it"
    parts = "; ".join(part.dimensions for part in read_range(text).parts)
    return f"these are plans of a range, give it as it was: dynamic={{...}} of {parts}"
