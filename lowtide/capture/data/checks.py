"""Questions that the program asks only to raise: `if not valid.all(): raise ValueError(...)`, `assert not loss.isnan()`.

Where nobody can know the answer before the step, and the other one leads to nothing but an exception, the program goes on with the one that
raises nothing, and each step looks at it, at its place, by an operator that raises in the program's stead. So distributions check what a
network gives them, and losses their arguments. Which way leads where is read from the bytecode of the function that asks.
"""

from __future__ import annotations

import builtins
import dis
import linecache
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

from torch.distributions import constraints

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
    where = f"{frame.f_code.co_name}: {linecache.getline(frame.f_code.co_filename, frame.f_lineno).strip()}{_subject(frame)}"
    if frame.f_code.co_filename == constraints.__file__:
        return DataCheck(True, "ValueError", where)  # whoever has a constraint checked raises where any of it does not hold
    code = _Code(frame.f_code)
    at = code.after_question(frame.f_lasti)
    if at is None:
        return None
    jump = code.instructions[at]
    ways = {"IF_TRUE" in jump.opname: code.raised(code.index[jump.argval]), "IF_TRUE" not in jump.opname: code.raised(at + 1)}
    raising = [answer for answer, names in ways.items() if names is not None]
    return DataCheck(not raising[0], _error(ways[raising[0]] or (), frame), where) if len(raising) == 1 else None


def _subject(frame: FrameType) -> str:
    """Of which distribution, where that asks."""
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

    def after_question(self, offset: int) -> int | None:
        """The branch upon the answer to what is asked at an offset: by a tensor's truth, or by its `item()`."""
        at = self.index.get(offset)
        if at is None:
            return None
        if self.instructions[at].opname.startswith("CALL"):
            if "item" not in [instruction.argval for instruction in self.instructions[max(0, at - 3) : at]]:
                return None
            at += 1
        if self.instructions[at].opname == "TO_BOOL":
            at += 1
        return at if self.instructions[at].opname.startswith("POP_JUMP") and "NONE" not in self.instructions[at].opname else None

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
        if instruction.opname in ("RAISE_VARARGS", "RERAISE"):
            return
        if instruction.opcode in _JUMPS:
            yield self.index[instruction.argval]
        if not instruction.opname.startswith("JUMP_") or "IF" in instruction.opname:
            yield at + 1

    def _loaded(self, places: list[int]) -> Iterator[str]:
        for at in places:
            if self.instructions[at].opname == "LOAD_ASSERTION_ERROR":
                yield "AssertionError"
            elif self.instructions[at].opname in ("LOAD_GLOBAL", "LOAD_NAME"):
                yield self.instructions[at].argval


def _error(names: tuple[str, ...], frame: FrameType) -> str:
    """The first exception among the names, or the one of Python's own that it is made of."""
    for name in names:
        found: Any = frame.f_globals.get(name, getattr(builtins, name, None))
        if isinstance(found, type) and issubclass(found, Exception):
            return next(base.__name__ for base in found.__mro__ if base.__module__ == "builtins")
    return "RuntimeError"
