"""What a model needs, before there is a machine for it: card by card, whether it fits, how, and how long a step takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from typing import Any

import torch
from torch import nn

from lowtide.api.arguments import check_arguments, check_memories, check_scaler, check_state_on_host, training_program
from lowtide.api.captures import Captures
from lowtide.api.options import Run, Training
from lowtide.base.messages import Stages, bytes_text, time_text, wants_progress
from lowtide.base.process import collected_seldom
from lowtide.capture.batches import positional_and_keyword
from lowtide.capture.optimizers.wrappers import torch_optimizer
from lowtide.cost.device import Device
from lowtide.cost.laboratory import Laboratory
from lowtide.cost.presets import CARDS, preset
from lowtide.cuda.absent import assumptions
from lowtide.plan.snapshot import kind_text
from lowtide.planning.archive import CandidateArchive
from lowtide.planning.candidate import Captured, Eager, order_together
from lowtide.planning.machine import Machine
from lowtide.planning.planner import Planner
from lowtide.planning.refusal import refuse_small_host
from lowtide.planning.request import Budget, Effort, Limit, MemoryLimits, Request
from lowtide.planning.warm_up import compile_ahead, warm_up_planning
from lowtide.runtime.batch import BatchSpec
from lowtide.schedule import AUTO

# What neither PyTorch nor its user gets of a card: the driver's own, and the context of CUDA with its libraries' workspaces. The H100 and
# the H200 that were measured gave 78 of 80 and 139 of 141 GiB before any context, which takes about half a GiB.
_DRIVER_SHARE = 0.02
_CONTEXT_BYTES = 600 * 2**20


class Fit(str, Enum):
    AS_IT_STANDS = "as it stands"
    BY_ORDER = "by order alone"  # which takes no time
    SLOWER = "slower"  # what was let go is computed again, or comes back from the host
    NOT = "not"


@dataclass(frozen=True)
class CardNeed:
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


def _needs_of(
    captured: Captured,
    machine: Machine,
    cards: Sequence[Device],
    laboratory: Laboratory,
    host_bytes: int | None = None,
    *,
    swap_state: bool = False,
) -> tuple[Eager, int, tuple[CardNeed, ...]]:
    """What eager takes, the least peak of an order, which takes no time, and the cards.

    The program is rewritten and ordered once, and searched for those cards that it does not fit by order.
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
    return eager, order_bytes, tuple(needs)


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


@dataclass(frozen=True)
class Needs:
    """What a program needs; `print` it. Nothing was run for it."""

    parameters: int
    eager_peak_bytes: int  # as PyTorch runs it
    order_peak_bytes: int  # in lowtide's order, which takes no time
    least_bytes: int  # the leanest that was found; numbers stay the same to the last bit
    by_kind: dict[str, int]  # bytes at the peak as it stands, by what they are for, the most first
    cards: tuple[CardNeed, ...]
    assumed: str  # in words, of a machine that is not here

    def figures(self) -> dict[str, Any]:
        return asdict(self) | {"cards": [asdict(each) | {"verdict": each.verdict} for each in self.cards]}

    def rows(self) -> list[tuple[str, str, str, str, str]]:
        """For each card: its name, its memory, what is usable of it, whether the program fits, the time of a step."""
        return [
            (
                each.card,
                bytes_text(each.memory_bytes),
                bytes_text(each.usable_bytes),
                each.verdict,
                "" if each.time_us is None else time_text(each.time_us),
            )
            for each in self.cards
        ]

    @property
    def headline(self) -> str:
        peaks = (
            ("as PyTorch runs it", self.eager_peak_bytes),
            ("in lowtide's order", self.order_peak_bytes),
            ("at least", self.least_bytes),
        )
        count = f"{self.parameters / 1e9:.2f}B" if self.parameters >= 1e9 else f"{self.parameters / 1e6:.1f}M"
        return f"{count} parameters; peak " + ", ".join(f"{bytes_text(nbytes)} {how}" for how, nbytes in peaks)

    @property
    def kinds(self) -> str:
        return "at the peak, as PyTorch runs it: " + ", ".join(f"{name} {bytes_text(nbytes)}" for name, nbytes in self.by_kind.items())

    def __str__(self) -> str:
        rows = [("card", "memory", "usable", "", "a step"), *self.rows()]
        width = max(24, max(len(verdict) for _, _, _, verdict, _ in rows) + 2)
        table = [
            f"{card:<10}{memory:>12}{usable:>12}  {verdict:<{width}}{time:>11}".rstrip() for card, memory, usable, verdict, time in rows
        ]
        return "\n".join([self.headline, self.kinds, "", *table, "", self.assumed])


@collected_seldom()
def needs(
    model: nn.Module, batch: Any, *, loss: Callable[..., Any] | None = None, optimizer: torch.optim.Optimizer | None = None,
    cards: Sequence[str | Device] = CARDS, training: Training = Training(), memory: MemoryLimits = None, run: Run = Run(),
) -> Needs:  # fmt: skip
    """What a training step, or an inference call, needs on GPUs that need not be here: by card, whether it fits and how.

    model, batch, loss, optimizer, training: as for `lowtide.optimize`; a model on the meta device takes no memory.
    cards: names that `lowtide devices` lists, or `lowtide.Device` values.
    memory: `{"host": "48GiB"}`: what copies may pin of the host. The device's is what a card has.
    run: only `swap` and `state` matter here. What is swapped lies on the card between steps all the same; with
        `state="host"` the optimizer's state does not.

    The program is followed once, as it would run on the largest of the cards. Times are by the cards' rates, and operators' own
    temporaries are not counted. Raises CaptureError, BatchError and TypeError as `optimize` does; ValueError for a card that is none.
    """
    check_arguments(model, loss, optimizer, training)
    if isinstance(cards, str) or not cards:
        raise ValueError(f"cards: expected a list of names, such as {list(CARDS)}, got {cards!r}")
    devices = [preset(each, "cards") if isinstance(each, str) else each for each in cards]
    for each in devices:
        if not isinstance(each, Device) or not each.memory_bytes:
            raise ValueError(f"cards: expected GPUs, whose memory is known, got {getattr(each, 'name', each)!r}")
    devices.sort(key=lambda each: each.memory_bytes)
    limit = Limit.of(memory)
    if limit.is_of_memory:
        raise ValueError(
            f'memory: expected a limit of the host alone, such as {{"host": "48GiB"}}, as cards are the others; got {memory!r}'
        )
    check_scaler(training.scaler, optimizer, run)
    check_memories(limit, torch.device("cuda"), devices[-1], swap=run.swap)
    trained = torch_optimizer(optimizer)
    check_state_on_host(run, trains=trained is not None, varies=False, together=False)
    args, kwargs = positional_and_keyword(batch)
    target, largest = torch.device("cuda"), devices[-1]
    BatchSpec.of(args, kwargs, target)
    program = training_program(model, loss, trained, training, between_steps=run.state == "host")
    stages = Stages(None, wants_progress(None))
    captures = Captures(model, program, target, stages, machine=largest, latest=True)
    machine = Machine(str(target), largest, False, run.swap, stages)
    compile_ahead(AUTO, limited=True)
    with machine.laboratory(captures.trains) as laboratory:
        captured = captures.programs(args, kwargs, laboratory)[-1]
        with stages.stage("compile", "loading compiled kernels, or compiling them for the first time"):
            warm_up_planning(AUTO, limited=True)
        with stages.stage("order", f"ordering {len(captured.graph.nodes)} operators, and fitting them on {len(devices)} cards"):
            swap_state = run.state == "swap"
            eager, order_bytes, needed = _needs_of(captured, machine, devices, laboratory, limit.host_bytes, swap_state=swap_state)
    peak = eager.peak
    return Needs(
        parameters=sum(each.numel() for each in model.parameters()),
        eager_peak_bytes=eager.peak_bytes,
        order_peak_bytes=order_bytes,
        least_bytes=min(each.least_bytes for each in needed if each.least_bytes is not None),
        by_kind={} if peak is None else {kind_text(kind): nbytes for kind, nbytes in peak.by_kind.items() if nbytes},
        cards=needed,
        assumed=" ".join(each[:1].upper() + each[1:] for each in (_COUNTED, assumptions(target, largest)) if each),
    )


_COUNTED = (
    "2 % and 600 MiB of each card are left to its driver and to CUDA. Operators' own temporaries and fragmentation are not counted. "
    "Times are by the makers' rates: at what kernels reached on a real H100 and H200 for these two, at 60 % for all others."
)
