"""The papers' own methods: integer programs, dynamic programs, the joint program, shape graphs, eviction at run time.

Benches and tests import them; the package does not. `--solver` finds them where this distribution is installed beside it.
"""

from research.orders.cp_sat import Intervals
from research.orders.dynamic import DynamicProgramme
from research.orders.ilp import TimeIndexed
from research.orders.incremental import reschedule
from research.orders.partition import AtWaists, Partitioned

__all__ = ["AtWaists", "DynamicProgramme", "Intervals", "Partitioned", "TimeIndexed", "reschedule"]
