"""From a model and its batch to captured programs, and what these take for granted."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from lowtide.base.files import warn_once
from lowtide.base.messages import Stages
from lowtide.base.places import Position
from lowtide.capture.batches import objects_in
from lowtide.capture.care.contents import changed_each_time
from lowtide.capture.care.generators import known_generators
from lowtide.capture.care.surroundings import methods_of, objects_of, put_back_on_failure
from lowtide.capture.difference import difference
from lowtide.capture.effects.flags import FlagRecorder
from lowtide.capture.program import TrainingProgram, capture_inference, capture_training
from lowtide.capture.ranks.data_parallel import unlike_a_step
from lowtide.capture.real import knowing
from lowtide.capture.trace import CapturedStep, Given
from lowtide.cost.device import Device
from lowtide.cost.laboratory import Call, Laboratory
from lowtide.cuda.absent import standing_in
from lowtide.errors import CaptureError, StepError
from lowtide.ir.graph import Node
from lowtide.ir.result_specs import Really, Results, differ
from lowtide.ir.shapes.dimension import FIXED, Varying
from lowtide.runtime.caller import Caller
from lowtide.runtime.premises import CallerState, Premises, Reads, first_difference
from lowtide.runtime.ranks import ALONE, SinglePeer


@dataclass(frozen=True)
class KnownKernels:
    """Waits for the trial of each call that is not known: a `Really`."""

    laboratory: Laboratory

    def __call__(self, node: Node, before: Sequence[Node], makes_bytes: int, thought: Results | None) -> Results | None:
        return self.laboratory.results(Call(node, before, makes_bytes))


@dataclass(frozen=True)
class BelievedKernels(KnownKernels):
    """Waits only where nobody has an idea of what a call gives; all others are tried meanwhile."""

    _thoughts: list[tuple[Call, Results]] = field(default_factory=list)

    def __call__(self, node: Node, before: Sequence[Node], makes_bytes: int, thought: Results | None) -> Results | None:
        """What the call really gives, where that is known."""
        call = Call(node, before, makes_bytes)
        if thought is None or not self.laboratory.begin(call):
            return self.laboratory.results(call)
        self._thoughts.append((Call(node), thought))  # without what came before, which may hold on to fakes
        return None

    def rightly(self, meanwhile: Callable[[], object] = lambda: None) -> bool:
        """Whether all that was believed is so; waits for the trials, and does something else `meanwhile`."""
        if self._thoughts:
            meanwhile()
        return not any(differ(thought, real) for call, thought in self._thoughts if (real := self.laboratory.results(call)) is not None)


_UNWATCHED = "so much is not compared in each call; if it changes between steps, make it a tensor in a buffer, or pass it with the batch"


@dataclass(frozen=True)
class Captures:
    """Everything that is needed to capture, now and again when what was captured has changed."""

    model: nn.Module
    program: TrainingProgram | None  # None for inference
    device: torch.device
    stages: Stages
    varying: Varying = FIXED  # which extents of its batches are dimensions
    peers: SinglePeer = ALONE  # the processes that do the same at the same time
    machine: Device | None = None  # that is simulated: it answers for a GPU that is not here
    latest: bool = False  # of an optimizer's programs the last one alone is captured
    numbers: dict[tuple[int, str], list[Position]] = field(default_factory=dict)  # a place as often as another one lay there
    meanwhile: Callable[[], object] = lambda: None  # what can be done while trials are waited for

    @property
    def caller(self) -> Caller:
        program = self.program
        return Caller(self.model) if program is None else Caller(self.model, program.optimizer, program.scaler, program.counters)

    @property
    def trains(self) -> bool:
        return self.program is not None

    @property
    def varying_numbers(self) -> list[Position]:
        """Where a number lies that was another one twice: programs may have it as an input."""
        return [places[-1] for places in self.numbers.values() if len(places) > 1]

    def note_numbers(self, places: Iterable[Position]) -> None:
        """Other numbers lie there than when the program was captured."""
        for place in places:
            self.numbers.setdefault((id(place.holder), place.name), []).append(place)

    def check_wrapper(self) -> None:
        """Raise StepError where the module around the model is in the middle of what a step would not do."""
        if self.program is not None and (why := unlike_a_step(self.program.given)):
            raise StepError(why)

    def as_it_is(self, args: tuple[Any, ...], kwargs: dict[str, Any], laboratory: Laboratory) -> tuple[tuple[CapturedStep, ...], Premises]:
        """The program, and what it takes for granted. A first run may fill in what later ones find (a cache in a configuration)."""
        functions = () if self.program is None else (self.program.loss, self.program.after_backward)
        objects = [*objects_in(args, kwargs), *objects_of((self.model,))]
        with put_back_on_failure((*functions, *methods_of((self.model,))), objects):
            first: tuple[CapturedStep, ...] | None = None
            for _ in range(2):
                before = CallerState(self.caller).locations
                captured = self.programs(args, kwargs, laboratory)
                reads = Reads(frozenset().union(*(each.read for each in captured)))
                change = captured[-1].counted or first_difference(reads.of(before), reads.of(CallerState(self.caller).locations))
                if not change:
                    if first is not None and (otherwise := next(filter(None, map(difference, first, captured)), "")):
                        called = "loss(model, *batch)" if self.trains else "the model"
                        raise CaptureError(
                            f"the program computes something else when it runs for the first time ({otherwise}), and what is captured "
                            f"would not do that: call {called} once before, or keep what tells the first time in an attribute of a module"
                        )
                    assigned = (slot for each in captured for slot in each.assigned)
                    premises = Premises(self.caller, reads, captured[-1].beside, assigned)
                    for place in premises.unwatched:
                        warn_once(place, f"{place}: {_UNWATCHED}")
                    return captured, premises
                first = captured
            raise CaptureError(changed_each_time(change))

    def again(
        self, args: tuple[Any, ...], kwargs: dict[str, Any], laboratory: Laboratory, like: CapturedStep | None = None
    ) -> CapturedStep:
        """The program for the optimizer's state as it is now, to be compared with one captured before; nothing is tried or changed."""
        given = Given(args, kwargs, self.device, self.varying)
        leaves, numbers = (False, ()) if like is None else (bool(like.outputs.words), like.numbers)
        with knowing(KnownKernels(laboratory)), standing_in(self.device, self.machine):
            return self._recorded(given, put_back=True, leaves=leaves, numbers=numbers)[0]

    def programs(self, args: tuple[Any, ...], kwargs: dict[str, Any], laboratory: Laboratory) -> tuple[CapturedStep, ...]:
        """One program for each state of the optimizer's; the last is what most steps run."""
        given = Given(args, kwargs, self.device, self.varying)
        with self.stages.stage("capture", "capturing the program"), standing_in(self.device, self.machine):
            believed = BelievedKernels(laboratory)
            try:
                captured = self._settled(given, believed)
                if believed.rightly(self.meanwhile):
                    return captured
            except CaptureError:
                if believed.rightly():
                    raise
            return self._settled(given, KnownKernels(laboratory))  # what a fake kernel says wrongly is known now

    def _settled(self, given: Given, really: Really) -> tuple[CapturedStep, ...]:
        """Captures once more where the program sets numbers or texts that it has read, to see that it leaves them alone then.

        Where it computes the same then, its first step does so as well, if it reads of its data what it has read here. Where it does not,
        the first step is a program of its own: the next call finds what that has put there, and is captured anew.
        """
        first = self._captured(given, really)
        if not (memos := first[-1].flags.memos):
            return first
        try:
            first[-1].flags.put()
            later = self._captured(given, really)
        finally:
            first[-1].flags.put_back()
        if later[-1].flags.memos:
            flags = later[-1].flags
            raise CaptureError(f"{flags.memos[0].refusal}. More closely: {flags.closer}" if flags.closer else flags.memos[0].refusal)
        readings = first[-1].readings
        if len(first) != len(later) or any(map(difference, first, later)) or (readings and given.varying):
            return first
        return tuple(each.with_flags(FlagRecorder(memos, readings), self.model) for each in later)

    def _captured(self, given: Given, really: Really) -> tuple[CapturedStep, ...]:
        """Captures once more where the program draws from generators of its own: which is one that it had before shows then."""
        captured = self._once(given, really)
        own = {id(each): each for one in captured for each in one.constants if isinstance(each, torch.Generator)}
        if not own:
            return captured
        with known_generators(own.values()):
            return self._once(given, really)

    def _once(self, given: Given, really: Really) -> tuple[CapturedStep, ...]:
        numbers = tuple(self.varying_numbers)
        with knowing(really):
            return tuple(replace(each, numbers=numbers) for each in self._recorded(given, numbers=numbers))

    def _recorded(self, given: Given, **how: Any) -> tuple[CapturedStep, ...]:
        if self.program is None:
            return (capture_inference(self.model, given, **how),)
        return capture_training(self.program, given, latest=self.latest, **how)
