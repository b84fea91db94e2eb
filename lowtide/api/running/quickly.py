"""The quick way of the moment."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, Protocol, TypeVar

_TRIES = 8  # in a row, without a call that went this way


class Way(Protocol):
    """Gives a result for a batch, or UNLIKE; and remembers whether it ever gave one."""

    served: bool

    def __call__(self, args: tuple[Any, ...]) -> Any:
        """The result, or UNLIKE."""


W = TypeVar("W", bound=Way)


class Quickly(Generic[W]):
    """A quick way that is made anew where looks have changed, until that happens too often: then it is not worth making."""

    def __init__(self) -> None:
        self.way: W | None = None
        self._tries = _TRIES

    def renew(self, make: Callable[[], W | None]) -> None:
        """Let the way be what fits the last call."""
        if self.way is not None and self.way.served:
            self._tries = _TRIES
        if self._tries:
            self._tries -= 1
            self.way = make()
        else:
            self.way = None
