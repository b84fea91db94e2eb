"""Numbers that follow from what the caller holds: arithmetic on numbers and one-element tensors, taken out of a recording.

RAdam compares a function of its step count, which is a tensor; ASGD reads an average's weight from one. Such a number is known at
capture, and can be had again at each call, from copies: so a decision that rests on it is a fact that a call can check before anything is
written.

Python's arithmetic on numbers: what can be recorded, what it computes, and functions that would otherwise see a stand-in.

`max`, `min` and the functions of `math` take a traced number for the bare float that it is by inheritance. While an optimizer's step is
traced, they hand such numbers to the trace; for all others they are what they were.
"""

from __future__ import annotations

import builtins
import math
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.base.kernels import COMPILING
from lowtide.capture import calls
from lowtide.capture.calls import torchs
from lowtide.capture.care.turns import all_replaced
from lowtide.errors import StepError
from lowtide.ir.graph import Arg, Atom, Node, Slot, Value, arguments, with_values
from lowtide.ir.operators.nodes import is_random
from lowtide.ir.operators.row import ARITHMETIC, MATH_FUNCTIONS

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "is": operator.is_,
    "is float": lambda item, expected: isinstance(item, float) is expected,
}  # fmt: skip
_OF_TWO = "add", "sub", "mul", "truediv", "floordiv", "mod", "pow"
NUMBER_OPERATIONS: dict[str, Callable[..., Any]] = {name: getattr(operator, name) for name in _OF_TWO}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"neg": operator.neg, "abs": abs, "max": max, "min": min}
_MATH: dict[str, Callable[..., Any]] = {name: getattr(math, name) for name in sorted(MATH_FUNCTIONS)}


def compute(op: str, operands: Sequence[Any]) -> Any:
    """What recorded arithmetic comes to."""
    return (NUMBER_OPERATIONS.get(op) or _FUNCTIONS.get(op) or _MATH[op.removeprefix("math_")])(*operands)


@contextmanager
def traced_calls(is_traced: Callable[[Any], bool], apply: Callable[[str, tuple[Any, ...]], Any]) -> Iterator[None]:
    """While this lasts, functions of Python that are given a traced number among plain ones record what they do, on this thread.

    Nothing is compiled meanwhile, on any thread: numba knows functions by their identity.
    """

    def following(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
            if not kwargs and any(map(is_traced, given)) and all(isinstance(item, (int, float)) for item in given):
                return apply(name, tuple(given))
            return original(*args, **kwargs)

        return call

    of_numbers = ((builtins, name, partial(following, name)) for name in ("max", "min"))
    with COMPILING, all_replaced((*of_numbers, *((math, name, partial(following, f"math_{name}")) for name in _MATH))):
        yield


_KNOWABLE = frozenset({"state", "group", "constant", "scaler"})  # places whose content is no tensor of the model's or the batch's


class UnknownNumberError(Exception):
    """A number that follows from data."""


class UnmadeNumberError(UnknownNumberError):
    """A number that follows from state which is made only when the program runs."""


@dataclass(frozen=True, slots=True)
class _Placeholder:
    """Stands in a formula for the thing of this number: first its roots, then what its lines make."""

    number: int


@dataclass(frozen=True, slots=True)
class _Look:
    """How a root's content is made into what the first line reads: a tensor of one element, or the number itself."""

    dtype: str
    shape: tuple[Any, ...]

    def of(self, content: Any) -> Any:
        if self.dtype == "scalar":
            return content
        return torch.full(self.shape, content, dtype=getattr(torch, self.dtype))


@dataclass(frozen=True, slots=True)
class _Line:
    op: str
    args: tuple[Any, ...]
    kwargs: tuple[tuple[str, Any], ...]
    outputs: int


@dataclass(frozen=True, slots=True)
class Formula:
    """What to compute from the contents of some slots. Equal formulas compare equal: one is written for all parameters."""

    roots: tuple[_Look, ...]
    lines: tuple[_Line, ...]
    results: tuple[Any, ...]

    def __call__(self, contents: Sequence[Any]) -> tuple[Any, ...]:
        """The results. Works on copies: nothing that the caller holds is written."""
        with _disable_current_modes(), torch.no_grad():
            things = [layout.of(content) for layout, content in zip(self.roots, contents, strict=True)]
            for line in self.lines:
                things.extend(_run(line, things))
            return tuple(_filled(result, things) for result in self.results)


@dataclass(frozen=True, slots=True)
class Branch:
    """A decision taken on numbers that follow from slots: `compare` of the formula's two results is `outcome`, wherever it is applied."""

    formula: Formula
    compare: str
    outcome: bool
    applied: tuple[tuple[Slot, ...], ...]  # to the contents of these slots; one entry a parameter, say

    def holds(self, read: Callable[[Slot], Any]) -> bool:
        """Whether it comes out so for what `read` finds in the slots now. Equal contents are computed once."""
        try:
            known = [[_content(read(slot), root) for slot, root in zip(slots, self.formula.roots, strict=True)] for slots in self.applied]
            results = [self.formula(contents) for contents in {repr(each): each for each in known}.values()]
            return all(bool(COMPARISONS[self.compare](*both)) is self.outcome for both in results)
        except (ArithmeticError, TypeError, ValueError, RuntimeError, StepError):
            return False


class DerivedNumbers:
    """Formulas for the values of one recording, and what they come to by what is known at capture."""

    def __init__(self, inputs: Callable[[], Iterable[tuple[Value, Slot]]], nodes: Sequence[Node]) -> None:
        self.known: dict[Value, Any] = {}  # contents of inputs
        self._inputs, self._nodes, self._seen = inputs, nodes, 0
        self._maker: dict[Value, int] = {}

    def now(self, *wanted: Arg) -> tuple[Any, ...]:
        """What these are at capture. Raises Unknown."""
        formula, roots = self.formula(wanted)
        if any(root not in self.known for root, _ in roots):
            raise UnmadeNumberError
        try:
            return formula([self.known[root] for root, _ in roots])
        except Exception as error:  # what eager PyTorch would raise in the step, it raises when the step is run
            raise UnknownNumberError from error

    def formula(self, wanted: Sequence[Arg]) -> tuple[Formula, list[tuple[Value, Slot]]]:
        """How these follow from the contents of slots. Raises Unknown where one does not."""
        slots = dict(self._inputs())
        needed, roots = self._slice([value for value in wanted if isinstance(value, Value)], slots)
        placeholders = {value: _Placeholder(number) for number, value in enumerate(roots)}
        lines: list[_Line] = []
        for node in needed:
            given = arguments(node, placeholders.__getitem__)
            for output in node.outputs:
                if output is not None:
                    placeholders[output] = _Placeholder(len(roots) + sum(line.outputs for line in lines) + node.outputs.index(output))
            placeholders.update({after: placeholders[before] for before, after in node.writes})
            lines.append(_Line(node.op, given["args"], given["kwargs"], len(node.outputs)))
        layouts = tuple(_Look(value.dtype, value.shape) for value in roots)
        results = with_values(tuple(wanted), placeholders.__getitem__)
        return Formula(layouts, tuple(lines), results), [(value, slots[value]) for value in roots]

    def _slice(self, wanted: list[Value], slots: Mapping[Value, Slot]) -> tuple[list[Node], list[Value]]:
        """The nodes that make these values, in their order, and the inputs that those read."""
        for index in range(self._seen, len(self._nodes)):
            self._maker.update(dict.fromkeys(self._nodes[index].results, index))
        self._seen = len(self._nodes)
        needed: set[int] = set()
        roots: dict[Value, None] = {}
        while wanted:
            value = wanted.pop()
            if value.dtype != "scalar" and (value.storage.device != "cpu" or any(extent != 1 for extent in value.shape)):
                raise UnknownNumberError
            if (maker := self._maker.get(value)) is not None:
                if maker not in needed:
                    needed.add(maker)
                    wanted.extend(self._nodes[maker].inputs)
            elif value in slots and slots[value].table in _KNOWABLE:
                roots[value] = None
            else:
                raise UnknownNumberError
        order = {value: number for number, value in enumerate(slots)}
        if any(is_random(self._nodes[index]) for index in needed):
            raise UnknownNumberError
        return [self._nodes[index] for index in sorted(needed)], sorted(roots, key=order.__getitem__)


def content_of(item: Any) -> Any:
    """The number in a tensor of one element on the host; numbers themselves. Raises Unknown for anything else."""
    if isinstance(item, (bool, int, float)):
        return item
    if type(item) is torch.Tensor and item.numel() == 1 and item.device.type == "cpu":
        with _disable_current_modes():
            return item.item()
    raise UnknownNumberError


def _content(item: Any, layout: _Look) -> Any:
    tensor = isinstance(item, torch.Tensor)
    if tensor is (layout.dtype == "scalar") or (
        tensor and (tuple(item.shape) != layout.shape or str(item.dtype) != f"torch.{layout.dtype}")
    ):
        raise TypeError("a number became a tensor, or a tensor another one")
    return item.item() if tensor else item


def _filled(arg: Any, things: Sequence[Any]) -> Any:
    if isinstance(arg, _Placeholder):
        return things[arg.number]
    if isinstance(arg, Atom):
        return torchs(arg)
    return [_filled(item, things) for item in arg] if isinstance(arg, tuple) else arg


def _run(line: _Line, things: Sequence[Any]) -> list[Any]:
    args = [_filled(arg, things) for arg in line.args]
    if line.op.startswith(ARITHMETIC):
        return [compute(line.op.removeprefix(ARITHMETIC), args)]
    out = calls.resolve(line.op)(*args, **{key: _filled(arg, things) for key, arg in line.kwargs})
    if line.outputs == 0:
        return []
    return list(out) if line.outputs > 1 else [out]
