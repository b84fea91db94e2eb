"""Settings by name, for programs that vary them one by one: `optimize(model, batch, **in_values(accumulate=4, memory="60%"))`."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lowtide.api.options import PLACES, VALUES


def in_values(**settings: Any) -> dict[str, Any]:
    """The same as `optimize` and `explain` take them, in values; what belongs into none is as it was."""
    within: dict[str, dict[str, Any]] = {}
    for name in settings.keys() & PLACES.keys():
        value, field = PLACES[name]
        within.setdefault(value, {})[field] = settings[name]
    made = {value: replace(settings.get(value, VALUES[value]()), **given) for value, given in within.items()}
    return {name: given for name, given in settings.items() if name not in PLACES} | made
