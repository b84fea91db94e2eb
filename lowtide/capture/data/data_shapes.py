"""Operators that have no answer without data: numbers that Python asks for, and results whose shape follows from the data.

Fake tensors cannot answer them. Where what they ask follows from what is there before the step, the example answers
(`capture.data.reader`).
"""

from __future__ import annotations

from collections.abc import Callable
from operator import ge, gt, le, lt
from typing import Any, Protocol

import torch
from torch._ops import OpOverload
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.capture import operators
from lowtide.capture.calls import why_unread, why_unshaped, why_unshaped_in_range
from lowtide.capture.data.checks import check_of_caller
from lowtide.capture.data.reader import Reader, UnreadableError
from lowtide.capture.draft import Arguments, Draft
from lowtide.capture.effects.containers import LeavingError
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError
from lowtide.ir.graph import Arg, Value

_aten = torch.ops.aten
_RELATIONS: dict[str, Callable[[Any, Any], bool]] = {f"aten.{each.__name__}.Scalar": each for each in (lt, le, gt, ge)}


class Recording(Protocol):
    """What is asked of the recorder here."""

    draft: Draft
    reader: Reader

    def record(self, func: OpOverload, *args: Any) -> Any:
        """Call an operator, written down as the program's own calls are."""


def number(recorder: Recording, op: OpOverload, recorded: Arguments, args: tuple[Any, ...]) -> Any:
    """What an operator answers that gives no tensor. Raises CaptureError where only the running step knows, and does more than check it."""
    try:
        return recorder.reader.number(recorder.draft, op, *recorded)
    except UnreadableError as why:
        asks = op is _aten._local_scalar_dense.default and args[0].dtype == torch.bool
        if asks and (certain := _of_draw(recorder, args[0])) is not None:
            return certain
        if asks and (check := check_of_caller()) is not None:
            text = f"the program's own check failed on what this step computed, at {users_line()}, in {check.text}"
            recorder.record(torch.ops.lowtide.require.default, args[0], check.answer, check.error, text)
            return check.answer
        error = LeavingError(why_unread(operators.name_of(op), str(why)))
        error.converts = op is _aten._local_scalar_dense.default and not asks
        raise error from None


def _of_draw(recorder: Recording, flag: torch.Tensor) -> bool | None:
    """The answer to how a number from [0, 1) compares with a rate for which every draw gives the same (a layer drop of 0); else None.

    Of a rate of 0 a draw of exactly 0 is another matter, one in 2 ** 24: each step looks at it, and raises there.
    """
    made = recorder.draft.makers()
    asked = made.get(recorder.draft.value(flag))
    name, rate = ("", None) if asked is None or len(asked.args) != 2 else (asked.op, asked.args[1])
    drawn = None if asked is None or not isinstance(asked.args[0], Value) else made.get(asked.args[0])
    if name not in _RELATIONS or not isinstance(rate, (int, float)) or drawn is None or drawn.op != "aten.rand.default" or 0 < rate < 1:
        return None
    answer = _RELATIONS[name](0.5, rate)
    if answer is not _RELATIONS[name](0, rate):
        text = f"a draw was exactly 0, at {users_line()}, where the program goes another way: call the step again, which draws anew"
        recorder.record(torch.ops.lowtide.require.default, flag, answer, "RuntimeError", text)
    return answer


def results(recorder: Recording, op: OpOverload, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...]) -> Any:
    """Fake results of an operator whose results' shapes follow from data. Raises CaptureError where only the running step knows them."""
    matter = operators.row(op).shaped_by
    given = [arg for at, arg in enumerate(args) if isinstance(arg, Value) and (matter is None or at in matter)]
    varies = not all(isinstance(extent, int) for arg in given for extent in arg.shape)  # those of a batch of a range
    if matter is not None:
        args = tuple(recorder.reader.made_up(arg) if at not in matter and isinstance(arg, Value) else arg for at, arg in enumerate(args))
    try:
        found = recorder.reader.results(recorder.draft, op, args, kwargs)
        if varies:  # only now: where no batch can say it, that is what is told
            raise CaptureError(why_unshaped_in_range(operators.name_of(op)))
        if op is _aten._pack_padded_sequence.default:
            # Whoever takes the packed rows apart again reads how many there are of each step on the host: real numbers, now constants.
            lengths = args[1]
            assert isinstance(lengths, Value), "the operator takes a tensor"
            recorder.reader.values(recorder.draft, operators.name_of(op), lengths)
            return _fake(found[0]), _constant(found[1])
    except UnreadableError as why:
        raise CaptureError(why_unshaped(operators.name_of(op), str(why))) from None
    return tuple(map(_fake, found)) if isinstance(found, tuple) else _fake(found)


def without_masks(recorder: Recording, op: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The arguments of an indexing by masks as those of an indexing by positions, as the operator makes of it; None for others."""
    if op is not _aten.index.Tensor or not any(_is_mask(index) for index in args[1]):
        return None
    positions: list[Any] = []
    for index in args[1]:
        positions += _positions(recorder, index) if _is_mask(index) else [index]
    return args[0], positions


def _positions(recorder: Recording, mask: torch.Tensor) -> list[torch.Tensor]:
    """Where a mask is true: a tensor for each of its dimensions."""
    found = recorder.record(_aten.nonzero.default, mask)
    return [recorder.record(_aten.select.int, found, 1, dim) for dim in range(mask.dim())]


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _constant(real: torch.Tensor) -> torch.Tensor:
    """A real tensor that the program goes on with as a constant."""
    with _disable_current_modes():
        return real.clone()


def _fake(real: torch.Tensor) -> torch.Tensor:
    """A tensor that lies as a real one does; fake, since this runs beneath the recorder."""
    return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=real.device)
