"""What a model needs, before there is a machine for it: card by card, whether it fits, how, and how long a step takes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from lowtide.api.arguments import check_arguments, check_memories, check_scaler, check_state_on_host
from lowtide.api.captures import Captures
from lowtide.api.options import Run, Training
from lowtide.base.messages import Stages, bytes_text, time_text, wants_progress
from lowtide.base.process import collected_seldom
from lowtide.capture.batches import positional_and_keyword
from lowtide.capture.optimizers.wrappers import torch_optimizer
from lowtide.capture.program import TrainingProgram
from lowtide.cost.device import Device
from lowtide.cost.presets import CARDS, preset
from lowtide.cuda.absent import assumptions
from lowtide.plan.snapshot import kind_text
from lowtide.planning.machine import Machine
from lowtide.planning.needs import CardNeed, needs_of
from lowtide.planning.request import Limit, MemoryLimits
from lowtide.planning.warm_up import compile_ahead, warm_up_planning
from lowtide.runtime.batch import BatchSpec
from lowtide.schedule import AUTO


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
    program = None
    if loss is not None and trained is not None:
        more = training.after_backward, training.accumulate, training.scaler
        program = TrainingProgram(model, loss, trained, *more, between_steps=run.state == "host")
    stages = Stages(None, wants_progress(None))
    captures = Captures(model, program, target, stages, machine=largest, latest=True)
    machine = Machine(str(target), largest, False, run.swap, stages)
    compile_ahead(AUTO, limited=True)
    with machine.laboratory(captures.trains) as laboratory:
        captured = captures.programs(args, kwargs, laboratory)[-1]
        with stages.stage("compile", "loading compiled kernels, or compiling them for the first time"):
            warm_up_planning(AUTO, limited=True)
        with stages.stage("order", f"ordering {len(captured.graph.nodes)} operators, and fitting them on {len(devices)} cards"):
            program_needs = needs_of(captured, machine, devices, laboratory, limit.host_bytes, swap_state=run.state == "swap")
    peak = program_needs.eager.peak
    return Needs(
        parameters=sum(each.numel() for each in model.parameters()),
        eager_peak_bytes=program_needs.eager.peak_bytes,
        order_peak_bytes=program_needs.order_peak_bytes,
        least_bytes=min(each.least_bytes for each in program_needs.cards if each.least_bytes is not None),
        by_kind={} if peak is None else {kind_text(kind): nbytes for kind, nbytes in peak.by_kind.items() if nbytes},
        cards=program_needs.cards,
        assumed=" ".join(each[:1].upper() + each[1:] for each in (_COUNTED, assumptions(target, largest)) if each),
    )


_COUNTED = (
    "2 % and 600 MiB of each card are left to its driver and to CUDA. Operators' own temporaries and fragmentation are not counted. "
    "Times are by the makers' rates: at what kernels reached on a real H100 and H200 for these two, at 60 % for all others."
)
