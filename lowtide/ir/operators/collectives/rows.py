"""Rows of what processes do together: sums, broadcasts and gathers over a group, by torch's functional collectives.

One that begins (`all_reduce`) is given a tensor and the group's name, and goes on beside what follows; what it makes may be touched by
nobody but the `wait_tensor` that ends it, which hands the same memory on. One that works into memory apart from what it is given reads that
until it ends: it is ended by lowtide's own `wait_for`, which is given both.

What ranks hold parts of is loaded, as from a host: whole at once, and again where that is cheaper than to hold it. A plan's loads are begun
apart only once their places are known.
"""

from __future__ import annotations

from lowtide.ir.operators.row import Collective, Operator

NAMESPACE = "_c10d_functional"
SUM, WAIT = f"{NAMESPACE}.all_reduce.default", f"{NAMESPACE}.wait_tensor.default"
WAIT_APART = "lowtide.wait_for.default"
LOAD = "lowtide.load_parts.default"
GATHER, SCATTER = "lowtide.all_gather.default", f"{NAMESPACE}.reduce_scatter_tensor.default"
READING = frozenset({GATHER, SCATTER, "lowtide.exchange.default"})  # those that read what they are given until they end

_IN_PLACE = ("all_reduce", "broadcast")
_APART = (f"{NAMESPACE}.reduce_scatter_tensor", f"{NAMESPACE}.all_gather_into_tensor", "lowtide.all_gather", "lowtide.exchange")

ROWS = (
    *(
        Operator(name=f"{NAMESPACE}.{name}", collective=Collective.BEGINS, in_memory_of=f"{NAMESPACE}.{name}_.default")
        for name in _IN_PLACE
    ),
    *(Operator(name=name, collective=Collective.BEGINS) for name in _APART),
    Operator(name=f"{NAMESPACE}.wait_tensor", collective=Collective.ENDS, in_memory_of=WAIT),
    Operator(name="lowtide.load_parts", collective=Collective.LOADS),
    Operator(name="lowtide.wait_for", collective=Collective.ENDS, in_memory_of=WAIT_APART),
)
