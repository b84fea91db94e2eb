"""Python numbers that change from step to step, traced through Python arithmetic.

An optimizer reads its learning rate, computes `1 - beta1 ** step` and hands the result to a kernel. To redo that arithmetic at each step,
in the same order, to the last bit, hyper-parameters are handed to it as a subclass of float that records what is done to it (integers too:
Python lets a float that stands left of an int compute without asking the int). An operator receives only the bare C number, so each traced
number carries a number of its own making, unlike any other, by which the recorder knows it again. The true one serves comparisons, whose
outcome becomes a guard: a fact that must hold for the recorded program to be the right one.
"""

from __future__ import annotations

import operator
import random
import sys
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from typing import Any, TypeAlias

import torch

from lowtide.base.skeleton import Skeleton
from lowtide.capture.data.facts import Reader, UnreadableError
from lowtide.capture.draft import Draft
from lowtide.capture.optimizers import derived_numbers as derived
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError, StepError
from lowtide.ir.graph import Arg, Node, Slot, Value
from lowtide.ir.operators.nodes import is_random
from lowtide.ir.operators.row import ITEM, STOP


@dataclass(frozen=True, slots=True)
class Guard:
    """A fact about one slot that the recorded program relies on: `compare(slot, operand) is outcome`; or that there is none ("absent")."""

    slot: Slot
    compare: str  # a key of COMPARISONS, or "absent"
    operand: Any
    outcome: bool

    def holds(self, read: Callable[[Slot], Any]) -> bool:
        """Whether what `read` finds in the slot now still satisfies the guard."""
        try:
            current = read(self.slot)
        except StepError:
            return self.compare == "absent"
        if self.compare == "absent":
            return False
        try:
            same_type = isinstance(current, bool) == isinstance(self.operand, bool) or isinstance(self.operand, (int, float))
            return bool(derived.COMPARISONS[self.compare](current, self.operand)) is self.outcome and same_type
        except (TypeError, ValueError, RuntimeError):
            return False


class UndecidedError(CaptureError):
    """A decision that can be known once the step before has been taken."""


Fact: TypeAlias = Guard | derived.Branch  # both are asked `holds(read)`
_NO_QUESTION: tuple[str, Value | None, Arg] = ("", None, None)
UNKNOWN = object()  # in the place of a number that follows from data


class DecidesOnDataError(CaptureError):
    """A decision on what the running step alone knows."""


class Scalars:
    """Makes traced numbers and remembers which value each stands for.

    `reader` answers questions about what is there before the step. `assumed`: how the first decision comes out that nobody can know
    before; where it comes out otherwise, the program ends there. `of_torch`: torch's optimizers tell integers from floats nowhere.
    """

    def __init__(
        self, draft: Draft, seed: int, reader: Reader | None = None, assumed: bool | None = None, *, of_torch: bool = False
    ) -> None:
        self.draft, self.assumed, self.of_torch = draft, assumed, of_torch
        self.end: int | None = None  # the node that may end the program
        self._reader, self._question = reader, _NO_QUESTION
        self.guards: dict[Guard, None] = {}
        self._branches: dict[tuple[derived.Formula, str, bool], dict[tuple[Slot, ...], None]] = {}
        self._random = random.Random(seed)
        self._value_of: dict[float, Value] = {}
        self._memory: dict[tuple[Any, ...], Any] = {}
        self._foretold = derived.DerivedNumbers(lambda: zip(draft.inputs, draft.slots, strict=True), draft.nodes)
        draft.scalar_of, draft.read_number = self._value_of.get, self._read_by_operator

    @property
    def facts(self) -> tuple[Fact, ...]:
        """What must hold for the recorded program to be the right one."""
        return (*self.guards, *(derived.Branch(*key, tuple(applied)) for key, applied in self._branches.items()))

    def hold(self, slot: Slot, actual: Any) -> None:
        """Containers are taken to keep their entries where they have them."""
        if (skeleton := Skeleton.of(actual)) is not None:
            self.guards[Guard(slot, "has entries", skeleton, True)] = None
            for key, item in skeleton.entries(actual):
                self.hold(Slot(slot.table, (*slot.path, key)), item)

    def root(self, slot: Slot, actual: Any, name: str) -> Any:
        """What the optimizer gets for the number at `slot`; flags, None and strings are taken as they are and guarded."""
        plain = isinstance(actual, (bool, str, torch.Size))
        if plain or actual is None or isinstance(actual, (torch.dtype, torch.device, Enum)) or callable(actual):
            self.guards[Guard(slot, "eq" if plain else "is", actual, True)] = None
            return actual
        if actual is not UNKNOWN and not isinstance(actual, (int, float)):
            raise CaptureError(f"{slot} holds a {type(actual).__name__}; numbers, flags, strings and None can be captured")
        value = self.draft.add_scalar_input(slot, name)
        self.learn(value, actual)
        if self._reader is not None and slot.table == "group" and actual is not UNKNOWN:
            self._reader.learn(slot, actual)
        return self.traced(value, slot)

    def learn(self, value: Value, content: Any) -> None:
        """Say what an input holds at capture, where that is a number or a tensor of one element on the host."""
        try:
            self._foretold.known[value] = derived.content_of(content)
        except derived.UnknownNumberError:
            return

    def read(self, tensor: Any) -> Any:
        """What `tensor.item()` gives: known only when the step runs."""
        if tensor.numel() != 1:
            raise CaptureError(f"item() of a tensor of shape {tuple(tensor.shape)} at {users_line()}: it needs exactly one element")
        return self.traced(self.draft.emit_scalar(ITEM, (self.draft.value(tensor),)))

    def _read_by_operator(self, tensor: Any) -> Any:
        """What an operator gets that is given a tensor for a number."""
        if tensor.dtype is torch.bool:
            raise CaptureError(
                f"control flow depends on data: a comparison of tensors is asked for its outcome at {users_line()}; use torch.where"
            )
        return self.read(tensor)

    def apply(self, op: str, operands: tuple[Any, ...]) -> Any:
        """Arithmetic on numbers of which one at least is traced. The same arithmetic twice is done once."""
        key = (op, *((type(x), x.value if isinstance(x, TracedNumber) else repr(x)) for x in operands))
        if key not in self._memory:
            self._memory[key] = self.traced(self.draft.emit_scalar(f"py.{op}", tuple(map(_written, operands))))
        return self._memory[key]

    def compare(self, op: str, left: TracedNumber, right: Any) -> bool:
        """The outcome of a comparison, now a guard."""
        try:
            foretold = self._foretold.now(left.value, _written(right))
        except derived.UnmadeNumberError:
            raise UndecidedError(
                f"the optimizer decides on state that its step before this one has made, at {users_line()}: take that step first"
            ) from None
        except derived.UnknownNumberError:
            return self._assumed(op, left.value, _written(right))
        outcome = bool(derived.COMPARISONS[op](*foretold))
        if left.slot is not None and not isinstance(right, TracedNumber):
            self.guards[Guard(left.slot, op, right, outcome)] = None
        else:
            self._branch(left.value, op, _written(right), outcome)
        return outcome

    def answered(self, tensor: Any) -> bool | None:
        """A yes or no that follows from what is there before the step, which each step asks for again; None where it does not."""
        with suppress(UnreadableError):
            if self._reader is not None:
                item = torch.ops.aten._local_scalar_dense.default
                return bool(self._reader.answer(self.draft, "number", item, (self.draft.value(tensor),), ()))
        return None

    def _assumed(self, op: str, left: Value, right: Arg) -> bool:
        """A decision on data, where one is taken for granted and the program ends if it is not so. Raises DecidesOnDataError."""
        question = op, left, right
        if self.assumed is None or self._question not in (question, _NO_QUESTION):
            raise DecidesOnDataError(
                f"control flow depends on data: the optimizer compares a number read from a tensor, at {users_line()}; its step "
                "cannot be captured as one program"
            )
        if self.end is None:
            otherwise = self.draft.emit_scalar("py.ne", (self.draft.emit_scalar(f"py.{op}", (left, right)), self.assumed))
            acting = tuple(node for node in self.draft.nodes if node.writes or is_random(node))
            self.end, self._question = len(self.draft.nodes), question
            self.draft.nodes.append(Node(STOP, (otherwise,), (), after=acting))
        return self.assumed

    def freeze(self, number: TracedNumber) -> Any:
        """The number itself, for code that cannot be traced: the program now holds for the present hyper-parameters only."""
        actual = self.actual(number)
        if actual is UNKNOWN or actual != actual or self._counts(number):
            raise CaptureError(
                f"a number read from a tensor leaves the traced arithmetic at {users_line()}: use plain Python operators on it"
            )
        self.compare("eq", number, actual)
        return actual

    def actual(self, number: TracedNumber) -> Any:
        """The number at capture; UNKNOWN if it follows from data."""
        try:
            return self._foretold.now(number.value)[0]
        except derived.UnknownNumberError:
            return UNKNOWN

    def known_content(self, value: Value) -> Any:
        """What a tensor of one element will hold after what was recorded; UNKNOWN if that follows from data."""
        try:
            return derived.content_of(self._foretold.now(value)[0])
        except derived.UnknownNumberError:
            return UNKNOWN

    def kind_of(self, number: TracedNumber) -> type | None:
        """Whether a number is a float or an integer now and, held by a guard, whenever the program runs; None where it is neither."""
        if type(actual := self.actual(number)) not in (float, int):
            return None
        self._branch(number.value, "is float", True, isinstance(actual, float))
        return type(actual)

    def whole(self, number: TracedNumber) -> Any:
        """A stand-in for it that is an integer, where it is one; else the number."""
        if self.kind_of(number) is not int:
            return number
        stand_in = 2**40 + self._random.getrandbits(40)
        self._value_of[stand_in] = number.value
        return stand_in

    def _counts(self, number: TracedNumber) -> bool:
        """Whether a number rests on a state tensor, such as a step count: frozen, the program would be right for one step."""
        _, roots = self._foretold.formula((number.value,))
        return any(slot.table in ("state", "optimizer") and value.dtype != "scalar" for value, slot in roots)

    def _branch(self, left: Value, compare: str, right: Arg, outcome: bool) -> None:
        formula, roots = self._foretold.formula((left, right))
        self._branches.setdefault((formula, compare, outcome), {})[tuple(slot for _, slot in roots)] = None

    def traced(self, value: Value, slot: Slot | None = None) -> Any:
        stand_in = self._random.uniform(0.25, 0.75)
        number = TracedNumber(stand_in)
        number.scalars, number.value, number.slot = self, value, slot
        self._value_of[stand_in] = value
        return number


_OF_INTEGERS = frozenset(dir(int)) - frozenset(dir(float))


class TracedNumber(float):
    """A number whose arithmetic is recorded."""

    scalars: Scalars
    value: Value
    slot: Slot | None  # that it is the content of; None for one that was computed

    @property
    def actual(self) -> Any:
        """The number at capture; UNKNOWN if it follows from data."""
        return self.scalars.actual(self)

    @property  # type: ignore[misc]  # `isinstance` asks for it where the class itself is another one
    def __class__(self) -> type:
        return int if not self.scalars.of_torch and self.scalars.kind_of(self) is int else TracedNumber

    def __getattr__(self, name: str) -> Any:
        if name in _OF_INTEGERS and self.scalars.kind_of(self) is int:
            return getattr(self.scalars.freeze(self), name)
        raise AttributeError(f"'float' object has no attribute {name!r}")

    def __pos__(self) -> Any:
        return self

    def __bool__(self) -> bool:
        return self.scalars.compare("ne", self, 0)

    def __hash__(self) -> int:
        """Where it is looked for in a set or a dictionary, the program is one for this number alone."""
        return id(self) if self.scalars.of_torch else hash(self.scalars.freeze(self))

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __repr__(self) -> str:
        return f"<traced {self.value.name}>"


_DIVISIONS = ("truediv", "floordiv", "mod")


def _arithmetic(op: str, reflected: bool) -> Callable[[TracedNumber, Any], Any]:
    def method(self: TracedNumber, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented  # a tensor: its own operator takes over
        operands = (other, self) if reflected else (self, other)
        if op in _DIVISIONS and ZeroDivisionError.__name__ in sys._getframe(1).f_code.co_names and operands[1] == 0:
            raise ZeroDivisionError(f"{op} by zero")  # which that function catches
        return self.scalars.apply(op, operands)

    return method


def _comparison(op: str) -> Callable[[TracedNumber, Any], Any]:
    def method(self: TracedNumber, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        return self.scalars.compare(op, self, other)

    return method


def _untraceable(name: str) -> Callable[..., Any]:
    def method(self: TracedNumber, *args: Any) -> Any:
        return getattr(self.scalars.freeze(self), name)(*args)

    return method


for _name in ("neg", "abs"):
    setattr(TracedNumber, f"__{_name}__", lambda self, op=_name: self.scalars.apply(op, (self,)))
for _name, _convert in {"float": float, "int": int, "index": operator.index}.items():
    setattr(TracedNumber, f"__{_name}__", lambda self, convert=_convert: convert(self.scalars.freeze(self)))
for _name in derived.NUMBER_OPERATIONS:
    setattr(TracedNumber, f"__{_name}__", _arithmetic(_name, reflected=False))
    setattr(TracedNumber, f"__r{_name}__", _arithmetic(_name, reflected=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(TracedNumber, f"__{_name}__", _comparison(_name))
for _name in ("round", "floor", "ceil", "trunc", "format", "divmod", "rdivmod"):
    setattr(TracedNumber, f"__{_name}__", _untraceable(f"__{_name}__"))  # float itself would answer, of the stand-in


def is_traced(item: Any) -> bool:
    return isinstance(item, TracedNumber)


def apply(op: str, operands: tuple[Any, ...]) -> Any:
    """Arithmetic on numbers of which one at least is traced."""
    scalars: Scalars = next(item for item in operands if isinstance(item, TracedNumber)).scalars
    return scalars.apply(op, operands)


def _written(operand: Any) -> Arg:
    return operand.value if isinstance(operand, TracedNumber) else operand
