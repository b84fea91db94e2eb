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
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from lowtide.base.kernels import COMPILING
from lowtide.base.skeleton import Skeleton
from lowtide.capture.care.turns import all_replaced
from lowtide.capture.data.facts import Facts, FactStep, NumberLeaf, Ref, called, filled, result_of, step_of
from lowtide.errors import StepError
from lowtide.ir.graph import Arg, Node, Slot, Value, with_values
from lowtide.ir.operators.nodes import is_arithmetic, is_random
from lowtide.ir.operators.row import ARITHMETIC, MATH_FUNCTIONS

COMPARISONS: dict[str, Callable[[Any, Any], Any]] = {
    "eq": operator.eq, "ne": operator.ne, "lt": operator.lt, "le": operator.le, "gt": operator.gt, "ge": operator.ge, "is": operator.is_,
    "is float": lambda item, expected: isinstance(item, float) is expected,
    "has entries": lambda item, expected: Skeleton.of(item) == expected,
}  # fmt: skip
_OF_TWO = "add", "sub", "mul", "truediv", "floordiv", "mod", "pow"
NUMBER_OPERATIONS: dict[str, Callable[..., Any]] = {name: getattr(operator, name) for name in _OF_TWO}
_FUNCTIONS: dict[str, Callable[..., Any]] = {"neg": operator.neg, "abs": abs, "max": max, "min": min}
_OF_MATH = "math_"
_MATH: dict[str, Callable[..., Any]] = {name: getattr(math, name) for name in sorted(MATH_FUNCTIONS)}


def _function_of(node: Node) -> Callable[..., Any] | None:
    """What Python computes recorded arithmetic by; None for operators."""
    if not is_arithmetic(node):
        return None
    name = node.op.removeprefix(ARITHMETIC)
    return NUMBER_OPERATIONS.get(name) or _FUNCTIONS.get(name) or _MATH[name.removeprefix(_OF_MATH)]


@contextmanager
def traced_calls(
    is_traced: Callable[[Any], bool], apply: Callable[[str, tuple[Any, ...]], Any], read: Callable[[torch.Tensor], Any]
) -> Iterator[None]:
    """While this lasts, functions of Python that are given a traced number among plain ones record what they do, on this thread.

    Those of `math` take a tensor of one element for the number in it, which `read` gives. Nothing is compiled meanwhile, on any thread:
    numba knows functions by their identity.
    """

    def following(name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            given = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
            if name.startswith(_OF_MATH):
                given = [read(item) if isinstance(item, torch.Tensor) and item.numel() == 1 else item for item in given]
            if not kwargs and any(map(is_traced, given)) and all(isinstance(item, (int, float)) for item in given):
                return apply(name, tuple(given))
            return original(*args, **kwargs)

        return call

    of_numbers = ((builtins, name, partial(following, name)) for name in ("max", "min"))
    with COMPILING, all_replaced((*of_numbers, *((math, name, partial(following, f"{_OF_MATH}{name}")) for name in _MATH))):
        yield


# Places whose content is no tensor of the model's or the batch's.
_KNOWABLE = frozenset({"state", "optimizer", "group", "constant", "scaler"})


class UnknownNumberError(Exception):
    """A number that follows from data."""


class UnmadeNumberError(UnknownNumberError):
    """A number that follows from state which is made only when the program runs."""


@dataclass(frozen=True, slots=True)
class Formula:
    """What to compute from the contents of some slots. Equal formulas compare equal: one is written for all parameters."""

    roots: tuple[NumberLeaf, ...]
    results: tuple[Any, ...]  # what is computed stands as `Ref`, whose key says how
    steps: tuple[FactStep, ...] = field(compare=False)

    def __call__(self, contents: Sequence[Any]) -> tuple[Any, ...]:
        """The results. Works on copies: nothing that the caller holds is written."""
        with _disable_current_modes():
            known = Facts(contents.__getitem__).known((*self.roots, *self.steps))
            return tuple(filled(result, known) for result in self.results)


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


def _written(tensor: torch.Tensor, call: object) -> torch.Tensor:
    return tensor


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
        needed, inputs = self._slice([value for value in wanted if isinstance(value, Value)], slots)
        roots = tuple(NumberLeaf(at, value.dtype, value.shape) for at, value in enumerate(inputs))
        keys, steps = {value: root.key for value, root in zip(inputs, roots, strict=True)}, list[FactStep]()
        for node in needed:
            steps.append(call := step_of(node, keys.__getitem__, _function_of(node)))
            after_node = {output: result_of(call, node, output) for output in node.outputs if output is not None}
            after_node |= {after: called("written", (Ref(keys[before]), Ref(call.key)), function=_written) for before, after in node.writes}
            steps += after_node.values()
            keys |= {value: step.key for value, step in after_node.items()}
        results = with_values(tuple(wanted), lambda value: Ref(keys[value]))
        return Formula(roots, results, tuple(steps)), [(value, slots[value]) for value in inputs]

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


def _content(item: Any, root: NumberLeaf) -> Any:
    tensor = isinstance(item, torch.Tensor)
    if tensor is (root.dtype == "scalar") or (tensor and (tuple(item.shape) != root.shape or str(item.dtype) != f"torch.{root.dtype}")):
        raise TypeError("a number became a tensor, or a tensor another one")
    return item.item() if tensor else item
