"""Placers as text, for the command line: see `ir.spec`."""

from __future__ import annotations

from collections.abc import Mapping

from lowtide.ir.spec import Family, named, parse, replaced
from lowtide.place.auto import Auto
from lowtide.place.base import Placer
from lowtide.place.cp_sat import Rectangles
from lowtide.place.exact import Exact
from lowtide.place.greedy import Greedy, Portfolio
from lowtide.place.ilp import Addresses

PLACERS: Mapping[str, type[Placer]] = named([Auto, Exact, Portfolio, Greedy, Rectangles, Addresses])


def parse_placer(text: str, placers: Mapping[str, type[Placer]] = PLACERS) -> Placer:
    """The placer that `text` describes. Raises FormatError naming the placer and the setting, and saying what there is to choose from."""
    return parse(text, Family(placers, "place", "exact{max_nodes=1000,max_seconds=2.5}"))


def limited(placer: Placer, *, max_nodes: int | None = None, max_seconds: float | None = None) -> Placer:
    """`placer` with these settings in place of its own; None leaves one as it is. Raises FormatError where it has no such setting."""
    return replaced(placer, {"max_nodes": max_nodes, "max_seconds": max_seconds})
