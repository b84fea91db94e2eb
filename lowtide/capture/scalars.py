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
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

from lowtide.capture.recorder import Recorder
from lowtide.capture.sources import users_line
from lowtide.errors import CaptureError
from lowtide.ir.graph import Value
from lowtide.ir.slots import Slot

_COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "is": operator.is_,
}  # fmt: skip
_ARITHMETIC: dict[str, Callable[[Any, Any], Any]] = {
    "add": operator.add, "sub": operator.sub, "mul": operator.mul, "truediv": operator.truediv,
    "floordiv": operator.floordiv, "mod": operator.mod, "pow": operator.pow,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class Guard:
    """A fact about one slot that the recorded program relies on: `compare(slot, operand) is outcome`."""

    slot: Slot
    compare: str  # a key of _COMPARISONS
    operand: Any
    outcome: bool

    def holds(self, current: Any) -> bool:
        """Whether the slot, now holding `current`, still satisfies the guard."""
        try:
            return bool(_COMPARISONS[self.compare](current, self.operand)) is self.outcome and _same_type(current, self.operand)
        except TypeError:
            return False


def _same_type(current: Any, operand: Any) -> bool:
    """Whether a flag stayed a flag and a number a number."""
    return isinstance(current, bool) == isinstance(operand, bool) or isinstance(operand, (int, float))


Literal: TypeAlias = "int | float"


class Scalars:
    """Makes traced numbers and remembers which value each stands for."""

    def __init__(self, recorder: Recorder, seed: int) -> None:
        self.recorder = recorder
        self.guards: dict[Guard, None] = {}
        self._random = random.Random(seed)
        self._value_of: dict[float, Value] = {}
        self._memory: dict[tuple[Any, ...], Any] = {}
        recorder.scalar_of, recorder.read_number = self._value_of.get, self.read

    def root(self, slot: Slot, actual: Any, name: str) -> Any:
        """What the optimizer gets for the number at `slot`; flags, None and strings are taken as they are and guarded."""
        if actual is None or isinstance(actual, (bool, str)):
            self.guards[Guard(slot, "is" if actual is None else "eq", actual, True)] = None
            return actual
        if not isinstance(actual, (int, float)):
            raise CaptureError(f"{slot} holds a {type(actual).__name__}; numbers, flags, strings and None can be captured")
        return self._traced(self.recorder.add_scalar_input(slot, name), actual, (Root(slot, actual),), direct=True)

    def read(self, tensor: Any) -> Any:
        """What `tensor.item()` gives: known only when the step runs."""
        if tensor.numel() != 1:
            raise CaptureError(f"item() of a tensor of shape {tuple(tensor.shape)} at {users_line()}: it needs exactly one element")
        value = self.recorder.emit_scalar("aten._local_scalar_dense.default", (self.recorder.value(tensor),))
        actual = 1.5 if tensor.dtype.is_floating_point else 1
        return self._traced(value, actual, None, direct=False)

    def apply(self, op: str, operands: tuple[Any, ...]) -> Any:
        """Arithmetic on numbers of which one at least is traced. The same arithmetic twice is done once."""
        key = (op, *((type(x), x.value if isinstance(x, Traced) else x) for x in operands))
        if key not in self._memory:
            args = tuple(x.value if isinstance(x, Traced) else x for x in operands)
            roots = _joined(operands)
            actual = _compute(op, tuple(_actual(x) for x in operands))
            self._memory[key] = self._traced(self.recorder.emit_scalar(f"py.{op}", args), actual, roots, direct=False)
        return self._memory[key]

    def compare(self, op: str, left: Traced, right: Any) -> bool:
        """The outcome of a comparison, now a guard."""
        if left.roots is None or (isinstance(right, Traced) and right.roots is None):
            raise CaptureError(
                f"control flow depends on data: the optimizer compares a number read from a tensor, at {users_line()}; its step "
                "cannot be captured as one program"
            )
        outcome = bool(_COMPARISONS[op](left.actual, _actual(right)))
        if left.direct and not isinstance(right, Traced):
            self.guards[Guard(left.roots[0].slot, op, right, outcome)] = None
        else:
            self.freeze(left)
            if isinstance(right, Traced):
                self.freeze(right)
        return outcome

    def freeze(self, number: Traced) -> Any:
        """The number itself, for code that cannot be traced: the program now holds for the present hyper-parameters only."""
        if number.roots is None:
            raise CaptureError(
                f"a number read from a tensor leaves the traced arithmetic at {users_line()}: use plain Python operators on it"
            )
        for root in number.roots:
            self.guards[Guard(root.slot, "eq", root.actual, True)] = None
        return number.actual

    def _traced(self, value: Value, actual: Any, roots: tuple[Root, ...] | None, direct: bool) -> Any:
        stand_in = self._random.uniform(0.25, 0.75)
        number = Traced(stand_in)
        number.scalars, number.value, number.actual, number.roots, number.direct = self, value, actual, roots, direct
        self._value_of[stand_in] = value
        return number


@dataclass(frozen=True, slots=True)
class Root:
    """A slot and the number that it held at capture."""

    slot: Slot
    actual: Any


class Traced(float):
    """A number whose arithmetic is recorded. `roots` is None for one that depends on data."""

    scalars: Scalars
    value: Value
    actual: Any
    roots: tuple[Root, ...] | None
    direct: bool  # the slot's own number, not one computed from it

    def __neg__(self) -> Any:
        return self.scalars.apply("neg", (self,))

    def __pos__(self) -> Any:
        return self

    def __abs__(self) -> Any:
        return self.scalars.apply("abs", (self,))

    def __bool__(self) -> bool:
        return self.scalars.compare("ne", self, 0)

    def __float__(self) -> float:
        return float(self.scalars.freeze(self))

    def __int__(self) -> int:
        return int(self.scalars.freeze(self))

    def __index__(self) -> int:
        return operator.index(self.scalars.freeze(self))

    def __hash__(self) -> int:
        return id(self)

    def __deepcopy__(self, memo: Any) -> Any:
        return self

    def __repr__(self) -> str:
        return f"<traced {self.value.name}>"


def _arithmetic(op: str, reflected: bool) -> Callable[[Traced, Any], Any]:
    def method(self: Traced, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented  # a tensor: its own operator takes over
        return self.scalars.apply(op, (other, self) if reflected else (self, other))

    return method


def _comparison(op: str) -> Callable[[Traced, Any], Any]:
    def method(self: Traced, other: Any) -> Any:
        if not isinstance(other, (int, float)):
            return NotImplemented
        return self.scalars.compare(op, self, other)

    return method


def _untraceable(name: str) -> Callable[..., Any]:
    def method(self: Traced, *args: Any) -> Any:
        return getattr(self.scalars.freeze(self), name)(*args)

    return method


for _name in _ARITHMETIC:
    setattr(Traced, f"__{_name}__", _arithmetic(_name, reflected=False))
    setattr(Traced, f"__r{_name}__", _arithmetic(_name, reflected=True))
for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Traced, f"__{_name}__", _comparison(_name))
for _name in ("round", "floor", "ceil", "trunc", "format", "divmod", "rdivmod"):
    setattr(Traced, f"__{_name}__", _untraceable(f"__{_name}__"))  # float itself would answer, of the stand-in


def _actual(number: Any) -> Any:
    return number.actual if isinstance(number, Traced) else number


def _joined(operands: tuple[Any, ...]) -> tuple[Root, ...] | None:
    """The roots of all operands; None if one of them depends on data."""
    found: dict[Root, None] = {}
    for operand in operands:
        if isinstance(operand, Traced):
            if operand.roots is None:
                return None
            found.update(dict.fromkeys(operand.roots))
    return tuple(found)


def _compute(op: str, operands: tuple[Any, ...]) -> Any:
    """The true result. A stand-in of a number read from a tensor may divide by zero here; only its type matters then."""
    if op in ("neg", "abs"):
        return -operands[0] if op == "neg" else abs(operands[0])
    try:
        return _ARITHMETIC[op](*operands)
    except ArithmeticError:
        return 1.5
