"""Numbers that a program sums up outside (`self.total += loss.item()`), and arithmetic on numbers that only the running step knows.

No part of the graph: each step does that arithmetic again, in Python, on what it has read and on what lies in the place then: an attribute,
an entry of a dictionary, a variable.
"""

from __future__ import annotations

import math
import operator
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.base.places import ABSENT, Sum
from lowtide.capture.care.contents import is_plain
from lowtide.capture.effects.stand_ins import SHOWS_A_SIZE, SHOWS_A_TENSOR, LeavingError, is_stand_in, without_stand_ins
from lowtide.capture.results import Number, is_number, is_result
from lowtide.capture.sizes.symbols import is_size
from lowtide.ir import tree
from lowtide.ir.graph import Value

emitters: list[Any] = []  # the `NumberOperands` of what is recorded, which make numbers a part of the program, the innermost last
Recipe = Callable[[Iterator[Any], Sequence[Any]], Any]  # of the results that it takes, and of what lay in the places before

_ANY: dict[str, Callable[..., Any]] = {"add": operator.add, "sub": operator.sub, "mul": operator.mul}
_BY_NUMBERS = {name: getattr(operator, name) for name in ("truediv", "floordiv", "mod")}  # which may fail for others
_ALONE: dict[str, Callable[..., Any]] = {"neg": operator.neg, "pos": operator.pos, "abs": abs}
_OTHERS: dict[str, Callable[..., Any]] = {"max": max, "min": min, "pow": operator.pow}
_SPELLED = {function: name for table in (_ANY, _BY_NUMBERS, _ALONE, _OTHERS) for name, function in table.items()}
_USES = {
    "bool": ("decides a condition (`if`, `while`, `and`)", "choose without asking: min(best, v), max(), torch.where"),
    "index": ("is a position or a size", "keep to sizes that follow from shapes, or index with a tensor"),
    "hash": ("is a key of a dictionary or a member of a set", "put it there after the step"),
}
_DECIDING = {"bool", "index", "int", "float"}  # of what earlier steps leave each step asks so much before it begins
_ASKS: dict[str, Callable[..., Any]] = {each.__name__: each for each in (float, int, operator.index, hash, str, format, repr)}
_TEXTS_OF_TEXTS = {
    "capitalize", "center", "expandtabs", "ljust", "lower", "lstrip", "replace", "rjust", "rstrip", "strip", "title", "upper", "zfill",
}  # fmt: skip
_EXAMPLES: dict[type, Any] = {bool: False, int: 0, float: 0.0, str: "", tuple: ()}
_A_TENSOR = type("Tensor", (), {})()
_OF_TEXTS: dict[str, Callable[..., Any]] = {"len": len, "iter": iter, "getitem": operator.getitem, "contains": operator.contains}
RELATIONS: dict[str, Callable[..., Any]] = {name: getattr(operator, name) for name in ("eq", "ne", "lt", "le", "gt", "ge")}


class Term(Number):
    """A number that can be computed with: Python's arithmetic on it is done again by each step.

    `known` gives it where it follows from what is there before the step, and `compare` how one of 64 bits relates to another one. For as
    long as nobody asks, it is no part of the program.
    """

    __slots__ = ("compare", "known")

    def __init__(
        self,
        value: Value | None,
        kind: type,
        refusals: list[Any] | None,
        known: Callable[[], Any] | None = None,
        compare: Callable[[str, int], bool] | None = None,
    ) -> None:
        super().__init__(value, kind, refusals)
        self.known, self.compare = known, compare

    @property
    def origin(self) -> str:  # type: ignore[override]
        return "a number that is drawn, counted or left by earlier steps" if earlier_of(self) is not None else Number.origin

    def text(self) -> str:
        return "number"

    def as_value(self) -> Value:
        operand = _operand(self)
        value = operand.value if isinstance(operand, Term) else operand
        return self.refuse() if value is None else value


def as_python(number: Any) -> Any:
    """What a program computes with: NumPy's single numbers as Python's, but for those that compute otherwise."""
    return number.item() if isinstance(number, numpy.generic) and number.dtype.char in "dlq?" else number


def as_term(item: Any) -> Any:
    """A size, or a number that follows from one, as a number that can be computed with; all else is itself."""
    if not is_size(item):
        return item
    if not emitters:
        raise LeavingError(SHOWS_A_SIZE, converts=True)
    return emitters[-1].size(item)


@dataclass
class EarlierNumbers:
    """What lies in all such places while a program is captured, and what of that may not be zero, as the program divides by it."""

    numbers: list[Any] = field(default_factory=list)
    conditions: list[Recipe] = field(default_factory=list)
    thread: int = field(default_factory=threading.get_ident)  # that captures
    is_shared: bool = False  # whether another one has asked: it may do so for the program
    places: list[Sum] = field(default_factory=list)
    spoken: dict[int, int] = field(default_factory=dict)  # by number: the how many-th it is of those that were put into words
    inputs: set[int] = field(default_factory=set)  # those that the program computes with

    def is_used(self, place: Sum) -> bool:
        """Whether a step asks what lies there, and not only the capture has."""
        return any(self.places[at] is place for at in (*self.inputs, *self.spoken))

    def number(self, item: Term) -> EarlierNumber:
        """One that follows from these, as one that lies there."""
        again, places = recipe(item), tuple(self.places)
        number = as_python(again(iter(()), self.numbers))
        place = Sum(lambda: [as_python(again(iter(()), [each.now for each in places]))], 0, ABSENT, (type(number),))
        return EarlierNumber(self, number, place, item.refusals or [])

    def decides(self, item: Term) -> Any:
        """What one is that follows from these numbers alone, and that a program decides with: the same one in each of its steps."""
        question = recipe(item)
        answer = question(iter(()), self.numbers)
        self.conditions.append(lambda results, before: question(results, before) == answer)
        return answer

    def divides(self, item: Term) -> bool:
        """Whether one that follows from these numbers alone is not zero: each step looks again before it begins."""
        if not (divisor := recipe(item))(iter(()), self.numbers):
            return False
        self.conditions.append(divisor)
        return True


class EarlierNumber(Term):
    """What lies in a place when a step begins: a number, or what grows. Other threads find that there, but for its type."""

    __slots__ = ("at", "earlier")

    def __init__(self, earlier: EarlierNumbers, number: Any, place: Sum, refusals: list[Any]) -> None:
        super().__init__(None, type(as_python(number)), refusals)
        self.at, self.earlier = len(earlier.numbers), earlier
        earlier.numbers.append(number)
        earlier.places.append(place)

    def text(self) -> str:
        return f"before[{self.earlier.spoken.setdefault(self.at, len(self.earlier.spoken))}]"


class NumberExpression(Term):
    """An operation on numbers, or on what is shown, of which one at least is such a term or a tensor."""

    __slots__ = ("args", "function")

    def __init__(self, function: Callable[..., Any], args: tuple[Any, ...], kind: type | None = None) -> None:
        terms = [each for each in args if isinstance(each, Term)]
        whole = function is not operator.truediv and all(isinstance(each, int) for each in args)
        kind = kind or (int if whole else float)
        known = all(each.known for each in terms) and not any(is_size(each) or issubclass(type(each), FakeTensor) for each in args)
        super().__init__(None, kind, terms[0].refusals if terms else emitters[-1].refusals, self._now if known else None)
        self.function, self.args = function, args

    def _now(self) -> Any:
        return self.function(*map(_asked, self.args))

    def text(self) -> str:
        return f"{self.function.__name__}({', '.join(map(_in_words, self.args))})"


def _in_words(item: Any) -> str:
    return item.text() if isinstance(item, Term) else repr(item) if is_plain(item) else type(item).__name__


class TextExpression(NumberExpression):
    """A text or a tuple of such numbers: it can be put together with others."""

    __slots__ = ()

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__") or not hasattr(self.kind, name):
            raise AttributeError(f"{self.kind.__name__!r} object has no attribute {name!r}")
        return partial(text_of, getattr(str, name), self) if name in _TEXTS_OF_TEXTS else getattr(_asked(self, name), name)


def text_of(function: Callable[..., str], *args: Any) -> Any:
    """A text that a function makes. What it raises for any number and text of these kinds, it raises at once."""
    if not are_of_step(args):
        return function(*args)
    return put_together(function, args, str)


def are_of_step(args: Any) -> bool:
    """Whether there are numbers or tensors among arguments, or in what these hold, that only the running step knows."""
    if any(map(is_term, numbers_in(args))):
        return True
    return any(is_size(leaf.value) or issubclass(type(leaf.value), FakeTensor) for leaf in tree.flatten(args)[0])


def put_together(function: Callable[..., Any], args: Any, kind: type) -> Any:
    """What a function makes of numbers and tensors wherever they are in its arguments: each step calls it again."""
    leaves, rebuild = tree.flatten(without_stand_ins(args))
    if not emitters:
        raise LeavingError(SHOWS_A_SIZE if any(is_size(leaf.value) for leaf in leaves) else SHOWS_A_TENSOR, converts=True)

    def text(*items: Any) -> Any:
        return function(*tree.unflatten(rebuild, items))

    text.__name__ = "".join((function.__name__, *(leaf.where for leaf in leaves)))
    text(*(_EXAMPLES.get(kind_of(leaf.value), _A_TENSOR) if is_result(leaf.value) else leaf.value for leaf in leaves))
    expression = NumberExpression if kind is float else TextExpression
    return expression(text, tuple(as_shown(leaf.value) for leaf in leaves), kind)


def as_shown(item: Any) -> Any:
    """A tensor as it is now: what is made of it later has to show that, and by then its memory may hold something else."""
    if not issubclass(type(item), FakeTensor):
        return item
    with torch.no_grad():
        copied = item.detach().clone()
    return NumberExpression(nn.Parameter, (copied, item.requires_grad), nn.Parameter) if isinstance(item, nn.Parameter) else copied


def kind_of(item: Any) -> type:
    """What a number is when the step runs."""
    return item.kind if isinstance(item, Term) else {torch.SymInt: int, torch.SymFloat: float}.get(type(item), type(item))


def is_term(item: Any) -> bool:
    """Whether it can be computed with here: what lies in a place that another thread finds is a number for that."""
    earlier = object.__getattribute__(item, "earlier") if type(item) is EarlierNumber else None
    return issubclass(type(item), Term) and (earlier is None or earlier.thread == threading.get_ident())


def may_be_whole(item: Any) -> bool:
    """Whether one step's number may be whole and another's not, by which torch chooses a dtype: `min(1, x)`, `2 ** n`."""
    if not isinstance(item, NumberExpression) or item.function in (operator.truediv, float):
        return False
    unsure, sure = any(map(may_be_whole, item.args)), {kind_of(each) for each in item.args if not may_be_whole(each)}
    if _SPELLED.get(item.function) in ("max", "min"):
        return unsure or len(sure) > 1
    return float not in sure and (unsure or (item.function is operator.pow and type(item.args[1]) is not int))


def numbers_in(items: Iterable[Any]) -> Iterator[Any]:
    """Those that only the running step knows, in lists, tuples and dictionaries, too."""
    for item in items:
        if is_number(item):
            yield item
        elif isinstance(item, (list, tuple, dict)):
            pieces: Any = item if not is_stand_in(item) else item.kept.items  # type: ignore[union-attr]
            yield from numbers_in(dict.values(pieces) if isinstance(pieces, dict) else pieces)


def results_in(item: Any) -> list[Any]:
    """The results of the graph that a leaf is made of."""
    if isinstance(item, NumberExpression):
        return [result for each in item.args for result in results_in(each)]
    is_own = isinstance(item, torch.Tensor) or is_size(item) or (isinstance(item, Number) and not isinstance(item, EarlierNumber))
    return [item] if is_own else []


def recipe(item: Any) -> Recipe:
    """How a leaf is made again, without anything of the capture in it."""
    if isinstance(item, NumberExpression):
        function, parts = item.function, [recipe(each) for each in item.args]
        return lambda results, before: function(*(part(results, before) for part in parts))
    if isinstance(item, EarlierNumber):
        at = item.at
        return lambda results, before: before[at]
    return (lambda results, before: next(results)) if results_in(item) else (lambda results, before: item)


def _operation(function: Callable[..., Any], turned: bool = False, divides: bool = False) -> Callable[..., Any]:
    def operation(self: Term, other: Any) -> Any:
        if isinstance(other, torch.Tensor):
            return NotImplemented  # its own operator takes over
        other = as_term(other)
        one, two = (other, self) if turned else (self, other)
        if isinstance(one, str) or isinstance(two, str):
            name = function.__name__
            return text_of(function, one, two) if function is operator.add else function(_asked(one, name), _asked(two, name))
        if function is operator.add and {kind_of(one), kind_of(two)} == {tuple}:
            return put_together(function, (one, two), tuple)
        if type(other) not in (int, float) and not isinstance(other, Term):
            return function(*(_asked(each, function.__name__) for each in (one, two)))
        result = NumberExpression(function, (one, two))
        if not divides or not _may_be_zero(two):
            return result
        return function(*map(_asked, result.args)) if result.known else _computed(result)

    return operation


def _may_be_zero(item: Any) -> bool:
    if isinstance(item, Term):
        largest_of = item.args if isinstance(item, NumberExpression) and _SPELLED.get(item.function) == "max" else ()
        if any(type(each) in (int, float) and each > 0 for each in largest_of):
            return False  # nor is nan
        if (earlier := earlier_of(item)) is not None:
            return not earlier.divides(item)
        return item.compare is None or not item.compare("ne", 0)
    return bool(item == 0)


def earlier_of(item: Any) -> EarlierNumbers | None:
    """Where a number comes from that follows from earlier steps alone."""
    if isinstance(item, EarlierNumber) or not isinstance(item, NumberExpression) or results_in(item):
        return item.earlier if isinstance(item, EarlierNumber) else None
    return next(filter(None, map(earlier_of, item.args)), None)


def in_program(op: str, *operands: Any) -> Any:
    """What may fail is computed by the program itself: where it does, no step has written parameters by then."""
    return emitters[-1].emit(op, tuple(map(_operand, operands)))


def _computed(item: NumberExpression) -> Any:
    """What Python cannot compute of all numbers is a part of the program, which fails where eager does."""
    if may_be_whole(item):
        item.refuse(use="is whole in some steps only", instead="make it a fraction: float(n)")
    computed = in_program(_SPELLED[item.function], *item.args)
    computed.kind = item.kind
    return computed


def _power(*both: Any) -> Any:
    """Of what earlier steps leave it is looked at before a step begins whether there is one."""
    both, has_modulus = tuple(map(as_term, both)), len(both) > 2
    kind = int if has_modulus else float if type(both[1]) is int and both[1] < 0 else None
    raised = NumberExpression(pow if has_modulus else operator.pow, both, kind)
    if (earlier := earlier_of(raised)) is None:
        return pow(*(_asked(each, "pow") for each in both)) if has_modulus else _computed(raised)
    power = recipe(raised)
    earlier.conditions.append(lambda results, before: [power(results, before)])
    return raised


def _operand(item: Any) -> Any:
    if not isinstance(item, NumberExpression):
        return item if not isinstance(item, EarlierNumber) else emitters[-1].input(item)
    if item.function not in _SPELLED and (earlier := earlier_of(item)) is not None:
        return emitters[-1].input(earlier.number(item))
    name = _SPELLED.get(item.function) or _asked(item, item.function.__name__)
    return in_program(name, *item.args) if isinstance(name, str) else name


def _asked(item: Any, by: str = "") -> Any:
    """A number itself, where it can be had; it is a part of the program from here on. `by`: the name of what asks."""
    if not isinstance(item, Term):
        return item
    if item.known is None and by in _DECIDING and (earlier := earlier_of(item)) is not None:
        return earlier.decides(item)
    if item.known is None:
        use, instead = _USES.get(by, (f"is given to {by}()" if by else "is used", "compute with the tensor itself"))
        item.refuse(use=use, instead=instead)
    return item.known()


def _truth(self: Term) -> bool:
    is_earlier = earlier_of(self) is not None  # then each step asks before it begins, and all is done that comes before an error
    answer = emitters[-1].answer(self) if self.known is None and emitters and not is_earlier else None
    return bool(_asked(self, "bool")) if answer is None else answer


def _quotient(self: Any, other: Any) -> Any:
    return self // other, self % other


def _rounded(self: Term, digits: Any = None) -> Any:
    return NumberExpression(round, (self, digits)) if type(digits) is int else whole(round, self) if digits is None else self.refuse()


def whole(function: Callable[[Any], int], item: Any) -> Any:
    """A whole number of one with a fraction. For nan and infinities there is none: then the program itself fails, as with `math.floor`."""
    if item.kind is bool:
        return NumberExpression(function, (item,), int)
    if item.kind is str:
        return function(_asked(item, function.__name__))
    if item.kind is not int and (earlier := earlier_of(item)) is not None:
        finite = recipe(item)
        earlier.conditions.append(lambda results, before: math.isfinite(finite(results, before)))
        return NumberExpression(function, (item,), int)
    if item.kind is int or item.known is not None:
        return item if item.kind is int else function(_asked(item))

    def whole_number(_: int, number: float) -> int:
        return function(number) if math.isfinite(number) else 0  # a made-up one: the program has failed before

    whole_number.__name__ = function.__name__
    return NumberExpression(whole_number, (in_program("math_floor", item), item), int)


def _question(function: Callable[..., Any]) -> Callable[..., Any]:
    return lambda self, *others: function(*(_asked(each, function.__name__) for each in (self, *others)))


def _comparison(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def comparison(self: Term, other: Any) -> Any:
        other = as_term(other)
        if self.compare is not None and type(other) is int and -(2**63) <= other < 2**63:
            return self.compare(name, other)
        if self.known is None and (type(other) in (int, float) or is_term(other)):
            return NumberExpression(function, (self, other), bool)
        return function(*(_asked(each, function.__name__) for each in (self, other)))

    return comparison


for _names, _method in ((_ANY, _operation), (_BY_NUMBERS, partial(_operation, divides=True))):
    for _name, _of_two in _names.items():
        setattr(Term, f"__{_name}__", _method(_of_two))
        setattr(Term, f"__r{_name}__", _method(_of_two, turned=True))
for _name, _step in (("pow", 1), ("rpow", -1)):
    setattr(Term, f"__{_name}__", lambda *both, step=_step: _power(*both[::step]))
for _name, _own_way in {"divmod": _quotient, "bool": _truth, "round": _rounded}.items():
    setattr(Term, f"__{_name}__", _own_way)
for _name, _of_one in _ALONE.items():
    setattr(Term, f"__{_name}__", lambda self, function=_of_one: NumberExpression(function, (self,)))
for _name, _asking in _ASKS.items():
    setattr(Term, f"__{_name}__", _question(_asking))
for _name, _asking in _OF_TEXTS.items():
    setattr(TextExpression, f"__{_name}__", _question(_asking))
for _name, _relation in RELATIONS.items():
    setattr(Term, f"__{_name}__", _comparison(_name, _relation))


def _by_thread(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: EarlierNumber, *args: Any) -> Any:
        if is_term(self):
            return own(self, *args)
        earlier = object.__getattribute__(self, "earlier")
        earlier.is_shared, number = True, earlier.numbers[object.__getattribute__(self, "at")]
        return number if "copy" in name else getattr(number, *args) if "getattr" in name else getattr(number, name)(*args)

    return method


_OWN = {"__class__", "__doc__", "__init__", "__module__", "__setattr__", "__slots__", "__torch_function__", "__weakref__"}
for _name in {*vars(Number), *vars(Term)} - _OWN:
    if _name.startswith("__"):
        setattr(EarlierNumber, _name, _by_thread(_name, getattr(Term, _name)))
