"""What algebra did to a plan's graph: by rule where it fitted, what it bought, what it costs."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from lowtide.base import fields

_WHERE = "algebra"


@dataclass(frozen=True, slots=True)
class RuleReport:
    """One rule, at all places at which it was applied."""

    rule: str
    held: tuple[str, ...]  # by place: the storage that was held for the backward pass, by its name in the captured graph
    held_bytes: int  # of all of them, less what is held in their place
    peak_bytes: int  # so much of that at the step that would be the peak
    cost_us: float  # what it takes more than what it replaces, below 0 for less

    def rows(self) -> dict[str, Any]:
        return {name: getattr(self, name) for name in self.__slots__} | {"held": list(self.held)}


def rule_reports_from(item: Any) -> tuple[RuleReport, ...]:
    """The reports that `RuleReport.rows` wrote. Raises FormatError for what cannot be any."""
    if not isinstance(item, list):
        fields.refuse("plan", _WHERE, "a list", item)
    return tuple(_from(f"plan: {_WHERE}: {position}", each) for position, each in enumerate(item))


def _from(where: str, item: Any) -> RuleReport:
    fields.check_fields(where, item, set(RuleReport.__slots__))
    held, cost_us = item.get("held"), item.get("cost_us")
    if not isinstance(held, list) or not held or not all(isinstance(name, str) for name in held):
        fields.refuse(where, "held", "names of storages", held)
    if isinstance(cost_us, bool) or not isinstance(cost_us, (int, float)) or not math.isfinite(cost_us):
        fields.refuse(where, "cost_us", "a number", cost_us)
    held_bytes, peak_bytes = fields.integer(where, item, "held_bytes"), fields.integer(where, item, "peak_bytes")
    return RuleReport(fields.string(where, item, "rule"), tuple(held), held_bytes, peak_bytes, float(cost_us))
