"""From a model and its batch to captured programs, and what these take for granted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from lowtide.api.believed import Believed, Known
from lowtide.api.stages import Stages
from lowtide.capture.batches import objects_in
from lowtide.capture.care.generators import known_generators
from lowtide.capture.care.surroundings import methods_of, put_back_on_failure
from lowtide.capture.effects.leaving import containers_of
from lowtide.capture.program import TrainingProgram, capture_inference, capture_training
from lowtide.capture.ranks.wrapped import unlike_a_step
from lowtide.capture.real import knowing
from lowtide.capture.trace import Captured, Given
from lowtide.cost.lab.laboratory import Laboratory
from lowtide.errors import CaptureError, StepError
from lowtide.ir.made import Really
from lowtide.ir.varying import FIXED, Varying
from lowtide.runtime.caller import Caller
from lowtide.runtime.ranks.peers import ALONE, Alone
from lowtide.runtime.unchanged.granted import Granted, first_difference
from lowtide.runtime.unchanged.look import Look, Reads


@dataclass(frozen=True)
class Capturing:
    """Everything that is needed to capture, now and again when what was captured has changed."""

    model: nn.Module
    program: TrainingProgram | None  # None for inference
    device: torch.device
    stages: Stages
    varying: Varying = FIXED  # which extents of its batches are dimensions
    peers: Alone = ALONE  # the processes that do the same at the same time

    @property
    def caller(self) -> Caller:
        program = self.program
        return Caller(self.model) if program is None else Caller(self.model, program.optimizer, program.scaler, program.counters)

    @property
    def trains(self) -> bool:
        return self.program is not None

    def check_wrapper(self) -> None:
        """Raise StepError where the module around the model is in the middle of what a step would not do."""
        if self.program is not None and (why := unlike_a_step(self.program.given)):
            raise StepError(why)

    def as_it_is(self, args: tuple[Any, ...], kwargs: dict[str, Any], laboratory: Laboratory) -> tuple[tuple[Captured, ...], Granted]:
        """The program, and what it takes for granted. A first run may fill in what later ones find (a cache in a configuration)."""
        functions = () if self.program is None else (self.program.loss, self.program.after_backward)
        own = methods_of((self.model,)), containers_of((self.model,))
        with put_back_on_failure((*functions, *own[0]), [*objects_in(args, kwargs), *own[1]]):
            return self._as_it_is(args, kwargs, laboratory)

    def _as_it_is(self, args: tuple[Any, ...], kwargs: dict[str, Any], laboratory: Laboratory) -> tuple[tuple[Captured, ...], Granted]:
        for _ in range(2):
            before = Look(self.caller).locations
            captured = self.programs(args, kwargs, laboratory)
            reads = Reads(frozenset().union(*(each.read for each in captured)))
            change = captured[-1].counted or first_difference(reads.of(before), reads.of(Look(self.caller).locations))
            if not change:
                return captured, Granted(self.caller, reads, captured[-1].beside)
        raise CaptureError(
            f"the program changes what it rests on each time it runs, which a captured step would not: {change}; "
            "keep what changes from step to step in a buffer, or count outside of the step"
        )

    def again(self, args: tuple[Any, ...], kwargs: dict[str, Any], laboratory: Laboratory, *, leaves: bool = False) -> Captured:
        """The program for the optimizer's state as it is now, to be compared; nothing is tried, and nothing is changed by that."""
        given = Given(args, kwargs, self.device, self.varying)
        with knowing(Known(laboratory)):
            if self.program is None:
                return capture_inference(self.model, given, put_back=True, leaves=leaves)
            return capture_training(self.program, given, put_back=True, leaves=leaves)[0]

    def programs(self, args: tuple[Any, ...], kwargs: dict[str, Any], laboratory: Laboratory) -> tuple[Captured, ...]:
        """One program for each state of the optimizer's; the last is what most steps run."""

        given = Given(args, kwargs, self.device, self.varying)
        with self.stages.stage("capture", "capturing the program"):
            believed = Believed(laboratory)
            try:
                captured = self._captured(given, believed)
                if believed.rightly():
                    return captured
            except CaptureError:
                if believed.rightly():
                    raise
            return self._captured(given, Known(laboratory))  # what a fake kernel says wrongly is known now

    def _captured(self, given: Given, really: Really) -> tuple[Captured, ...]:
        """Captures once more where the program draws from generators of its own: which is one that it had before shows then."""
        captured = self._once(given, really)
        own = {id(each): each for one in captured for each in one.constants if isinstance(each, torch.Generator)}
        if not own:
            return captured
        with known_generators(own.values()):
            return self._once(given, really)

    def _once(self, given: Given, really: Really) -> tuple[Captured, ...]:
        with knowing(really):
            if self.program is None:
                return (capture_inference(self.model, given),)
            return capture_training(self.program, given)
