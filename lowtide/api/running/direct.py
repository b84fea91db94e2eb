"""A quick way for programs of several generated networks, or of which torch runs a part: what they take for granted is seen at once."""

from __future__ import annotations

from typing import Any

import torch

from lowtide.api.running.looks import Looks
from lowtide.api.running.quick import UNLIKE, Asks
from lowtide.api.running.short import Short


class Direct:
    """Calls on tensors that look as those of one call, as long as all else is unchanged."""

    def __init__(self, looks: Looks, short: Short, unchanged: Asks) -> None:
        self._looks, self._short, self._unchanged = looks, short, unchanged
        self.served = False

    def __call__(self, args: tuple[Any, ...]) -> Any:
        """The result, or UNLIKE, and then nothing ran."""
        if not self._looks.hold(args, {}) or not self._unchanged[0](torch.get_num_threads()) or not self._unchanged[1]():
            return UNLIKE
        self.served = True
        return self._short(args)
