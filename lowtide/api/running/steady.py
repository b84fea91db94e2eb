"""The short way for calls of generated kernels: where nothing has changed since the last call, that is seen at once.

A network of a millisecond cannot wait for all that a call looks up otherwise. What the program takes for granted is compared by
identity, as always; the constants of regions by what their networks remember of them, who are not given them again; tensors of the batch
by their looks. All else goes the long way. A frozen function takes this way alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lowtide.api.running.direct import Direct
from lowtide.api.running.looks import Looks
from lowtide.api.running.quick import UNLIKE, Quick
from lowtide.api.running.quickly import Quickly
from lowtide.api.running.short import Short
from lowtide.api.running.variant import Variant
from lowtide.runtime.caller import View
from lowtide.runtime.compiler import NativeError
from lowtide.runtime.networks.running import SPIN_US
from lowtide.runtime.networks.watched import Unchanged


class Steady:
    """One variant on what it ran on last."""

    def __init__(self, variant: Variant, inputs: Sequence[Any], batch: Sequence[Any]) -> None:
        self._granted, self._looks = variant.granted, Looks(batch)
        self._networks = variant.networks
        self._short = Short(variant, inputs, {name: network.again for name, network in variant.networks.items()})
        self._quickly: Quickly[Quick | Direct] = Quickly()

    @classmethod
    def of(cls, variant: Variant, inputs: Sequence[Any], now: View, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Steady | None:
        """The short way for calls like this one; None where there is none."""
        plain = not kwargs and len(args) == len(now.batch)
        same = plain and all(arg is leaf for arg, leaf in zip(args, now.batch, strict=True))
        return cls(variant, inputs, args) if same and is_free(variant) and Looks(args).hold(args, kwargs) else None

    def __call__(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """The result; UNLIKE for a call that may not go this way."""
        quick = self._quickly.way
        if quick is not None and not kwargs and (found := quick(args)) is not UNLIKE:
            return found
        if not self._looks.hold(args, kwargs) or not self._granted.unmoved():
            return UNLIKE
        result = self._short(args)
        self._quickly.renew(lambda: self._quick(args))
        return result

    def _quick(self, args: tuple[Any, ...]) -> Quick | Direct | None:
        """The quickest way for calls like this one, and what it takes for granted."""
        watch, networks = self._granted.watch, {name: network.packed() for name, network in self._networks.items()}
        words, kept = None if watch is None else watch.words, [each for each in networks.values() if each is not None]
        if watch is None or words is None or len(kept) != len(networks) or not self._granted.unmoved():  # since the words were read
            return None
        beside = self._granted.beside.unmoved
        try:
            unchanged = Unchanged(words, [each.seen for each in kept], kept[0].held.team, SPIN_US)
        except NativeError:
            return None
        if len(kept) == 1 and self._short.alone() is not None:
            return Quick.of(self._short, kept[0].held, kept[0].constants, args, (unchanged, lambda: beside() and watch.meaning_same()))
        short = self._short.on({name: each.held for name, each in networks.items() if each is not None})
        return Direct(self._looks, short, (unchanged, lambda: beside() and watch.rest_same()))


def is_free(variant: Variant) -> bool:
    """Whether nothing but tensors decides what a program of generated kernels does, and it leaves nothing but its result."""
    captured, program = variant.captured, variant.program
    bound = captured.assigned or captured.guards or captured.readings or variant.shape is not None or program.gradients or program.host
    return bool(variant.networks) and not bound and len(variant.networks) == len(program.regions)
