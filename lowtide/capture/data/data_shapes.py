"""Operators that have no answer without data: numbers that Python asks for, and results whose shape follows from the data.

Fake tensors cannot answer them. Where what they ask follows from what is there before the step, the example answers
(`capture.data.facts`).

Questions that the program asks only to raise: `if not valid.all(): raise ValueError(...)`, `assert not loss.isnan()`. Where nobody can know
the answer before the step, and the other one leads to nothing but an exception, the program goes on with the one that raises nothing, and
each step looks at it, at its place, by an operator that raises in the program's stead. So distributions check what a network gives them,
and losses their arguments. Which way leads where is read from the bytecode of the function that asks. Where a step fails so
the caller's own loop runs (`api/step.py`).
"""

from __future__ import annotations

import builtins
import dis
import inspect
import itertools
import linecache
import sys
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from operator import ge, gt, le, lt
from types import CodeType, FrameType
from typing import Any, TypeAlias

import torch
from torch._ops import OpOverload
from torch.distributions import constraints
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.capture import calls
from lowtide.capture.calls import why_unread, why_unshaped, why_unshaped_in_range
from lowtide.capture.data.facts import UnreadableError
from lowtide.capture.draft import CallArguments
from lowtide.capture.effects.stand_ins import LeavingError
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError
from lowtide.ir.graph import Arg, Value

_JUMPS = frozenset((*dis.hasjrel, *dis.hasjabs))
_LEAVES = ("RETURN", "YIELD", "SEND", "INSTRUMENTED")  # other ends of a function than raising, as opcodes begin


@dataclass(frozen=True)
class DataCheck:
    """The answer with which the program goes on, and what it raises otherwise."""

    answer: bool
    error: str  # the name of an exception of Python's own
    text: str


def check_of_caller() -> DataCheck | None:
    """What the function that asks for a yes or no does with it, if all that it does is to raise; None where it does anything else."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None and _is_machinery(frame.f_globals.get("__name__", "")):
        frame = frame.f_back
    return None if frame is None else _check_at(frame)


def _is_machinery(module: str) -> bool:
    """Whether a module passes calls on: the recorder, or torch between the program and it."""
    return module.startswith(("lowtide.", "torch._", "torch.utils._")) or module == "torch.overrides"


def _check_at(frame: FrameType) -> DataCheck | None:
    if frame.f_code.co_filename == constraints.__file__:
        return DataCheck(True, "ValueError", _where(frame))  # whoever has a constraint checked raises where any of it does not hold
    branch = _branch(frame)
    if branch is None:
        return None
    frame, code, at, as_asked = branch
    jump = code.instructions[at]
    ways = {"IF_TRUE" in jump.opname: code.raised(code.index[jump.argval]), "IF_TRUE" not in jump.opname: code.raised(at + 1)}
    raising = [answer for answer, names in ways.items() if names is not None]
    return DataCheck(raising[0] is not as_asked, _error(ways[raising[0]] or (), frame), _where(frame)) if len(raising) == 1 else None


def _branch(frame: FrameType) -> tuple[FrameType, _Code, int, bool] | None:
    """The function that branches upon the answer, its code, where, and whether by the answer itself or by its `not`; functions that only
    return the answer, or its `not`, hand it on."""
    code, as_asked = _Code(frame.f_code), True
    at = code.after_question(frame.f_lasti, frame.f_globals)
    while at is not None:
        after = code.instructions[at]
        if after.opname == "UNARY_NOT":
            at, as_asked = at + 1, not as_asked
        elif after.opname == "TO_BOOL":
            at += 1
        elif after.opname == "JUMP_FORWARD":
            at = code.index[after.argval]
        elif after.opname == "RETURN_VALUE" and frame.f_back is not None:
            function, frame = frame.f_code, frame.f_back
            code = _Code(frame.f_code)
            at = code.after_call(frame.f_lasti, function)
        else:
            branches = after.opname.startswith("POP_JUMP") and "NONE" not in after.opname
            return (frame, code, at, as_asked) if branches else None
    return None


def _where(frame: FrameType) -> str:
    return f"{frame.f_code.co_name}: {linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()}{_subject(frame)}"


def _subject(frame: FrameType) -> str:
    names = frame.f_locals
    rule = names.get("constraint", names.get("support"))
    while (within := getattr(rule, "base_constraint", None)) is not None:
        rule = within
    if not isinstance(rule, constraints.Constraint):
        return ""
    return f" ({names.get('param', 'value')} of {type(names.get('self')).__name__}, expected {type(rule).__name__.strip('_')})"


class _Code:
    """The instructions of a function, by number."""

    def __init__(self, code: CodeType) -> None:
        self.instructions = list(dis.get_instructions(code))
        self.index = {instruction.offset: at for at, instruction in enumerate(self.instructions)}

    def after_question(self, offset: int, names: Mapping[str, Any]) -> int | None:
        """What follows a question at an offset: by a tensor's truth, its `item()`, or `bool`, which `names` may have as another's."""
        at = self.index.get(offset)
        if at is None:
            return None
        at += self.instructions[at].opname == "PRECALL"  # of Python 3.11, where a call that was made often is made at once
        if self.instructions[at].opname.startswith("CALL"):
            of_tensor = "item" in [instruction.argval for instruction in self.instructions[max(0, at - 3) : at]]
            return at + 1 if of_tensor or ("bool" not in names and self._called(at) == ["bool"]) else None
        # Python 3.13 compares and asks at once
        return at + 1 if self.instructions[at].opname == "COMPARE_OP" else at

    def after_call(self, offset: int, function: CodeType) -> int | None:
        """What follows the call of a function that runs, if it is called by its name here; Python 3.11 stands at the end of the call."""
        at = bisect_right(self.instructions, offset, key=lambda each: each.offset) - 1
        at += self.instructions[at].opname == "PRECALL"
        makes_it = not function.co_flags & (inspect.CO_GENERATOR | inspect.CO_COROUTINE)
        return at + 1 if makes_it and self._called(at)[-1:] == [function.co_name] else None

    def _called(self, at: int) -> list[str]:
        """The names that lead to what is called there: `["self", "is_bad"]`; none where nothing is called."""
        call = self.instructions[at]
        if not call.opname.startswith("CALL"):
            return []
        first, left = at, dis.stack_effect(call.opcode, call.arg, jump=False)
        while left < 1 and first:  # a call and its arguments leave one value
            first -= 1
            left += dis.stack_effect(self.instructions[first].opcode, self.instructions[first].arg, jump=False)
        loads = (each for each in self.instructions[first:at] if each.opname != "PUSH_NULL")
        begins = [*itertools.islice(loads, 1)]
        names = itertools.takewhile(lambda each: each.opname in ("LOAD_ATTR", "LOAD_METHOD"), loads)
        return [each.argval for each in (*begins, *names)]

    def raised(self, start: int) -> tuple[str, ...] | None:
        """The names that are loaded from an instruction on, if every way from there ends by raising."""
        seen: dict[int, None] = {}
        pending = [start]
        while pending:
            at = pending.pop()
            if at in seen:
                continue
            seen[at] = None
            if self.instructions[at].opname.startswith(_LEAVES):
                return None
            pending += self._next(at)
        return tuple(self._loaded(sorted(seen)))

    def _next(self, at: int) -> Iterator[int]:
        instruction = self.instructions[at]
        if instruction.opname in ("RAISE_VARARGS", "RERAISE") or self._exits(at):
            return
        if instruction.opcode in _JUMPS:
            yield self.index[instruction.argval]
        if not instruction.opname.startswith("JUMP_") or "IF" in instruction.opname:
            yield at + 1

    def _exits(self, at: int) -> bool:
        """Whether this is a call of `sys.exit(1)`, which ends the process as an exception with a text does."""
        before = [each.argval for each in self.instructions[max(0, at - 4) : at] if each.opname not in ("PRECALL", "PUSH_NULL")]
        return self.instructions[at].opname.startswith("CALL") and before[-3:] == ["sys", "exit", 1]

    def _loaded(self, places: list[int]) -> Iterator[str]:
        for at in places:
            if self.instructions[at].opname == "LOAD_ASSERTION_ERROR":
                yield "AssertionError"
            elif self._exits(at):
                yield "SystemExit"
            elif self.instructions[at].opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                yield self.instructions[at].argval


def _error(names: tuple[str, ...], frame: FrameType) -> str:
    """The first exception among the names, or the one of Python's own that it is made of."""
    for name in names:
        error: Any = frame.f_globals.get(name, getattr(builtins, name, None))
        if isinstance(error, type) and issubclass(error, BaseException):
            return next(base.__name__ for base in error.__mro__ if base.__module__ == "builtins")
    return "RuntimeError"


_aten = torch.ops.aten
_RELATIONS: dict[str, Callable[[Any, Any], bool]] = {f"aten.{each.__name__}.Scalar": each for each in (lt, le, gt, ge)}


Recording: TypeAlias = Any  # the `Recorder`, of which its draft, its reader and `record` are asked


def number(recorder: Recording, op: OpOverload, recorded: CallArguments, args: tuple[Any, ...]) -> Any:
    """What an operator answers that gives no tensor. Raises CaptureError where only the running step knows, and does more than check it."""
    try:
        return recorder.reader.answer(recorder.draft, "number", op, _that_matter(recorder, op, recorded[0]), recorded[1])
    except UnreadableError as why:
        asks = op is _aten._local_scalar_dense.default and args[0].dtype == torch.bool
        if asks and (certain := _of_draw(recorder, args[0])) is not None:
            return certain
        if asks and (check := check_of_caller()) is not None:
            return failed_check(recorder, args[0], check)
        wants_number = op is _aten._local_scalar_dense.default and not asks
        raise LeavingError(why_unread(calls.name_of(op), str(why)), converts=wants_number) from None


def failed_check(recorder: Recording, flag: torch.Tensor, check: DataCheck) -> bool:
    """The answer with which the program goes on; each step raises where it is another."""
    text = f"the program's own check failed on what this step computed, at {users_line()}, in {check.text}"
    recorder.record(torch.ops.lowtide.require.default, flag, check.answer, check.error, text)
    return check.answer


def _of_draw(recorder: Recording, flag: torch.Tensor) -> bool | None:
    """The answer to how a number from [0, 1) compares with a rate for which every draw gives the same (a layer drop of 0); else None.

    Of a rate of 0 a draw of exactly 0 is another matter, one in 2 ** 24: each step looks at it, and raises there.
    """
    makers = recorder.draft.makers()
    maker = makers.get(recorder.draft.value(flag))
    name, rate = ("", None) if maker is None or len(maker.args) != 2 else (maker.op, maker.args[1])
    drawn = None if maker is None or not isinstance(maker.args[0], Value) else makers.get(maker.args[0])
    if name not in _RELATIONS or not isinstance(rate, (int, float)) or drawn is None or drawn.op != "aten.rand.default" or 0 < rate < 1:
        return None
    answer = _RELATIONS[name](0.5, rate)
    if answer is not _RELATIONS[name](0, rate):
        text = f"a draw was exactly 0, at {users_line()}, where the program goes another way: call the step again, which draws anew"
        recorder.record(torch.ops.lowtide.require.default, flag, answer, "RuntimeError", text)
    return answer


def results(recorder: Recording, op: OpOverload, args: tuple[Arg, ...], kwargs: tuple[tuple[str, Arg], ...]) -> Any:
    """Fake results of an operator whose results' shapes follow from data. Raises CaptureError where only the running step knows them."""
    matter = calls.row(op).shaped_by
    decisive = (arg.shape for at, arg in enumerate(args) if isinstance(arg, Value) and (matter is None or at in matter))
    varies = any(not isinstance(extent, int) for shape in decisive for extent in shape)  # as those of a batch of a range do
    args = _that_matter(recorder, op, args)
    try:
        outcome = recorder.reader.answer(recorder.draft, "shape", op, args, kwargs)
        if varies:  # only now: where no batch can say it, that is what is told
            raise CaptureError(why_unshaped_in_range(calls.name_of(op)))
        if op is _aten._pack_padded_sequence.default:
            # Whoever takes the packed rows apart again reads how many there are of each step on the host: real numbers, now constants.
            lengths = args[1]
            assert isinstance(lengths, Value), "the operator takes a tensor"
            recorder.reader.values(recorder.draft, calls.name_of(op), lengths)
            return _fake(outcome[0]), _constant(outcome[1])
    except UnreadableError as why:
        raise CaptureError(why_unshaped(calls.name_of(op), str(why))) from None
    return tuple(map(_fake, outcome)) if isinstance(outcome, tuple) else _fake(outcome)


def without_masks(recorder: Recording, op: OpOverload, args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """The arguments of an indexing by masks as those of an indexing by positions, as the operator makes of it; None for others."""
    if op is not _aten.index.Tensor or not any(_is_mask(index) for index in args[1]):
        return None
    positions: list[Any] = []
    for index in args[1]:
        positions += _positions(recorder, index) if _is_mask(index) else [index]
    return args[0], positions


def _positions(recorder: Recording, mask: torch.Tensor) -> list[torch.Tensor]:
    positions = recorder.record(_aten.nonzero.default, mask)
    return [recorder.record(_aten.select.int, positions, 1, dim) for dim in range(mask.dim())]


def _is_mask(index: Any) -> bool:
    return isinstance(index, torch.Tensor) and index.dtype in (torch.bool, torch.uint8)


def _that_matter(recorder: Recording, op: OpOverload, args: tuple[Arg, ...]) -> tuple[Arg, ...]:
    """The arguments, with made-up tensors for those whose data decides nothing."""
    matter = calls.row(op).shaped_by
    decides = (matter is None or at in matter or not isinstance(arg, Value) for at, arg in enumerate(args))
    return tuple(arg if it else recorder.reader.made_up(arg) for it, arg in zip(decides, args, strict=True))


def _constant(real: torch.Tensor) -> torch.Tensor:
    with _disable_current_modes():
        return real.clone()


def _fake(real: torch.Tensor) -> torch.Tensor:
    """A tensor that lies as a real one does; fake, since this runs beneath the recorder."""
    return torch.empty_strided(real.shape, real.stride(), dtype=real.dtype, device=real.device)
