"""What a captured program needs, card by card: where it fits as it stands, in another order, or by taking longer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from enum import Enum

from lowtide.base.messages import bytes_text
from lowtide.cost.device import Device
from lowtide.cost.laboratory import Laboratory
from lowtide.planning.archive import CandidateArchive
from lowtide.planning.candidate import Captured, Eager, order_together
from lowtide.planning.machine import Machine
from lowtide.planning.planner import Planner
from lowtide.planning.refusal import refuse_small_host
from lowtide.planning.request import Budget, Effort, Request
from lowtide.schedule import AUTO

# What neither PyTorch nor its user gets of a card: the driver's own, and the context of CUDA with its libraries' workspaces. The H100 and
# the H200 that were measured gave 78 of 80 and 139 of 141 GiB before any context, which takes about half a GiB.
_DRIVER_SHARE = 0.02
_CONTEXT_BYTES = 600 * 2**20


class Fit(str, Enum):
    """How a program fits on a card."""

    AS_IT_STANDS = "as it stands"
    BY_ORDER = "by order alone"  # which takes no time
    SLOWER = "slower"  # what was let go is computed again, or comes back from the host
    NOT = "not"


@dataclass(frozen=True)
class CardNeed:
    """A program on one card."""

    card: str
    memory_bytes: int
    usable_bytes: int  # without what the driver and CUDA's context take
    fit: Fit
    time_us: float | None  # of a step within it, by the card's rates; None where it does not fit
    slower: float | None  # than with memory without end, as a share of the time
    least_bytes: int | None  # the leanest plan found for this card; None where nothing had to be looked for
    pinned_bytes: int = 0  # of the host, by the plan that fits

    @property
    def verdict(self) -> str:
        """In words: "fits", "fits in another order", "fits, 12% slower, 3.00 GiB of the host", "does not fit"."""
        if self.fit is Fit.NOT or self.slower is None:
            return "does not fit"
        how = {Fit.BY_ORDER: " in another order", Fit.SLOWER: f", {self.slower:.0%} slower"}
        pinned = f", {bytes_text(self.pinned_bytes)} of the host" if self.pinned_bytes else ""
        return f"fits{how.get(self.fit, '')}{pinned}"


def usable_bytes(card: Device) -> int:
    return int(card.memory_bytes * (1 - _DRIVER_SHARE)) - _CONTEXT_BYTES


@dataclass(frozen=True)
class Needed:
    """A program on all cards."""

    eager: Eager
    order_peak_bytes: int  # in the order of least peak, which takes no time
    cards: tuple[CardNeed, ...]


def needs_of(
    captured: Captured,
    machine: Machine,
    cards: Sequence[Device],
    laboratory: Laboratory,
    host_bytes: int | None = None,
    *,
    swap_state: bool = False,
) -> Needed:
    """The program is rewritten and ordered once, and searched for those cards that it does not fit by order.

    No more than `host_bytes` are pinned of the host; with `swap_state` parameters and optimizer state may go there within a step.

    The smallest card is always searched for, so that the least that was found is known.
    """
    refuse_small_host([captured.graph], host_bytes)
    candidates = machine.candidates(captured, laboratory, exact=True, limited=True)
    granule_bytes = machine.granule_bytes(captured)
    plain = [each for each in candidates if not each.costs_time]
    order_together(plain, AUTO, granule_bytes)
    order_bytes = min(each.ordered(AUTO, granule_bytes).peak_bytes for each in plain)
    eager, smallest, needs = candidates[0].eager(granule_bytes), min(card.memory_bytes for card in cards), []
    for card in cards:
        here = replace(machine, simulated=card)
        timed = here.timed(captured, candidates, laboratory)
        request = replace(_request(here, captured, granule_bytes), swap_state=swap_state)
        searched = card.memory_bytes == smallest or order_bytes > usable_bytes(card)
        archive = Planner([timed]).searched(request) if searched else CandidateArchive.bare(timed, request)
        needs.append(_need(card, archive, searched, eager.peak_bytes, order_bytes, host_bytes))
    return Needed(eager, order_bytes, tuple(needs))


def _request(machine: Machine, captured: Captured, granule_bytes: int) -> Request:
    links, provenance = machine.links(captured), machine.provenance(captured)
    return Request(provenance, Budget(latency=1.0), granule_bytes=granule_bytes, sweeps=Effort.QUICK.sweeps, links=links)


def _need(card: Device, archive: CandidateArchive, searched: bool, eager_bytes: int, order_bytes: int, host_bytes: int | None) -> CardNeed:
    usable = usable_bytes(card)
    point = archive.within(Budget(memory_bytes=usable, host_bytes=host_bytes))
    fit = Fit.AS_IT_STANDS if eager_bytes <= usable else Fit.BY_ORDER if order_bytes <= usable else Fit.SLOWER if point else Fit.NOT
    time_us = None if fit is Fit.NOT else point.time_us if fit is Fit.SLOWER and point else archive.order_us
    slower = None if time_us is None else time_us / archive.order_us - 1
    least_bytes = archive.frontier_pinning(host_bytes)[0].peak_bytes if searched else None
    pinned_bytes = (point.pinned_bytes if fit is Fit.SLOWER and point else 0) + (archive.home_bytes if fit is not Fit.NOT else 0)
    return CardNeed(card.name, card.memory_bytes, usable, fit, time_us, slower, least_bytes, pinned_bytes)
