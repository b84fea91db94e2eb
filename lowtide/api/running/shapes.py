"""What a step does with a batch of another shape: a program of its own, the caller's own loop, or an error."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

from lowtide.base.messages import warn
from lowtide.runtime.batch import NewShapeError, Shape

S = TypeVar("S")
POLICIES = ("extend", "eager", "error")
MOST_SHAPES = 32  # programs for so many shapes are kept; of more, that one goes which was not met for longest
_MANY = 4
_REMEDY = "pad or bucket batches so that few shapes are left (a loader with drop_last=True gives one size of batches)"


class StepsByShape(Generic[S]):
    """Steps by the shape of their batches, beside that which a step was made for.

    policy: "extend" makes a step for each shape, "eager" runs the caller's loop, "error" refuses. None makes one, for the tail of an
    epoch, and then runs the caller's loop with a warning; under a limit, which that loop would not keep, it makes a step for each.
    """

    def __init__(self, policy: str | None, *, limited: bool) -> None:
        self.policy, self._limited = policy, limited
        self._made: OrderedDict[Shape, S] = OrderedDict()
        self._count = 0  # that were ever made
        self._warned = False

    def find(self, error: NewShapeError, make: Callable[[], S]) -> S | None:
        """The step for a shape; None where the caller's own loop is to run. Raises the error where new shapes are refused."""
        if error.shape in self._made:
            self._made.move_to_end(error.shape)
            return self._made[error.shape]
        if self.policy == "error":
            raise error
        if self.policy == "eager" or (self.policy is None and not self._limited and self._count):
            self._warn_eager(error)
            return None
        return self.made(error, make)

    def made(self, error: NewShapeError, make: Callable[[], S]) -> S:
        """The step for a shape, whatever the policy says."""
        if error.shape not in self._made:
            step = make()  # first: where that fails, all is as before
            self._count += 1
            self._made[error.shape] = step
            if len(self._made) > MOST_SHAPES:
                self._made.popitem(last=False)
            if self._count == _MANY:
                warn(f"lowtide has captured the step for {_MANY} further shapes of batches: {_REMEDY}")
        return self._made[error.shape]

    def _warn_eager(self, error: NewShapeError) -> None:
        if self.policy is None and not self._warned:
            self._warned = True
            warn(
                f"{error.difference}; a second new shape is run as the loop would run it, without lowtide: {_REMEDY}, or pass "
                'shapes=lowtide.Shapes(on_new_shape="extend") to have each shape captured, "eager" to be content with this'
            )
