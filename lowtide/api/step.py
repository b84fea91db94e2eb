"""What `optimize` hands back: a callable that does what the captured program does."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from lowtide.api.arena import ArenaReport, StepArena
from lowtide.capture.program import Captured
from lowtide.cost.profiler import Measured, peak_bytes
from lowtide.errors import StepError
from lowtide.ir.files import write_whole
from lowtide.ir.plan import Plan
from lowtide.lower.python import lower
from lowtide.lower.transfers import swaps
from lowtide.runtime.arena import Arena
from lowtide.runtime.batch import BatchSpec
from lowtide.runtime.caller import Caller, InputCheck, View
from lowtide.runtime.host import host_memory
from lowtide.runtime.program import Program


@dataclass(frozen=True)
class Variant:
    """One program for one state of the caller's: optimizers make their state in the first step and update it in later ones."""

    captured: Captured
    plan: Plan
    program: Program
    circumstances: tuple[Any, ...]
    check: InputCheck

    @classmethod
    def of(cls, captured: Captured, plan: Plan, circumstances: tuple[Any, ...], gradients: bool) -> Variant:
        """The program that runs `plan`."""
        inputs = captured.graph.inputs
        devices = tuple(sorted({torch.device(value.storage.device).type for value in inputs}))
        host = host_memory(max((value.storage.device for value in inputs), default="cpu")) if swaps(plan) else None
        program = Program(lower(plan), gradients, devices, host)
        return cls(captured, plan, program, circumstances, InputCheck.of(captured.graph, captured.slots))

    def fits(self, now: View, circumstances: tuple[Any, ...]) -> bool:
        """Whether this is the program for what the caller holds now."""
        if self.circumstances != circumstances or self.captured.state_entries != now.caller.state_entries:
            return False
        try:
            return all(guard.holds(now.read(guard.slot)) for guard in self.captured.guards)
        except StepError:
            return False

    def run(self, now: View, arena: Arena | None = None) -> Any:
        """Run once on what the caller holds; the result as the captured program returns it."""
        inputs = [now.read(slot, self.captured.constants) for slot in self.captured.slots]
        self.check(inputs)
        outputs = self.program(inputs) if arena is None else arena.run(self.program, lambda: self.program(inputs))
        results = len(outputs) - len(self.captured.assigned)
        now.assign(self.captured.assigned, outputs[results:])
        return self.captured.result(outputs[:results])


Replan: TypeAlias = Callable[[], "list[Variant]"]


class Step:
    """A training step, or an inference call, in less memory. Call it as the loop would: `loss = step(*batch)`.

    It reads parameters, buffers, optimizer state and hyper-parameters from the caller's own objects at each call and advances them in
    place. What
    it was planned for may change between calls: a learning rate at no cost, a flag (frozen layers, `model.eval()`, a weight decay that
    becomes zero) by capturing once more.
    """

    def __init__(
        self, caller: Caller, batch: BatchSpec, variants: list[Variant], replan: Replan, seconds: dict[str, float], obstacle: str = "",
        arena: StepArena | None = None,
    ) -> None:  # fmt: skip
        self._caller, self._batch, self._replan, self._obstacle = caller, batch, replan, obstacle
        self._arena = arena
        self._families = [variants]  # captured together, newest first; the last of a family is the one that most steps run
        self._current = variants[-1]
        self._measured: Measured | None = None
        self.seconds = seconds  # by stage: "capture", "measure", "order", "lower"

    @property
    def plan(self) -> Plan:
        """The plan that most steps run. The first step of most optimizers, which makes their state, has one of its own."""
        plan = self._families[0][-1].plan
        measured = None if self._measured is None else self._measured.peak_bytes + plan.resident_bytes
        return dataclasses.replace(plan, measured_peak_bytes=measured)

    @property
    def frontier(self) -> tuple[tuple[int, float], ...]:
        """What memory buys: (peak_bytes, time_us) of all plans that the search found best at something, leanest first.

        Empty where no limit was asked for.
        """
        trade = self.plan.trade
        return () if trade is None else trade.frontier

    @property
    def source(self) -> str:
        """The text of that plan's program."""
        return self._families[0][-1].program.source

    @property
    def arena(self) -> ArenaReport | None:
        """What the step's arena does; None where none was asked for."""
        return None if self._arena is None else self._arena.report()

    def save_program(self, path: str | os.PathLike[str]) -> None:
        """Write the program's text, to be read."""
        write_whole(path, self.source)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run once on a batch like the one given to `optimize`.

        Raises BatchError for a batch unlike it, StepError where the model or optimizer no longer is what was captured.
        """
        variant, now = self._prepare(args, kwargs)
        result = self._run(variant, now)
        self._caller.note_step()
        return result

    def measure(self, *args: Any, **kwargs: Any) -> Measured:
        """Run once under the profiler: the peak above what the caller holds, in bytes as the allocator counts them.

        Training advances by this step. Raises StepError for an optimizer's first step, and as a call does.
        """
        variant, now = self._prepare(args, kwargs)
        if variant is not self._families[0][-1]:
            raise StepError(
                "the first step of this optimizer makes its state and is not like the later ones: call the step once, then measure"
            )
        device = max((value.storage.device for value in variant.captured.graph.inputs), default="cpu")
        self._measured = peak_bytes(lambda: self._run(variant, now), device)
        self._caller.note_step()
        return self._measured

    def _run(self, variant: Variant, now: View) -> Any:
        return variant.run(now, None if self._arena is None else self._arena.arena)

    def _prepare(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Variant, View]:
        leaves = self._batch.leaves_of(args, kwargs)
        if self._obstacle:
            raise StepError(self._obstacle)
        now = self._caller.look(leaves)
        variant = self._find(now)
        if variant is None:
            self._families.insert(0, self._replan())
            self._measured = None
            variant = self._find(now)
        if variant is None:
            raise StepError("the step was captured anew, but not for what the optimizer holds now: is its state changed by another thread?")
        self._current = variant
        return variant, now

    def _find(self, now: View) -> Variant | None:
        """The program for what the caller holds now; its family becomes the first."""
        here = circumstances(self._caller)
        if self._current.fits(now, here):
            return self._current
        for family in self._families:
            found = next((variant for variant in family if variant.fits(now, here)), None)
            if found is not None:
                self._show(family)
                return found
        return None

    def _show(self, family: list[Variant]) -> None:
        """Make a family the one whose plan is shown."""
        if family is not self._families[0]:
            self._measured = None
            self._families = [family, *(other for other in self._families if other is not family)]


def circumstances(caller: Caller) -> tuple[Any, ...]:
    """What a captured program takes for granted beside its guards: modes, flags, and who is in which group."""
    model, optimizer = caller.model, caller.optimizer
    groups = () if optimizer is None else tuple(tuple(map(id, group["params"])) for group in optimizer.param_groups)
    autocast = tuple((device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in ("cpu", "cuda"))
    return (
        tuple(map(_settings, model.modules())),
        tuple(parameter.requires_grad for parameter in model.parameters()),
        groups,
        autocast,
        torch.get_default_dtype(),
    )


def _settings(module: nn.Module) -> tuple[Any, ...]:
    """A module's attributes that are plain numbers, flags and texts (`training` among them), and where it holds tensors."""
    return tuple(
        [(name, torch.Tensor if type(item) is torch.Tensor else item) for name, item in module.__dict__.items() if type(item) in _PLAIN]
    )


_PLAIN = frozenset({bool, int, float, str, type(None), torch.Tensor})
