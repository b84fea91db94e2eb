"""Which program a call runs: one that was captured before, or one that is captured for it; and whether it is still the caller's program.

A program may read what nobody thought of: its second call shows that, if it changes in each. Later calls are looked at ever more seldom,
and within a hundredth of the time that the steps have taken. A step that has to be captured anew again and again is told of once, and
then left to the caller's own loop.
"""

from __future__ import annotations

import dataclasses
import math
import time
from collections import Counter
from collections.abc import Iterator, Sequence, Set
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

from lowtide.api.home import send_home
from lowtide.api.maker import Family, StepMaker, captured
from lowtide.api.other_shapes import read_unlike
from lowtide.api.range_maker import RangeMaker
from lowtide.api.variant import Variant
from lowtide.base.messages import warn
from lowtide.capture.batches import can_stand_in
from lowtide.capture.care.failures import programs_own
from lowtide.capture.care.turns import turn
from lowtide.capture.data.facts import Facts, brief
from lowtide.errors import CaptureError, StepError
from lowtide.runtime.batch import BatchSpec, NewShapeError, OtherValueError, described, shape_of
from lowtide.runtime.caller import ChangedError, View

_UNSEEN = (
    "lowtide has not seen what it reads there change, so calls since may have been of the old program. It is captured anew; "
    'hand it over as a tensor of the batch, or in an attribute of an object (Run(check="always") looks at each call)'
)
_COUNTS = (
    "a captured step would not count on: from here on steps run as the loop would run them, without lowtide; count outside of the step"
)
_MOST_EARLIER = 40  # captures that are remembered
_SHARE = 0.01  # of the time that steps take


class Prepared(NamedTuple):
    variant: Variant
    inputs: list[Any]
    now: View  # what the caller holds


class Lookup:
    """The programs of a step for batches of one shape: finds that for what the caller holds, and has it captured where there is none."""

    def __init__(
        self, maker: StepMaker | RangeMaker, batch: BatchSpec, family: Family, check: str, obstacle: str, *, limited: bool
    ) -> None:
        """`check` as in `Run`. `obstacle`: why nothing can run. `limited`: the caller's own loop would not do what is asked for."""
        self._maker, self.batch, self.check_policy, self._obstacle, self._limited = maker, batch, check, obstacle, limited
        self._caller, self._peers, program = maker.capturing.caller, maker.capturing.peers, maker.capturing.program
        self._between_steps = program is not None and program.between_steps
        self.families = [family]  # the one whose plan is shown first, then newest first
        self.current = family.variants[-1]  # that ran last
        self._recaptures = Recaptures()
        self._checks = dict[int, SecondLook]()  # by family
        self.check = self._check_of(family)  # of the family that runs
        self._stale: set[int] = set()  # families that the program is not any more, though nothing was seen to change
        self._unseen = ""  # what changes unseen again and again: then the caller's own loop runs
        self._why = ""  # it runs this once

    @property
    def main(self) -> Variant:
        """What most steps run; the first step of most optimizers, which makes their state, is another program."""
        return self.families[0].variants[-1]

    def prepared(self, args: tuple[Any, ...], kwargs: dict[str, Any], *, always: bool) -> Prepared | NewShapeError | None:
        """What runs for a call, captured now where there is none; for a batch of another shape what is told of that, where it is refused.

        None where the caller's own loop is to run, which `always` is never so.
        """
        self._why = ""
        with self._turn():
            looked_up = self._looked_up(args, kwargs)
            if isinstance(looked_up, NewShapeError):
                return looked_up
            now, chosen = looked_up
            if self._unseen and not always:
                return None
            if isinstance(chosen, tuple):
                self._recaptures.none()
            else:
                if not self._recaptures.allows(chosen or self._change(now), always=always):
                    self._unseen = chosen if self._is_stale(self.current) else ""
                    return None
                try:
                    self._capture(args, kwargs)
                except CaptureError as error:
                    its_own = programs_own(error)
                    if always or self._peers.several or (its_own is None and not self.current.captured.outputs.conditions):
                        raise its_own or error from error.__cause__
                    # It goes a way that only some steps go, or fails: then all is done that comes before.
                    self._why = f"this call runs as the loop would run it, without lowtide, as it cannot be captured: {error}"
                    return None
                chosen = self.find(now)
            if not isinstance(chosen, tuple):
                why = chosen or "is the optimizer's state changed by another thread?"
                raise StepError(f"the step was captured anew, but not for what the model and the optimizer hold now: {why}")
            self.current = chosen[0]
            return Prepared(*chosen, now)

    def tell(self) -> None:
        """Warn of what kept the last call from being captured, now that the caller's own loop has run, and has not failed."""
        if self._why:
            warn(self._why)

    def find(self, now: View) -> tuple[Variant, list[Any]] | str:
        """The program for what the caller holds now, and its inputs; its family becomes the first. Else what looks otherwise."""
        facts, changed = Facts(now.read), ""
        for variant in (self.current, *(each for each in self._variants() if each is not self.current)):
            if not variant.fits(now, facts) or (self._stale and self._is_stale(variant)):
                continue
            try:
                inputs = variant.inputs(now)
            except ChangedError as error:
                changed = changed or str(error)
                continue
            self._show(variant)
            return variant, inputs
        return changed

    def _show(self, variant: Variant) -> None:
        """Make the family of a variant the one whose plan is shown."""
        if variant is not self.current and (family := self._family_of(variant)) is not self.families[0]:
            self.families = [family, *(other for other in self.families if other is not family)]

    def _turn(self) -> AbstractContextManager[object]:
        """While this lasts what the caller holds is what it is. Processes wait for one another, each of them for one step alone."""
        return nullcontext() if self._peers.several else turn()

    def _looked_up(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[View, tuple[Variant, list[Any]] | str] | NewShapeError:
        """What the caller holds now, and what `find` finds for it; processes that train together go on only where all go the same way."""
        try:
            leaves = self._leaves_of(args, kwargs)
            if self._obstacle:
                raise StepError(self._obstacle)
            self._maker.capturing.check_wrapper()
            self._caller.begin_step()
            now = self._caller.view(leaves)
            chosen = self.find(now)
            if isinstance(chosen, str) and self._between_steps and send_home(now, self._variants()):
                chosen = self.find(now)
            if isinstance(chosen, tuple) and not self._unseen:
                chosen = self._looked_again(chosen[0], args, kwargs) or chosen
        except NewShapeError as error:
            self._peers.meet(f"a new program for {described(error.shape)}")
            return error.with_traceback(None)  # which holds the frames of this call, and the model within
        except Exception as error:
            self._peers.refuse(error)
            raise
        if self._peers.several:
            which = "a new program" if isinstance(chosen, str) else f"program {self._number(chosen[0])}"
            self._peers.meet(f"{which} for {described(shape_of(args, kwargs))}", lambda: self._read_there(now))
        return now, chosen

    def _read_there(self, now: View) -> str:
        """What this process reads otherwise, as others are told."""
        return f" ({read} there)" if (read := read_unlike(now, self._variants(), brief)) else ""

    def _capture(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Capture the program as it is now; it becomes the one whose plan is shown."""
        self._maker.capturing.note_numbers(self.current.premises.other_numbers())
        number = 1 + max(family.number for family in self.families)
        new = dataclasses.replace(captured(self._maker.make, args, kwargs, own=False), number=number)
        self.families = [new, *self.families[:_MOST_EARLIER]]
        if self.batch.unread and self._reads(args, kwargs, self.batch.unread_in(args, kwargs)):
            # It may read what the others did not: then it is for the values of this batch.
            self.batch = BatchSpec.of(args, kwargs, self._maker.capturing.device, self.batch.training)
        self._check_of(new).begin()

    def _change(self, now: View) -> str:
        last = [family.variants[-1] for family in self.families]
        return read_unlike(now, [each for each in last if each.premises.holds()]) or self.current.premises.change()

    def _leaves_of(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Sequence[Any]:
        """The leaves of a batch; of those that are no tensors the program reads none that may differ."""
        try:
            return self.batch.leaves_of(args, kwargs)
        except OtherValueError:
            others = self.batch.other_values(args, kwargs)
            if self._peers.several or not all(map(can_stand_in, others.values())) or self._reads(args, kwargs, others.keys()):
                raise
        self.batch = self.batch.with_unread(others)
        return self.batch.leaves_of(args, kwargs)

    def _reads(self, args: tuple[Any, ...], kwargs: dict[str, Any], where: Set[str]) -> bool:
        return not isinstance(self._maker, StepMaker) or self._maker.reads(args, kwargs, where)

    def _looked_again(self, variant: Variant, args: tuple[Any, ...], kwargs: dict[str, Any]) -> str:
        """Where a look is due: what the program does otherwise than when it was captured, though nothing was seen to change; else ""."""
        check = self.check = self._check_of(self.families[0])
        if not isinstance(self._maker, StepMaker) or not check.due():
            return ""
        began = time.perf_counter()
        difference, counts = self._maker.difference(variant.captured, args, kwargs)
        since = check.took(time.perf_counter() - began)
        if difference:
            if not self._stale:
                warn(f"{since}: {difference}; {_COUNTS if counts and not self._limited else _UNSEEN}")
            self._stale.add(self.families[0].number)
            self._unseen = difference if counts else ""
        return difference

    def _check_of(self, family: Family) -> SecondLook:
        return self._checks.setdefault(family.number, SecondLook(self.check_policy, timed=not self._peers.several))

    def _variants(self) -> Iterator[Variant]:
        return (variant for family in self.families for variant in family.variants)

    def _family_of(self, variant: Variant) -> Family:
        return next(family for family in self.families if variant in family.variants)

    def _is_stale(self, variant: Variant) -> bool:
        return any(variant in family.variants for family in self.families if family.number in self._stale)

    def _number(self, variant: Variant) -> str:
        """Which of the programs a variant is, as on all ranks."""
        family = self._family_of(variant)
        return f"{family.number}.{family.variants.index(variant)}"


class SecondLook:
    """Of one captured program. `timed`: later looks keep to their share of time; not for several processes, which look together."""

    def __init__(self, policy: str, *, timed: bool) -> None:
        self._always, self._timed = policy == "always", timed
        self._calls, self._at = 0, math.inf if policy == "never" else 2
        self._seen = 1
        self._spent_s, self._last_s, self._steps_s = 0.0, 0.0, 0.0

    def due(self) -> bool:
        """Whether the call that comes now is to be looked at. Asked once by each call."""
        self._calls += 1
        return self._is_due(self._calls)

    def begin(self) -> None:
        """The call that comes now is the first one: the program was captured for it."""
        self._calls = 1

    @property
    def comes(self) -> bool:
        """Whether a look is due at the call that comes next; where none is, that counts as one."""
        if self._is_due(self._calls + 1):
            return True
        self._calls += 1
        return False

    def took(self, seconds: float) -> str:
        """A look took so long. Since when the program may have been another, in words."""
        before, self._seen, self._last_s = self._seen, self._calls, seconds
        if self._at > 2:  # that at the second call is part of making the step
            self._spent_s += seconds
        self._at = 2 if self._always else 2 * self._calls - 1
        return f"the program is not what it was {self._calls - before} calls ago"

    def ran(self, seconds: float) -> None:
        self._steps_s += seconds

    def _is_due(self, call: int) -> bool:
        if call < self._at:
            return False
        first = self._at == 2 or self._always or not self._timed
        return first or self._spent_s + self._last_s <= _SHARE * self._steps_s


_IN_A_ROW = 3  # captures for one cause
_SETTLED = 8  # calls in a row that found their programs: a row is over
_MOST_CAUSES = 4096
_REMEDY = "keep what changes from step to step in a buffer or in a tensor of the batch, or where the program does not read it"


class Recaptures:
    """Whether a call for which there is no program is captured.

    Where one cause has had three calls in a row captured, it is captured no more, but for what comes again: programs for that serve.
    """

    def __init__(self) -> None:
        self._place, self._in_a_row, self._found = "", 0, 0
        self._given_up: set[str] = set()  # causes
        self._met: Counter[str] = Counter()

    def none(self) -> None:
        self._found += 1
        if self._found >= _SETTLED:
            self._in_a_row = 0

    def allows(self, change: str, *, always: bool) -> bool:
        """Whether a call is to be captured, because of `change`: "attribute 'rate' of 'head' was 1.0 and is 2.0".

        Warns where a cause is given up. `always`: nothing else than a capture can serve the call.
        """
        self._found = 0
        place = change.partition(" was ")[0].partition(" gives ")[0].partition(" has changed")[0]
        if place in self._given_up:
            return always or self._comes_again(change)
        self._in_a_row = self._in_a_row + 1 if place == self._place else 1
        self._place = place
        if self._in_a_row <= _IN_A_ROW:
            return True
        self._given_up.add(place)
        self._met[change] += 1
        then = "each call is captured anew" if always else "calls that no program is for run as the loop would run them, without lowtide"
        why = f": {change}" if change else ""
        warn(f"lowtide has captured the step anew in {_IN_A_ROW} calls in a row{why}. From here on {then}; {_REMEDY}")
        return always

    def _comes_again(self, change: str) -> bool:
        """Whether what is there now was met before: at its second time, its fourth, its eighth, as it may only read alike."""
        if len(self._met) >= _MOST_CAUSES:
            self._met.clear()
        self._met[change] += 1
        count = self._met[change]
        return count > 1 and count & (count - 1) == 0
