"""The papers' own methods: integer programs, dynamic programs, the joint program. Only benches, tests and `--solver` use them."""

from lowtide.reference.orders.cp_sat import Intervals
from lowtide.reference.orders.dynamic import DynamicProgramme
from lowtide.reference.orders.ilp import TimeIndexed
from lowtide.reference.orders.incremental import reschedule
from lowtide.reference.orders.partition import AtWaists, Partitioned

__all__ = ["AtWaists", "DynamicProgramme", "Intervals", "Partitioned", "TimeIndexed", "reschedule"]
