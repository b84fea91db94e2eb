"""What is asked of planning: the limit, the machine, and how far to look."""

from __future__ import annotations

from dataclasses import dataclass, field

from lowtide.cost.device import Device
from lowtide.plan.plan import Provenance
from lowtide.planning.effort import Effort
from lowtide.planning.progress import Watcher
from lowtide.remat.sweep.search import Sweep
from lowtide.schedule import AUTO, Solver


@dataclass(frozen=True)
class Budget:
    """What a plan may take: bytes of peak, with what is resident, or time as a multiple of that without recomputation; or no limit."""

    memory_bytes: int | None = None
    latency: float | None = None

    @property
    def is_limit(self) -> bool:
        """Whether there is something to keep to."""
        return self != Budget()


@dataclass(frozen=True)
class Request:
    """One question to planning."""

    provenance: Provenance  # with what the plan is made, and for which device
    budget: Budget = Budget()
    exact: bool = True  # only graphs that compute the captured one's numbers to the last bit
    granule_bytes: int = 1  # the device's allocator rounds every size up to this
    links: Device | None = None  # the device over whose links to a host tensors may be swapped; None for no swapping
    swap_state: bool = False  # parameters and optimizer state may be swapped, too
    solver: Solver = AUTO  # of orders
    sweeps: tuple[Sweep, ...] = Effort.NORMAL.sweeps  # how far to look for what to compute again and what to swap: all of these
    watcher: Watcher | None = field(default=None, compare=False)  # hears how far the search has come; changes no answer
