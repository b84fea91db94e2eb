"""The quickest way for calls of one generated network: looked at and run by native code, into results that were made before.

A result of some kilobytes is made for several calls at once: what makes a tensor takes as long for eight as for the first.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from lowtide.api.running.short import Short
from lowtide.runtime.networks.calls import Calls
from lowtide.runtime.networks.running import Held
from lowtide.runtime.plain import is_differentiated

Asks = tuple[Callable[[int], bool], Callable[[], bool]]  # of so many threads; and what needs no more than one
UNLIKE = object()  # a call's answer where all is to be looked at by other means
_AHEAD, _MOST_BYTES = 8, 2**14  # results made at once, where one takes at most so much


class Quick:
    """Calls of a program that is one network, on tensors that look as those of one call, as long as all else is unchanged."""

    def __init__(
        self, calls: Calls, run: Held, constants: torch.Tensor, result: Callable[[Sequence[Any]], Any], unchanged: Asks | None
    ) -> None:
        self._calls, self._run, self._constants, self._result, self._unchanged = calls, run, constants, result, unchanged
        self._ready: list[tuple[Any, Any]] = []  # results, and the addresses for a run that leaves them
        self._ahead = _AHEAD if run.result_bytes <= _MOST_BYTES else 1
        self.served = False

    @classmethod
    def of(cls, short: Short, run: Held, constants: torch.Tensor, batch: Sequence[Any], unchanged: Asks | None = None) -> Quick | None:
        """The way for such a batch, with these constants; None where there is none."""
        live = short.alone()
        calls = None if live is None else Calls.of(run, batch, live)
        return None if calls is None else cls(calls, run, constants, short.result, unchanged)

    def __call__(self, args: tuple[Any, ...]) -> Any:
        """The result, or UNLIKE, and then nothing ran."""
        threads = torch.get_num_threads()
        if self._unchanged is not None and not (self._unchanged[0](threads) and self._unchanged[1]()):
            return UNLIKE
        try:
            made = self._ready.pop()
        except IndexError:
            made = self._more()
        result, at = made
        if self._calls(args, at, threads) and not is_differentiated(args):
            self.served = True
            return result
        self._ready.append(made)
        return UNLIKE

    @property
    def ready_bytes(self) -> int:
        """What results that were made before take at most."""
        return (self._ahead - 1) * self._run.result_bytes

    def _more(self) -> tuple[Any, Any]:
        """One to be used now, others for later."""
        with torch.inference_mode(False):  # who uses them may be out of it
            made = [self._run.fresh(self._constants) for _ in range(self._ahead)]
        found = [(self._result(results), at) for results, at in made]
        self._ready.extend(found[1:])
        return found[0]
