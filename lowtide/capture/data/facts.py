"""What a program reads from its data, as facts that can be looked up again before each step.

A program may branch on a number that follows from the batch, from buffers or from constants: `if labels.max() >= vocab`. What leads from
those to the number is kept as a chain of steps, and the number itself as the outcome for which the captured program is the right one.
`Facts` computes outcomes from what the caller holds at one moment, each once, however many programs ask for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import sympy
import torch
from torch._ops import OpOverload

from lowtide.capture.formulas.dispatch import computing_device
from lowtide.ir.graph import Slot
from lowtide.ir.sizes import Size

SizeAt: TypeAlias = "Callable[[Size], int]"  # what a size is in the batch at hand


@dataclass(frozen=True, eq=False, slots=True)
class SlotLeaf:
    """What the caller keeps at a slot, or a tensor that the program closes over. `key` is the same for what is the same."""

    key: str
    slot: Slot
    constant: torch.Tensor | None = None
    trained: bool = False  # a parameter that each step changes

    def run(self, known: Mapping[str, Any], read: Callable[[Slot], Any], number: SizeAt) -> Any:
        return read(self.slot) if self.constant is None else self.constant


@dataclass(frozen=True, slots=True)
class Ref:
    """An argument that an earlier step gives."""

    key: str


@dataclass(frozen=True, eq=False, slots=True)
class OperatorCall:
    """An operator on the results of earlier steps, which stand as `Ref` among its arguments."""

    key: str
    op: OpOverload
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]

    def run(self, known: Mapping[str, Any], read: Callable[[Slot], Any], number: SizeAt) -> Any:
        given = [_filled(arg, known, number) for arg in self.args]
        return self.op(*given, **{name: _filled(arg, known, number) for name, arg in self.kwargs})


@dataclass(frozen=True, eq=False, slots=True)
class Item:
    """One of several results of a call."""

    key: str
    of: str
    index: int

    def run(self, known: Mapping[str, Any], read: Callable[[Slot], Any], number: SizeAt) -> Any:
        return known[self.of][self.index]


FactStep: TypeAlias = "SlotLeaf | OperatorCall | Item"


@dataclass(frozen=True, eq=False, slots=True)
class Question:
    """What is asked of the data, and where."""

    steps: tuple[FactStep, ...]  # in an order that can be run; what is asked is of the last
    kind: str  # "number", "values" or "shape"
    op: str  # the operator that asked
    line: str  # of the user's program

    @property
    def key(self) -> str:
        """The same for questions that have the same answer."""
        return f"{self.kind} {self.steps[-1].key}"


@dataclass(frozen=True, eq=False, slots=True)
class Reading:
    """A question and the answer for which the captured program is the right one."""

    question: Question
    outcome: str

    def __str__(self) -> str:
        return f"{self.question.op} at {self.question.line}"

    @property
    def answer_text(self) -> str:
        return f"{self} gave {brief(self.outcome)}"


def brief(outcome: str) -> str:
    return outcome if len(outcome) <= 40 else f"{outcome[:37]}..."


def at_numbers(reading: Reading, number: SizeAt) -> Reading:
    """The same question about batches in which sizes are these numbers."""
    steps = tuple(_numbered(step, number) for step in reading.question.steps)
    return replace(reading, question=replace(reading.question, steps=steps))


def _numbered(step: FactStep, number: SizeAt) -> FactStep:
    if not isinstance(step, OperatorCall):
        return step
    kwargs = tuple((name, _in_numbers(arg, number)) for name, arg in step.kwargs)
    return replace(step, args=tuple(_in_numbers(arg, number) for arg in step.args), kwargs=kwargs)


def _in_numbers(arg: Any, number: SizeAt) -> Any:
    if isinstance(arg, tuple):
        return tuple(_in_numbers(item, number) for item in arg)
    return number(arg) if isinstance(arg, sympy.Expr) else arg


class Facts:
    """Answers to questions about what slots hold at one moment. Let go of it soon: it holds what it computed."""

    def __init__(self, read: Callable[[Slot], Any], number: SizeAt = int) -> None:
        """`number` gives a size that is an expression, where the questions have some."""
        self._read, self._number = read, number
        self._known: dict[str, Any] = {}
        self._outcomes: dict[str, str | None] = {}

    def tensor(self, steps: Iterable[FactStep]) -> Any:
        """What the last of `steps` gives. Raises whatever an operator raises."""
        last = ""
        with _plainly():
            for step in steps:
                if step.key not in self._known:
                    self._known[step.key] = step.run(self._known, self._read, self._number)
                last = step.key
        return self._known[last]

    def outcome(self, question: Question) -> str | None:
        """The answer as text, the same where it is the same to the last bit; None where an operator fails."""
        if question.key not in self._outcomes:
            try:
                self._outcomes[question.key] = outcome_of(question.kind, self.tensor(question.steps))
            except Exception:  # whatever it is, the program that relies on the answer is not the one to run
                self._outcomes[question.key] = None
        return self._outcomes[question.key]

    def hold(self, readings: Iterable[Reading]) -> bool:
        """Whether all of these come out as they did. In the program's order: an early one may guard a later one from failing."""
        return self.unlike(readings) is None

    def unlike(self, readings: Iterable[Reading]) -> Reading | None:
        """The first of these that comes out otherwise now."""
        return next((reading for reading in readings if self.outcome(reading.question) != reading.outcome), None)


def outcome_of(kind: str, answer: Any) -> str:
    """An answer as text: of a number, of all numbers of a tensor, or of how its results lie."""
    if kind == "shape":
        results = answer if isinstance(answer, (tuple, list)) else (answer,)
        return repr([(tuple(result.shape), result.stride()) for result in results])
    return repr(answer.tolist() if isinstance(answer, torch.Tensor) else answer)


def _filled(arg: Any, known: Mapping[str, Any], number: SizeAt) -> Any:
    if isinstance(arg, Ref):
        return known[arg.key]
    if isinstance(arg, sympy.Expr):
        return number(arg)
    if isinstance(arg, torch.device):
        return computing_device(arg)
    return [_filled(item, known, number) for item in arg] if isinstance(arg, tuple) else arg


@contextmanager
def _plainly() -> Iterator[None]:
    """As the program's own operators run: beneath autograd and autocast, which have had their say when they were recorded."""
    enabled = [device for device in ("cpu", "cuda") if torch.is_autocast_enabled(device)]
    for device in enabled:
        torch.set_autocast_enabled(device, False)
    try:
        with torch.no_grad(), torch._C._AutoDispatchBelowAutograd():
            yield
    finally:
        for device in enabled:
            torch.set_autocast_enabled(device, True)
