"""Bare problems, to be ordered or placed: integer arrays and their files, with no graph and no torch in sight."""

from __future__ import annotations

import enum


class Status(str, enum.Enum):
    """What is known of an order, or of addresses; the members are their sentences."""

    OPTIMAL = "Nothing takes less: it meets a proven lower bound."
    FEASIBLE = "It is right, and another may or may not take less."
    INFEASIBLE = "Nothing stays within the given limit: that is proven."
    UNKNOWN = "Nothing within the given limit was found, and nothing was proven impossible."
