"""What is known of an answer to a bare problem, whatever it is an answer to."""

import enum


class Status(str, enum.Enum):
    """What is known of an order, or of addresses; the members are their sentences."""

    OPTIMAL = "Nothing takes less: it meets a proven lower bound."
    FEASIBLE = "It is right, and another may or may not take less."
    INFEASIBLE = "Nothing stays within the given limit: that is proven."
    UNKNOWN = "Nothing within the given limit was found, and nothing was proven impossible."
