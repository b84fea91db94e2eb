"""An optimizer's settings while its program is captured: as before afterwards. A program that changes them itself is refused."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TypeAlias

import torch

from lowtide.errors import CaptureError
from lowtide.kernels.optimizers import each_of

_Copied: TypeAlias = "list[tuple[dict[str, Any], dict[str, Any], list[Any]]]"  # each group, its settings and its parameters


@contextmanager
def settings_unchanged(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Raise CaptureError where what runs inside changes a setting (a scheduler's `step()`), which is put back whatever happens."""
    copies = [
        (each.param_groups, [(group, dict(group), list(group["params"])) for group in each.param_groups]) for each in each_of(optimizer)
    ]
    try:
        yield
        if (changed := next(filter(None, (_changed(*each) for each in copies)), None)) is not None:
            raise CaptureError(
                f"loss() or after_backward() changes the optimizer's {changed}, which would be done once, in the capture: do it "
                "between steps (`scheduler.step()` before step(...) for a rate that this step uses, behind it for the next one's)"
            )
    finally:
        for groups, before in copies:
            groups[:] = [group for group, _, _ in before]
            for group, settings, parameters in before:
                group.clear()
                group.update(settings)
                group["params"][:] = parameters


def _changed(groups: list[dict[str, Any]], before: _Copied) -> str | None:
    """What is not as it was, in words."""
    if len(groups) != len(before) or any(len(group["params"]) != len(parameters) for group, _, parameters in before):
        return "groups of parameters"
    for group, settings, _ in before:
        for key in (*settings, *(key for key in group if key not in settings)):
            old, new = settings.get(key), group.get(key)
            if old is not new and (isinstance(old, torch.Tensor) or isinstance(new, torch.Tensor) or repr(old) != repr(new)):
                return f"{key!r} ({old!r} to {new!r})"
    return None
