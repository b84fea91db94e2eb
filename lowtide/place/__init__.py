"""Addresses of buffers in the smallest arena: `place(problem, placer)` with placers that are values, as in `schedule`."""

from lowtide.place.auto import AUTO, Auto, place
from lowtide.place.base import Anytime, Placement, Placer, Status, answers
from lowtide.place.bound import arena_bound_bytes
from lowtide.place.exact.placer import Exact
from lowtide.place.greedy import Greedy, Portfolio
from lowtide.place.spaces import Space, SpacedPlacement, SpacedProblem, place_in_spaces

__all__ = [
    "AUTO", "Anytime", "Auto", "Exact", "Greedy", "Placement", "Placer", "Portfolio", "Space", "SpacedPlacement", "SpacedProblem", "Status",
    "answers", "arena_bound_bytes", "place", "place_in_spaces",
]  # fmt: skip
