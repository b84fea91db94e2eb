"""Calls that look like an earlier one of the same capture, which are recorded as that one was: layers and optimizers repeat themselves.

What decides how a call is recorded is the operator, how its arguments look (`looks.py`), and whose memory they lie on. The first call of a
look takes the recorder's long way, with all its questions. Where that ends in one node, of one of the kinds that are told apart there, what
it came to is kept. All else takes the long way each time: random draws, tensors whose content is known, sizes that are symbols.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass
from typing import Any

import torch
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.capture import calls
from lowtide.capture.blocks import address
from lowtide.capture.draft import Draft
from lowtide.capture.looks import WRITTEN, NoLookError, ResultLayout, kind_of, layouts_of, look_of
from lowtide.ir.operators.row import Draws


@dataclass(frozen=True, slots=True)
class Repeat:
    layouts: tuple[ResultLayout, ...]  # of its results; of what `form` gives, where there is one
    form: OpOverload | None  # that makes anew what the operator writes into memory of the step's


@dataclass(frozen=True, slots=True)
class RepeatableCall:
    key: Hashable  # what decides how it is recorded
    tensors: list[FakeTensor]  # at least one
    earlier: Repeat | None  # what a call came to that looked the same


class Repeats:
    """What was recorded in one capture, by look."""

    def __init__(self) -> None:
        self._known: dict[Hashable, Repeat] = {}

    def call(self, func: OpOverload, args: tuple[Any, ...], kwargs: dict[str, Any], draft: Draft) -> RepeatableCall | None:
        """A call of which only the look counts; None for any other."""
        if not _is_repeatable(func) or draft.holds_zeros:
            return None
        tensors: list[FakeTensor] = []
        try:
            look_key = look_of(func, args, kwargs, tensors)
        except NoLookError:
            return None
        addresses, memory = list(map(address, tensors)), list(map(draft.memory, tensors))
        if not tensors or None in memory or any(each.constant is not None for each in tensors):
            return None
        key = (look_key, *memory, *(addresses.index(each) for each in addresses))
        return RepeatableCall(key, tensors, self._known.get(key))

    def keep(self, call: RepeatableCall, func: OpOverload, out: Any, form: OpOverload | None, results: list[Any]) -> None:
        """Remember what a call came to. `form` and its `results`: of a call that writes memory of the step's."""
        layouts = layouts_of(func, out, call.tensors)
        if form is not None and layouts is not None:
            layouts = layouts_of(form, results[0], call.tensors) if len(results) == 1 and kind_of(form) not in (None, WRITTEN) else None
        if layouts is not None:
            self._known[call.key] = Repeat(layouts, form)


@functools.cache
def _is_repeatable(func: OpOverload) -> bool:
    row = calls.row(func)
    if kind_of(func) is None or calls.is_over_lists(func) or torch.Tag.nondeterministic_seeded in func.tags:
        return False
    if row.draws not in (Draws.NEVER, Draws.UNKNOWN):
        return False
    return not (row.gradients or row.statistics or row.answers_without_data or row.with_writes or row.rebinds)
