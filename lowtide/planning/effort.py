"""How far to look under a limit, in three levels of which each holds all that the one before finds: more effort is never worse."""

from __future__ import annotations

from enum import Enum

from lowtide.remat.sweep.search import Sweep

_SWEEPS = {"quick": Sweep(max_states=600), "normal": Sweep(max_states=6000, max_runs=6_000_000), "thorough": Sweep()}


class Effort(str, Enum):
    """A level. Effort is counted in schedules that are built and costed, and reads no clock."""

    QUICK = "quick"
    NORMAL = "normal"
    THOROUGH = "thorough"

    @classmethod
    def of(cls, given: str | Effort) -> Effort:
        """What a user wrote. Raises ValueError, which says what is expected."""
        try:
            return cls(given)
        except ValueError:
            names = ", ".join(repr(level.value) for level in cls)
            raise ValueError(f"effort: expected one of {names}, got {given!r}; `search=lowtide.Sweep(...)` says more") from None

    @property
    def sweeps(self) -> tuple[Sweep, ...]:
        """The searches of this level and of those below, the quickest first; all that they find is put together."""
        levels = list(Effort)
        return tuple(_SWEEPS[level.value] for level in levels[: levels.index(self) + 1])


def sweeps_of(effort: str | Effort | None, search: Sweep | None) -> tuple[Sweep, ...]:
    """The searches that are asked for: those of a level, the middle one where nothing is said, or one of the caller's own.

    Raises TypeError where both are given, ValueError for what is no level.
    """
    if search is None:
        return Effort.of(Effort.NORMAL if effort is None else effort).sweeps
    if effort is not None:
        raise TypeError("effort and search: expected one of them, got both; a Sweep says all that a level does")
    return (search,)
