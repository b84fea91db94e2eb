"""Functions and operators that are called with numbers that only the running step knows, on the thread that captures.

What only chooses among them or shows them is done again by each step. What fails for some numbers is computed within the program.

An operator gets a number of Python's own in their place, unlike any other, by which the recorder knows which it stands for: so
`loss / loss.item()` and `x * (self.calls / 10)` are arithmetic of the graph. Autograd may compute with numbers by itself, where nobody sees
it: so only those operators take one whose gradients have it as it is.
"""

from __future__ import annotations

import builtins
import functools
import json
import logging
import math
import random
import statistics
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator, MappingView
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch.overrides import TorchFunctionMode

from lowtide.base.kernels import COMPILING
from lowtide.base.places import ABSENT, Sum
from lowtide.capture.care.turns import Replacing, all_replaced, listed, unasked
from lowtide.capture.data.data_shapes import check_of_caller, failed_check
from lowtide.capture.effects.code import as_formatted, shown, teller
from lowtide.capture.effects.containers import EffectLog
from lowtide.capture.effects.draws import HostArray
from lowtide.capture.effects.stand_ins import is_stand_in, without_stand_ins
from lowtide.capture.effects.sums import (
    RELATIONS,
    EarlierNumber,
    NumberExpression,
    Term,
    as_python,
    as_shown,
    as_term,
    earlier_of,
    emitters,
    in_program,
    is_term,
    kind_of,
    may_be_whole,
    numbers_in,
    put_together,
    text_of,
    whole,
)
from lowtide.capture.recorder import Recorder
from lowtide.capture.results import Number, holds_fakes, is_result
from lowtide.capture.sources import is_called_by_user
from lowtide.ir import tree
from lowtide.ir.graph import Slot, Value
from lowtide.ir.operators.row import MATH_FUNCTIONS

_OF_THE_CALL = ("msg", "args", "created", "msecs", "relativeCreated")  # of a record: all else says where it comes from
_WHOLE = {"ceil", "floor", "trunc"}  # which give no fraction
_OF_FRACTIONS = {statistics: ("mean", "median"), math: ("hypot",)}  # for all numbers: others fail for infinite ones
_YES_OR_NO = {"isfinite", "isinf", "isnan"}
_OF_SIZES = {torch: ("empty", "ones", "rand", "randn", "zeros"), torch.Tensor: ("expand", "new_empty", "new_ones", "new_zeros")}
_ARITHMETIC = {f"{side}{name}" for name in ("add", "sub", "mul", "div", "truediv", "true_divide") for side in ("", "i", "r")}
_CHOOSING = {"clamp", "clip", "masked_fill", "index_fill", "where"}
_LINEAR = _ARITHMETIC | _CHOOSING | RELATIONS.keys()  # whose gradients have a number as it is
_PLAIN = _LINEAR | {"lerp", "addcmul", "addcdiv", "fill", "full", "full_like", "new_full"}
_MADE = torch.tensor, torch.as_tensor, torch.Tensor.new_tensor
_ASKED = math.isfinite, math.isnan, math.isinf, *RELATIONS.values()
_OF_TENSORS: dict[Any, Callable[..., torch.Tensor]] = {each: getattr(torch, each.__name__) for each in _ASKED}


@dataclass(frozen=True)
class Outlet:
    """Where a program shows numbers: `put` is called again by each step."""

    put: Callable[..., object]

    @property
    def now(self) -> Outlet:
        """In the place of a container's."""
        return self


@contextmanager
def calls_followed(log: EffectLog, operands: NumberOperands) -> Iterator[None]:
    """`operands` makes numbers a part of the program.

    Nothing is compiled meanwhile, on any thread: numba knows functions by their identity.
    """
    with COMPILING, _shown(_noted(log)), listed(emitters, operands), unasked(operands), all_replaced(_functions(operands)):
        yield


def _functions(operands: NumberOperands) -> Iterator[tuple[Any, str, Replacing]]:
    """Those that are given numbers, and what is called in the place of each."""
    yield json.JSONEncoder, "encode", _encoding
    yield from ((builtins, name, of) for name, of in {"len": _length, "max": _choice, "min": _choice, "sorted": _order}.items())
    yield builtins, "repr", lambda plain: lambda item: shown(plain, item)
    yield builtins, "format", lambda plain: lambda item, spec="": shown(plain, as_formatted(item), spec)
    yield from ((module, name, _of_fractions) for module, names in _OF_FRACTIONS.items() for name in names)
    yield from ((owner, name, _sized) for owner, names in _OF_SIZES.items() for name in names)
    for name in _YES_OR_NO | _WHOLE | MATH_FUNCTIONS:
        compute = _answer if name in _YES_OR_NO else whole if name in _WHOLE else functools.partial(_by_program, f"math_{name}")
        yield math, name, functools.partial(_computed, compute)


def _answer(plain: Callable[[Any], bool], item: Any) -> NumberExpression:
    return NumberExpression(plain, (item,), bool)


def _by_program(op: str, plain: Callable[..., Any], *args: Any) -> Any:
    return in_program(op, *args)


def _sized(plain: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Sizes that are given one by one are given as one list: torch reads the first of them as a whole number or not at all."""

    def sized(*given: Any, **options: Any) -> torch.Tensor:
        at = int(isinstance(next(iter(given), None), torch.Tensor))
        return plain(*given[:at], given[at:], **options) if any(map(is_term, given[at:])) else plain(*given, **options)

    return sized


def _length(plain: Callable[[Any], int]) -> Callable[[Any], Any]:
    def length(item: Any) -> Any:
        if is_stand_in(item):
            return item.kept.measured()
        return NumberExpression(len, (item,), int) if is_term(item) and item.kind in (str, tuple) else plain(item)

    return length


def _of_fractions(plain: Callable[..., Any]) -> Callable[..., Any]:
    """What a library makes of a list of fractions, which is one, each step makes of its own."""

    def of_fractions(*args: Any, **options: Any) -> Any:
        given = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
        followed = not options and any(map(is_term, given)) and {kind_of(each) for each in given} == {float}
        return put_together(plain, args, float) if followed else plain(*args, **options)

    return of_fractions


def _choice(plain: Callable[..., Any]) -> Callable[..., Any]:
    def choice(*args: Any, **options: Any) -> Any:
        given = args[0] if len(args) == 1 and isinstance(args[0], (list, tuple)) else args
        given = tuple(map(as_term, given)) if any(map(is_term, given)) else ()
        if options or not given or not all(isinstance(each, (int, float)) for each in given):
            return plain(*args, **options)
        return NumberExpression(plain, given)

    return choice


def _order(plain: Callable[..., Any]) -> Callable[..., Any]:
    def order(items: Any, **options: Any) -> Any:
        given = items if isinstance(items, (list, tuple)) else ()
        if options or not any(map(is_term, given)) or {kind_of(each) for each in given} not in ({int}, {float}):
            return plain(items, **options)
        return [NumberExpression(_placed(at, plain), tuple(given), kind_of(given[0])) for at in range(len(given))]

    return order


def _placed(at: int, order: Callable[..., Any]) -> Callable[..., Any]:
    def placed(*items: Any) -> Any:
        return order(items)[at]

    placed.__name__ = f"sorted[{at}]"
    return placed


def _encoding(plain: Callable[..., Any]) -> Callable[..., Any]:
    """C hands what is no number of Python's own to whatever the encoder has for such things."""
    return lambda encoder, item: text_of(plain, encoder, item) if _shows((item,)) and encoder.allow_nan else plain(encoder, item)


def _computed(compute: Callable[..., Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *args: compute(plain, *args) if any(map(is_term, args)) else plain(*args)


Showing: TypeAlias = "Callable[[Outlet, tuple[Any, ...]], bool]"  # is given what is shown; whether it is shown later


def shown_later(kept: list[Callable[[], object]]) -> AbstractContextManager[None]:
    """What the user's code prints and logs meanwhile is kept, and not shown."""

    def keep(outlet: Outlet, args: tuple[Any, ...]) -> bool:
        if by_user := is_called_by_user(sys._getframe(3)):
            kept.append(functools.partial(outlet.put, *args))
        return by_user

    return _shown(keep)


def _noted(log: EffectLog) -> Showing:
    """Each step shows what the user's code shows, and numbers that it computes, whoever shows them."""

    def note(outlet: Outlet, args: tuple[Any, ...]) -> bool:
        if not log.active or not (_shows(args) or is_called_by_user(sys._getframe(3))):
            return False
        leaves, rebuild = tree.flatten(without_stand_ins(tuple(shown(str, each) if teller("str", each) else each for each in args)))
        log.events.append((outlet, "put", tree.unflatten(rebuild, [_as_text(as_shown(leaf.value)) for leaf in leaves])))  # as it is now
        return True

    return note


def _as_text(item: Any) -> Any:
    """What holds more of the capture than it shows, as keys of a dictionary and exceptions do, is shown by its text."""
    return str(item) if isinstance(item, (BaseException, MappingView)) or (holds_fakes(item) and not is_result(item)) else item


def _shown(showing: Showing) -> AbstractContextManager[None]:
    functions: list[tuple[Any, str, Replacing]] = [
        (builtins, "print", functools.partial(_printing, showing)),
        (logging.Logger, "handle", functools.partial(_handling, showing)),
    ]
    for name in ("stdout", "stderr"):
        if hasattr(stream := getattr(sys, name), "__dict__"):
            functions.append((stream, "write", functools.partial(_writing, showing, functools.partial(getattr, sys, name))))
    return all_replaced(functions)


def _printing(showing: Showing, plain: Callable[..., Any]) -> Callable[..., Any]:
    def printing(*args: Any, **options: Any) -> None:
        if not showing(Outlet(functools.partial(plain, **options)), args):
            plain(*args, **options)

    return printing


def _writing(showing: Showing, stream: Callable[[], Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    def writing(text: Any) -> Any:
        shown_later = showing(Outlet(lambda text: stream().write(text)), (text,))
        return plain(text) if not shown_later else NumberExpression(len, (text,), int) if is_term(text) else len(text)

    return writing


def _handling(showing: Showing, plain: Callable[..., Any]) -> Callable[..., Any]:
    def handling(logger: logging.Logger, record: logging.LogRecord) -> Any:
        kept = {name: item for name, item in vars(record).items() if name not in _OF_THE_CALL}
        again = lambda text, args: logger.handle(logging.makeLogRecord({**kept, "msg": text, "args": args}))  # noqa: E731
        return None if showing(Outlet(again), (record.msg, record.args)) else plain(logger, record)

    return handling


def _shows(items: Iterable[Any]) -> bool:
    """Whether there is such a number among what is shown. Refused before anything is, where no step can do that again."""
    numbers = [*numbers_in(items)]
    for each in numbers:
        if not is_term(each):
            each.refuse()
    return bool(numbers)


def _with_tensors(args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arrays that are there before the step among the arguments of an operator, as tensors."""
    arrays = {id(each): each for each in numbers_in((*args, *kwargs.values())) if isinstance(each, HostArray)}
    tensors = {at: each.draws.tensor(each) for at, each in arrays.items()}
    return _in_place_of(tensors, args, kwargs) if tensors else (args, kwargs)


def _in_place_of(others: dict[int, Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments with others in the place of some, which are given by id."""
    leaves, rebuild = tree.flatten((args, kwargs))
    result: tuple[tuple[Any, ...], dict[str, Any]] = tree.unflatten(rebuild, [others.get(id(leaf.value), leaf.value) for leaf in leaves])
    return result


class NumberOperands(TorchFunctionMode):
    """Records arithmetic on such numbers, and what operators do with them."""

    def __init__(self, recorder: Recorder, handed_out: list[weakref.ref[Number]]) -> None:
        super().__init__()
        self._recorder, self._handed_out, self.refusals = recorder, handed_out, recorder.refusals
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

    def size(self, item: torch.SymInt | torch.SymFloat) -> Term:
        number = Term(self._recorder.draft.number(item), kind_of(item), self._recorder.refusals)
        self._handed_out.append(weakref.ref(number))
        return number

    def input(self, number: EarlierNumber) -> Value:
        """What lies in a place when a step begins, as an input of the program, of the same type each time."""
        draft, at, kind = self._recorder.draft, number.at, number.kind
        if at not in self._inputs:
            self._inputs[at] = draft.add_scalar_input(Slot("constant", (len(draft.constants),)), "before")
            place = number.earlier.places[at]
            draft.constants.append(Sum(lambda: [as_python(place.now)], 0, ABSENT, (kind,)))
            number.earlier.inputs.add(at)
            number.earlier.conditions.append(lambda results, before: type(as_python(before[at])) is kind)
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
        args, kwargs = _with_tensors(args, kwargs)
        given = [each for each in numbers_in((*args, *kwargs.values())) if is_term(each)]
        if not given:
            return func(*args, **kwargs)
        if func in _MADE and not {*kwargs} - {"dtype", "device"}:
            own = args[0] if func is torch.Tensor.new_tensor else None
            return self._made(args[-1], **({} if own is None else {"dtype": own.dtype, "device": own.device}) | kwargs)
        if func is torch.Tensor.__getitem__ and type(args[1]) is list and all(kind_of(each) is int for each in args[1]):
            return func(args[0], self._made(args[1]))
        tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, torch.Tensor)]
        allowed = _LINEAR if torch.is_grad_enabled() and any(each.requires_grad for each in tensors) else _PLAIN
        decides = any(map(may_be_whole, given)) and not any(each.is_floating_point() for each in tensors)
        sizes = [each for each in (*args, *kwargs.values()) if isinstance(each, (list, tuple))]
        decides |= any(each.kind is int for each in numbers_in(sizes))
        name = getattr(func, "__name__", "")
        refuse = functools.partial(given[0].refuse, use=f"is given to {name}()")
        if earlier_of(given[0]) is not None:
            instead = f"write {name}() out as arithmetic (a dropout: `x * (torch.rand_like(x) >= p) / (1 - p)`)"
            refuse = functools.partial(refuse, instead=instead)
        if decides or name.strip("_") not in allowed or any(each.kind is bool for each in given):
            # a position, a size, an exponent: each step asks whether it is still the same
            known = {id(each): earlier.decides(each) for each in given if each.kind in (int, bool) and (earlier := earlier_of(each))}
            known |= {id(each): each.known() for each in given if each.known is not None}
            if not known:
                refuse()
            return self.__torch_function__(func, types, *_in_place_of(known, args, kwargs))
        known = {id(each): self._stand_in(each) for each in given}
        before = len(self._recorder.draft.nodes)
        args, kwargs = _in_place_of(known, args, kwargs)
        result = func(*args, **kwargs)
        taken = {value for node in self._recorder.draft.nodes[before:] for value in node.inputs}
        if not taken.issuperset(map(self._values.__getitem__, known.values())) or not self._values.keys().isdisjoint(result.shape):
            refuse()
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
