"""Addresses of buffers in the smallest arena: `place(problem, placer)` with placers that are values, as in `schedule`."""

from lowtide.placement.auto import AUTO, Auto, place
from lowtide.placement.base import Anytime, Placement, Placer, answers
from lowtide.placement.exact import Exact
from lowtide.placement.greedy import Greedy, Portfolio
from lowtide.placement.strip import arena_bound_bytes

__all__ = ["AUTO", "Anytime", "Auto", "Exact", "Greedy", "Placement", "Placer", "Portfolio", "answers", "arena_bound_bytes", "place"]
