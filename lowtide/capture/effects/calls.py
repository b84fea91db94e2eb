"""Functions of Python that are called with numbers that only the running step knows, on the thread that captures, for as long as it does.

What only chooses among them or shows them is done again by each step. What fails for some numbers is computed within the program.
"""

from __future__ import annotations

import builtins
import functools
import json
import logging
import math
import statistics
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import overrides

from lowtide.base.kernels import COMPILING
from lowtide.capture.care.turns import listed, replaced
from lowtide.capture.effects.containers import EffectLog, is_stand_in, without_stand_ins
from lowtide.capture.effects.operands import NumberOperands
from lowtide.capture.effects.sums import NumberExpression, emitters, in_program, is_term, kind_of, numbers_in, put_together, text_of, whole
from lowtide.ir.operators.row import MATH_FUNCTIONS

_OF_THE_CALL = ("msg", "args", "created", "msecs", "relativeCreated")  # of a record: all else says where it comes from
_WHOLE = {"ceil", "floor", "trunc"}  # which give no fraction
_OF_FRACTIONS = {statistics: ("mean", "median"), math: ("hypot",)}  # for all numbers: others fail for infinite ones
_YES_OR_NO = {"isfinite", "isinf", "isnan"}


@dataclass(frozen=True)
class Outlet:
    """Where a program shows numbers: `put` is called again by each step."""

    put: Callable[..., object]

    @property
    def now(self) -> Outlet:
        """In the place of a container's."""
        return self


def _without(operands: NumberOperands) -> Callable[[Callable[..., bool]], Callable[..., bool]]:
    """Layers ask this to choose a fused kernel, and in eager there is no mode of lowtide's."""

    def of(asks: Callable[..., bool]) -> Callable[..., bool]:
        def answer(given: Any) -> bool:
            with overrides._pop_mode_temporarily() if overrides._get_current_function_mode() is operands else nullcontext():
                return asks(given)

        return answer

    return of


@contextmanager
def calls_followed(log: EffectLog, operands: NumberOperands) -> Iterator[None]:
    """`operands` makes numbers a part of the program.

    Nothing is compiled meanwhile, on any thread: numba knows functions by their identity.
    """
    with COMPILING, ExitStack() as stack:
        stack.enter_context(replaced(builtins, "print", functools.partial(_printing, log)))
        stack.enter_context(replaced(json.JSONEncoder, "encode", _encoding))
        stack.enter_context(replaced(logging.Logger, "handle", functools.partial(_handling, log)))
        stack.enter_context(listed(emitters, operands))
        stack.enter_context(operands)
        stack.enter_context(replaced(overrides, "has_torch_function", _without(operands)))
        stack.enter_context(replaced(builtins, "len", _length))
        for name in ("stdout", "stderr"):
            if hasattr(stream := getattr(sys, name), "__dict__"):
                stack.enter_context(replaced(stream, "write", functools.partial(_writing, log, functools.partial(getattr, sys, name))))
        for name in ("repr", "format"):
            stack.enter_context(replaced(builtins, name, lambda plain: lambda *args: text_of(plain, *args)))
        for name, of in {"max": _choice, "min": _choice, "sorted": _order}.items():
            stack.enter_context(replaced(builtins, name, of))
        for name in _YES_OR_NO:
            answer = lambda plain, item: NumberExpression(plain, (item,), bool)  # noqa: E731
            stack.enter_context(replaced(math, name, functools.partial(_computed, answer)))
        for module, names in _OF_FRACTIONS.items():
            for name in names:
                stack.enter_context(replaced(module, name, _of_fractions))
        for name in MATH_FUNCTIONS | _WHOLE:
            compute = whole if name in _WHOLE else functools.partial(lambda op, _, *args: in_program(op, *args), f"math_{name}")
            stack.enter_context(replaced(math, name, functools.partial(_computed, compute)))
        yield


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
        if options or not any(map(is_term, given)) or not all(isinstance(each, (int, float)) for each in given):
            return plain(*args, **options)
        return NumberExpression(plain, tuple(given))

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


def _printing(log: EffectLog, plain: Callable[..., Any]) -> Callable[..., Any]:
    def printing(*args: Any, **options: Any) -> None:
        if log.active and _shows(args):
            log.events.append((Outlet(functools.partial(plain, **options)), "put", without_stand_ins(args)))
        else:
            plain(*args, **options)

    return printing


def _writing(log: EffectLog, stream: Callable[[], Any], plain: Callable[..., Any]) -> Callable[..., Any]:
    def writing(text: Any) -> Any:
        if not log.active or not _shows((text,)):
            return plain(text)
        log.events.append((Outlet(lambda text: stream().write(text)), "put", (text,)))
        return NumberExpression(len, (text,), int)

    return writing


def _handling(log: EffectLog, plain: Callable[..., Any]) -> Callable[..., Any]:
    def handling(logger: logging.Logger, record: logging.LogRecord) -> Any:
        shown = (*record.args.values(),) if isinstance(record.args, dict) else record.args or ()
        if not log.active or not _shows((record.msg, *shown)):
            return plain(logger, record)
        kept = {name: item for name, item in vars(record).items() if name not in _OF_THE_CALL}
        again = lambda text, args: logger.handle(logging.makeLogRecord({**kept, "msg": text, "args": args}))  # noqa: E731
        log.events.append((Outlet(again), "put", without_stand_ins((record.msg, record.args))))
        return None

    return handling


def _shows(items: Iterable[Any]) -> bool:
    """Whether there is such a number among what is shown. Refused before anything is, where no step can do that again."""
    numbers = [*numbers_in(items)]
    for each in numbers:
        if not is_term(each):
            each.refuse()
    return bool(numbers)
