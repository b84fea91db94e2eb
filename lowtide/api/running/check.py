"""When a step is captured once more, to see that it still is what the program does.

A program may read what nobody thought of: its second call shows that, if it changes in each. Later calls are looked at ever more seldom,
and within a hundredth of the time that the steps have taken.
"""

from __future__ import annotations

import math

POLICIES = ("auto", "always", "never")
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
