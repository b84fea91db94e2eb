"""Numbers that only the running step knows, where operators are given them, and where a program asks of one whether to raise.

An operator gets a number of Python's own in their place, unlike any other, by which the recorder knows which it stands for: so
`loss / loss.item()` and `x * (self.calls / 10)` are arithmetic of the graph. Autograd may compute with numbers by itself, where nobody sees
it: so only those operators take one whose gradients have it as it is.
"""

from __future__ import annotations

import math
import random
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

from lowtide.capture.data.data_shapes import check_of_caller, failed_check
from lowtide.capture.effects.sums import RELATIONS, EarlierNumber, NumberExpression, Term, is_term, may_be_whole, numbers_in
from lowtide.capture.recorder import Recorder
from lowtide.capture.results import Number
from lowtide.ir import tree
from lowtide.ir.graph import Slot, Value

_ARITHMETIC = {f"{side}{name}" for name in ("add", "sub", "mul", "div", "truediv", "true_divide") for side in ("", "i", "r")}
_CHOOSING = {"clamp", "clip", "masked_fill", "index_fill", "where"}
_LINEAR = _ARITHMETIC | _CHOOSING | RELATIONS.keys()  # whose gradients have a number as it is
_PLAIN = _LINEAR | {"lerp", "addcmul", "addcdiv", "fill", "full", "full_like", "new_full"}
_MADE = torch.tensor, torch.as_tensor, torch.Tensor.new_tensor
_ASKED = math.isfinite, math.isnan, math.isinf, *RELATIONS.values()
_OF_TENSORS: dict[Any, Callable[..., torch.Tensor]] = {each: getattr(torch, each.__name__) for each in _ASKED}


class NumberOperands(TorchFunctionMode):
    """Records arithmetic on such numbers, and what operators do with them."""

    def __init__(self, recorder: Recorder, handed_out: list[weakref.ref[Number]]) -> None:
        super().__init__()
        self._recorder, self._handed_out = recorder, handed_out
        self._random = random.Random(0)
        self._values: dict[float, Value] = {}
        self._inputs: dict[int, Value] = {}
        recorder.draft.scalar_of = self._values.get

    def emit(self, op: str, operands: tuple[Any, ...]) -> Term:
        """A number that the program itself computes."""
        written = tuple(each.value if isinstance(each, Term) else each for each in operands)
        number = Term(self._recorder.draft.emit_scalar(f"py.{op}", written), float, self._recorder.refusals)
        self._handed_out.append(weakref.ref(number))
        return number

    def input(self, number: EarlierNumber) -> Value:
        """What lies in a place when a step begins, as an input of the program, of the same type each time."""
        draft, at, kind = self._recorder.draft, number.at, number.kind
        if at not in self._inputs:
            self._inputs[at] = draft.add_scalar_input(Slot("constant", (len(draft.constants),)), "before")
            draft.constants.append(number.earlier.places[at])
            number.earlier.inputs.add(at)
            number.earlier.divisors.append(lambda results, before: type(before[at]) is kind)
        return self._inputs[at]

    def answer(self, item: Term) -> bool | None:
        """Whether a number is true, where the program raises if it is not, or if it is; None where it does anything else."""
        if (check := check_of_caller()) is not None:
            with torch.no_grad():
                return failed_check(self._recorder, self._tensor(item).bool(), check)
        return None

    def __torch_function__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> Any:
        """Numbers of the step among the arguments of an operator become those that stand for them."""
        kwargs = kwargs or {}
        given = [each for each in numbers_in((*args, *kwargs.values())) if is_term(each)]
        if not given:
            return func(*args, **kwargs)
        if func in _MADE and not {*kwargs} - {"dtype", "device"}:
            own = args[0] if func is torch.Tensor.new_tensor else None
            return self._made(args[-1], **({} if own is None else {"dtype": own.dtype, "device": own.device}) | kwargs)
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        allowed = _LINEAR if torch.is_grad_enabled() and any(each.requires_grad for each in tensors) else _PLAIN
        decides = any(map(may_be_whole, given)) and not any(each.is_floating_point() for each in tensors)
        name = getattr(func, "__name__", "")
        use = f"is given to {name}()"
        if decides or name.strip("_") not in allowed or any(each.kind is bool for each in given):
            given[0].refuse(use=use)
        leaves, rebuild = tree.flatten((args, kwargs))
        known = {id(each): self._stand_in(each) for each in given}
        before = len(self._recorder.draft.nodes)
        args, kwargs = tree.unflatten(rebuild, [known.get(id(leaf.value), leaf.value) for leaf in leaves])
        result = func(*args, **kwargs)
        taken = {value for node in self._recorder.draft.nodes[before:] for value in node.inputs}
        if not taken.issuperset(map(self._values.__getitem__, known.values())) or not self._values.keys().isdisjoint(result.shape):
            given[0].refuse(use=use)
        return result

    def _stand_in(self, item: Term) -> Any:
        number = self._random.uniform(0.25, 0.75) if item.kind is float else self._random.randrange(2**40, 2**41)
        self._values[number] = item.as_value()
        return number

    def _made(self, data: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
        """What `torch.tensor` makes of numbers in lists."""
        leaves = _leaves_of(data)
        kinds = {each.kind if is_term(each) else type(each) for each in leaves if not may_be_whole(each)}
        if dtype is None and float not in kinds and (unknown := next(filter(may_be_whole, leaves), None)) is not None:
            unknown.refuse(use="may be whole or a fraction, which decides a dtype,", instead="name the dtype")
        dtype = dtype or (torch.get_default_dtype() if float in kinds else torch.int64 if int in kinds else torch.bool)
        if isinstance(data, (list, tuple)):
            return torch.stack([self._made(each, dtype, device) for each in data])
        if isinstance(data, NumberExpression) and data.function in _OF_TENSORS:
            return self._tensor(data).to(dtype)
        return torch.full((), self._stand_in(data) if is_term(data) else data, dtype=dtype, device=device)

    def _tensor(self, item: Any) -> torch.Tensor:
        """A number, or what a comparison of numbers gives, as a tensor that Python would compute alike."""
        if isinstance(item, NumberExpression) and item.function in _OF_TENSORS:
            return _OF_TENSORS[item.function](*map(self._tensor, item.args))
        kind = item.kind if is_term(item) else type(item)
        return self._made(item, {float: torch.float64, int: torch.int64}.get(kind, torch.bool))


def _leaves_of(data: Any) -> list[Any]:
    return [leaf for each in data for leaf in _leaves_of(each)] if isinstance(data, (list, tuple)) else [data]
