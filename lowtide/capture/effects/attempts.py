"""Attempts at a capture that follows what the program puts outside, until one knows what has to be followed.

The first is a plain one. Later ones have stand-ins for all containers, then for those alone that the program changes; where that is
refused, numbers that it sums up in attributes are followed as well.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, TypeVar

from lowtide.base.places import Position
from lowtide.capture.care.failures import is_users_own
from lowtide.capture.care.leaks import NAMELESS
from lowtide.capture.effects.outputs import CountedPlace, Key, OutputRecorder, survive
from lowtide.capture.effects.search import conversions_followed
from lowtide.capture.effects.stand_ins import DrawnError, LeavingError, StaleError
from lowtide.capture.results import DEPENDS
from lowtide.errors import CaptureError

T = TypeVar("T")


def with_leaving(capture: Callable[..., T], roots: Iterable[Any], *, at_once: bool, sizes: bool, numbers: Iterable[Position]) -> T:
    """A capture; where it is refused, or `at_once`, one that follows what the program puts outside.

    `capture` takes a recorder of what the program puts outside, and `names`: whether its refusals search for the holder of a tensor, which
    takes time, and so is done in the last attempt alone. That one is told why others have failed. `sizes`: the batch has symbolic ones,
    which may be converted. `numbers`: places where each step finds another number, which the program may compute with.
    """
    roots = list(roots)
    with conversions_followed(roots) if sizes else nullcontext():
        varying: dict[Key, CountedPlace] = {
            (id(place.holder), place.name): CountedPlace(lambda: None, True) for place in numbers if type(place.own()) in (int, float)
        }
        if varying:
            with suppress(CaptureError):
                return _Attempts(partial(_asking, capture, tuple(varying)), roots, names=False, counted=varying, converts=True).result()
        return _with_leaving(capture, roots, at_once)


def _asking(capture: Callable[[OutputRecorder | None, bool], T], keys: Iterable[Key], leaving: OutputRecorder | None, names: bool) -> T:
    """A capture that asks for the numbers of these places in each step: one that does not has them for constants."""
    captured = capture(leaving, names)
    if leaving is None or not all(map(leaving.asks, keys)):
        raise CaptureError("a number that varies is not met where it lies")
    return captured


def _with_leaving(capture: Callable[..., T], roots: list[Any], at_once: bool) -> T:
    if at_once:
        return _Attempts(capture, roots, names=True).result()
    try:
        return capture(None, False)
    except LeavingError as error:
        plain = str(error)
    why = close = ""
    try:
        return _Attempts(capture, roots, names=False, plain=plain).result()
    except StaleError as error:
        why = f"{error}. Or return it from loss() or after_backward(): `value, norm = step(...)`"
    except CaptureError as error:
        if is_users_own(error):
            raise
        close = "" if str(error) == plain or str(error).startswith(NAMELESS) else str(error).removeprefix(DEPENDS)
    try:
        return capture(None, True, close)
    except LeavingError as error:
        what = re.split("; (a captured step would not put|use torch.where)", str(error))[0]  # the remedy is another where more is known
        text = f"{what}. It cannot be put there by each step: {why}" if why else f"{error}. More closely: {close}" if close else str(error)
        if isinstance(error, DrawnError):
            text = why or close or text
        raise CaptureError(text) from error.__cause__


@dataclass
class _Attempts(Generic[T]):
    """A capture that follows what the program puts outside; where it is refused, or some are `counted`, one that follows its sums, too."""

    capture: Callable[[OutputRecorder | None, bool], T]
    roots: list[Any]
    names: bool  # whether refusals search for the holder of a tensor
    plain: str | None = None  # what an attempt without stand-ins said, which one with fewer than all would say: such a failure is final
    counted: dict[Key, CountedPlace] = field(default_factory=dict)  # what the program has changed that later attempts may follow
    converts: bool = False  # whether it makes Python's numbers of tensors

    def result(self) -> T:
        """Each attempt says which attributes are sums.

        Where all fail, the first refusal is told, unless a later one says more: an error of the user's own code, or why what the program
        puts outside cannot be followed.
        """
        refusal: CaptureError | None = None
        tried = bool(self.counted)
        while True:
            self._put_back()
            summed, converts = dict(self.counted), self.converts
            try:
                captured = self._followed(summed)
            except CaptureError as error:
                captured, self.converts = None, converts or getattr(error, "converts", False)
                its_own = is_users_own(error) and not isinstance(error.__cause__, NameError)  # which reads a variable that was taken away
                better = isinstance(error, StaleError) or isinstance(refusal, LeavingError)
                if refusal is None or its_own or better:
                    refusal = error
            learned = not self.counted.keys() <= summed.keys() or self.converts is not converts
            if (captured is not None and not (summed and learned)) or (tried and not learned):
                break
            tried = not learned  # what an attempt fills (the cache of a logger) the next one finds: with what is known it has a second try
        if captured is None:
            self._put_back()
            assert refusal is not None, "the last attempt has failed"
            try:
                raise refusal
            finally:
                del refusal  # its traceback holds this frame: a circle, and the model within
        refusal = None
        return captured

    def _put_back(self) -> None:
        for each in self.counted.values():
            each.put_back()

    def _followed(self, summed: dict[Key, CountedPlace]) -> T:
        """Until there are stand-ins for nothing but what the program changes: all else has to be what it is, in its class as well.

        A failure is final, too, where it tells of sums that are not followed yet, as the next attempt then follows them. Once more where
        numbers or texts are put outside: what is another one in each step (a clock) would be there as it was in the capture.
        """
        chosen: frozenset[int] | None = None
        words: list[tuple[str, ...]] = []
        known_why: StaleError | None = None
        while True:
            leaving, captured, failed = OutputRecorder(chosen, summed, self.converts), None, None
            try:
                with leaving.in_place(self.roots):
                    captured = self.capture(leaving, self.names)
            except CaptureError as error:
                failed = error
            finally:
                known_why = known_why or leaving.missed
                leaving.refusals.clear()
                for key, place in leaving.counted.items():
                    self.counted.setdefault(key, place)
                for container in leaving.all():
                    container.forget()
                    container.stand_in = container.items = None
            narrower = leaving.changing
            if captured is None and len(unread := leaving.unread()) < len(leaving.containers):
                narrower = unread
            if captured is not None and survive(leaving.befores):
                raise StaleError("it keeps what an earlier step has left in an attribute where that is not found")
            learned = self.counted.keys() > summed.keys() or (not self.converts and getattr(failed, "converts", False))
            final = failed is not None and (learned or str(failed) == self.plain)
            if len(narrower) < len(leaving.containers) and not final:
                chosen = narrower
            elif failed is not None:
                try:
                    raise known_why or failed
                finally:
                    del failed, known_why  # as in `result`
            else:
                assert captured is not None, "it was captured, or has failed"
                words.append(leaving.words)
                if words[0] != words[-1]:
                    raise StaleError(f"it puts something else there each time: {words[0]} and {words[-1]}")
                if len(words) == 2 or not leaving.puts_plain:
                    return captured
