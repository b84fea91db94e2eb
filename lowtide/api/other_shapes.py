"""The steps for batches that a step was not made for: of its range, captured apart, of another kind, or the caller's own loop."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any, Generic, TypeAlias, TypeVar

import torch
from torch import nn

from lowtide.api.arguments import detached
from lowtide.api.maker import Family, StepMaker, captured
from lowtide.api.notation import Seen, shapes_of
from lowtide.api.range_maker import RangeMaker
from lowtide.api.variant import Variant
from lowtide.base.messages import warn
from lowtide.capture.batches import micro_batches
from lowtide.capture.data.facts import Facts
from lowtide.capture.program import TrainingProgram
from lowtide.capture.results import beside, checked_loss, joined, share_of, with_loss
from lowtide.errors import CaptureError, LowtideError
from lowtide.runtime.batch import BatchShape, BatchSpec, NewShapeError
from lowtide.runtime.caller import View, already_run


def run_eagerly(
    model: nn.Module, program: TrainingProgram | None, args: tuple[Any, ...], kwargs: dict[str, Any], *, begun: bool = False
) -> Any:
    """One training step, or without a program one call of the model without gradients; what a captured one would return.

    `begun`: hooks that precede the optimizer's step have run.
    """
    if program is None:
        with torch.no_grad():
            return model(*args, **kwargs)
    with torch.enable_grad(), already_run(program.optimizer) if begun else nullcontext():
        return _trained(program, args, kwargs)


def _trained(program: TrainingProgram, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    model, optimizer = program.model, program.optimizer
    scaler = program.scaler if program.scaler is not None and program.scaler.is_enabled() else None
    optimizer.zero_grad()
    results = [_differentiated(program, scaler, *piece) for piece in micro_batches(args, kwargs, program.accumulate)]
    returned = None
    if program.after_backward is not None:
        if scaler is not None:
            scaler.unscale_(optimizer)
        with torch.no_grad():
            returned = program.after_backward(model)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
        scaler.update()
    for count in program.counters:
        count()
    optimizer.zero_grad()  # a captured step leaves no gradients, either
    return beside(joined(results, program.accumulate), returned)


def _differentiated(program: TrainingProgram, scaler: torch.amp.GradScaler | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The loss of one micro-batch, and its backward pass."""
    result = program.loss(program.model, *args, **kwargs)
    loss = checked_loss(result)
    piece = share_of(loss, program.accumulate)
    (piece if scaler is None else scaler.scale(piece)).backward()
    return with_loss(result, piece)


def read_unlike(now: View, variants: Iterable[Variant], shown: Callable[[str], str] = str) -> str:
    """What is read from the data otherwise than when one of these programs was captured; "" where nothing is. `shown`: of the answer."""
    facts = Facts(now.read)
    unlike = (facts.unlike(variant.captured.readings) for variant in variants if variant.fits_settings(now))
    reading = next((each for each in unlike if each is not None), None)
    return "" if reading is None else f"{reading} gives {shown(str(facts.outcome(reading.question)))}"


S = TypeVar("S")
Make: TypeAlias = "Callable[[StepMaker | RangeMaker, BatchSpec, Family], S]"
_MOST_RANGED = 4096  # shapes of a range whose steps are kept
MOST_SHAPES = 32  # out of a range whose steps are kept; of more, that one goes which was not met for longest
_MANY = 4
_REMEDY = "pad or bucket batches so that few shapes are left (a loader with drop_last=True gives one size of batches)"


class OtherShapes(Generic[S]):
    """Finds and makes them, each by `make`, on the objects that a step works on.

    policy: what becomes of a shape out of the range. "extend" makes a step for each, "eager" runs the caller's loop, "error" refuses.
        None makes one, for the tail of an epoch, and then runs the caller's loop with a warning; if `limited`, it makes a step for each.
    seen: the shapes from which ranges are guessed, as other batches come; none where nothing is guessed.
    limited: the caller's own loop would not do what is asked for.
    """

    def __init__(self, maker: StepMaker | RangeMaker, policy: str | None, seen: Sequence[Seen], *, training: bool, make: Make[S]) -> None:
        self._maker, self.policy, self._training, self._make = maker, policy, training, make
        self.range = maker if isinstance(maker, RangeMaker) else None
        self.seen = list(seen)
        self.limited = maker.settings.limit.is_limit or maker.saved is not None or maker.capturing.peers.several
        self._ranged: OrderedDict[BatchShape, S] = OrderedDict()
        self._apart: OrderedDict[BatchShape, S] = OrderedDict()
        self._count = 0  # that were ever made apart
        self._warned = False

    def known(self, shape_of_batch: Callable[[], BatchShape]) -> S | None:
        """The step for a shape of the range that was met before."""
        return self._ranged.get(shape_of_batch()) if self._ranged else None

    def find(self, error: NewShapeError, newest: Family, args: tuple[Any, ...], kwargs: dict[str, Any]) -> S | None:
        """The step for a batch of another shape; None where the caller's own loop is to run. `newest` are the programs that run now.

        It also runs where the program raises something under capture: so all is done that comes before, and its own error is told.
        """
        try:
            if (steps := self._of_range(error, newest, args, kwargs)) is not None:
                return steps
            beyond = error if self.range is None else error.beyond(self.range.extents)
            return self._step_apart(error, newest, args, kwargs) if self._is_captured(beyond) else None
        except CaptureError as refusal:
            if self.limited or refusal.__cause__ is None or isinstance(refusal.__cause__, LowtideError):
                raise
            warn(f"a batch of another shape is run as the loop would run it, without lowtide: {refusal}")
            return None

    def step_for(self, error: NewShapeError, newest: Family, args: tuple[Any, ...], kwargs: dict[str, Any]) -> S:
        """The step for a batch of another shape, whatever the policy says."""
        steps = self._of_range(error, newest, args, kwargs)
        return self._step_apart(error, newest, args, kwargs) if steps is None else steps

    def _is_captured(self, error: NewShapeError) -> bool:
        """Whether a shape out of the range gets a step; else the caller's own loop runs. Raises the error where it is refused."""
        if error.shape in self._apart:
            return True
        if self.policy == "error":  # another one, as those who hold this one are in its traceback: a circle, and the model within
            raise NewShapeError(str(error), error.difference, error.shape, restructured=error.restructured)
        if self.policy == "extend" or (self.policy is None and (self.limited or not self._count)):
            return True
        if self.policy is None and not self._warned:
            self._warned = True
            warn(
                f"{error.difference}; a second new shape is run as the loop would run it, without lowtide: {_REMEDY}, or pass "
                'shapes=lowtide.Shapes(on_new_shape="extend") to have each shape captured, "eager" to be content with this'
            )
        return False

    def _step_apart(self, error: NewShapeError, newest: Family, args: tuple[Any, ...], kwargs: dict[str, Any]) -> S:
        """The step for a shape out of the range, within the same bytes."""
        if error.shape in self._apart:
            self._apart.move_to_end(error.shape)
            return self._apart[error.shape]
        maker = self._maker.for_other_shapes(newest)
        step = self._make(maker, self._spec(args, kwargs), captured(maker.make, args, kwargs, own=self.limited))
        self._count += 1  # not before: where that fails, all is as it was
        self._apart[error.shape] = step
        if len(self._apart) > MOST_SHAPES:
            self._apart.popitem(last=False)
        if self._count == _MANY:
            warn(f"lowtide has captured the step for {_MANY} further shapes of batches: {_REMEDY}")
        return step

    def _of_range(self, error: NewShapeError, newest: Family, args: tuple[Any, ...], kwargs: dict[str, Any]) -> S | None:
        if error.shape in self._ranged:
            return self._ranged[error.shape]
        if error.restructured:  # a range is for one number of leaves
            return None
        if not self._is_in_range(args, kwargs) and not self._guess(newest, args, kwargs):
            return None
        assert self.range is not None, "the batch lies in it"
        if len(self._ranged) >= _MOST_RANGED:
            self._ranged.popitem(last=False)
        family = self.range.known(args, kwargs) or captured(self.range.make, args, kwargs, own=self.limited)
        steps = self._ranged[error.shape] = self._make(self.range, self._spec(args, kwargs), family)
        return steps

    def _is_in_range(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        return self.range is not None and self.range.covers(args, kwargs)

    def _guess(self, newest: Family, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Where ranges are guessed, make one that has this batch, too; whether there is one."""
        if not self.seen:
            return False
        seen, maker = [*self.seen, shapes_of(args, kwargs)], self._maker.for_other_shapes(newest)
        guess = RangeMaker.guessing(maker, seen, args, kwargs)
        if guess is None or not guess.covers(args, kwargs):
            return False
        try:
            guess.make(*detached(args, kwargs))
        except CaptureError as error:
            self.seen = []
            warn(f'dynamic="auto": shapes are captured one by one from here on: {error}')
            return False
        self.seen, self.range = seen, guess
        return True

    def _spec(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> BatchSpec:
        return BatchSpec.of(args, kwargs, self._maker.capturing.device, self._training)
