"""When a step is captured once more: a second look at a program, and an end to captures that come again and again.

A program may read what nobody thought of: its second call shows that, if it changes in each. Later calls are looked at ever more seldom,
and within a hundredth of the time that the steps have taken. A step that has to be captured anew again and again is told of once, and
then left to the caller's own loop.
"""

from __future__ import annotations

import math
from collections import Counter

from lowtide.base.messages import warn

_SHARE = 0.01  # of the time that steps take


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
