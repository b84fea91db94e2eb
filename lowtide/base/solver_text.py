"""Solvers as text, for the command line: `exact{max_states=1000,max_seconds=2.5}` is `Exact(max_states=1000, max_seconds=2.5)`.

    solver := name [ "{" [ field "=" value { "," field "=" value } ] "}" ]
    value  := text | solver | "[" [ value { "," value } ] "]"

A solver's name is that of its class in kebab case, its settings are the fields of that class, and their annotations say what a value
may be: a number, `true` or `false`, one of several words, a list (of a field `tuple[X, ...]`), another solver, or `none`. Nothing here
knows any one solver, so a new one needs no more than its place in a list: `cli.solvers` has both lists.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import NoneType, UnionType
from typing import Any, Generic, Literal, NoReturn, TypeAlias, TypeVar, Union, get_args, get_origin, get_type_hints

from lowtide.errors import FormatError

_TOKEN = re.compile(r"[{}\[\],=]|[^{}\[\],=]+")
_MARKS = frozenset("{}[],=")
_MAX_DEPTH = 20  # of solvers within solvers: far above any use, far below Python's recursion limit


@dataclass(frozen=True, slots=True)
class Spec:
    """A name and its settings in the order given; a plain word is a name without any."""

    name: str
    settings: tuple[tuple[str, Text], ...] = ()

    def __str__(self) -> str:
        inside = ",".join(f"{field}={_shown(value)}" for field, value in self.settings)
        return f"{self.name}{{{inside}}}" if inside else self.name


Text: TypeAlias = Union[Spec, "tuple[Text, ...]"]


def read_spec(text: str, example: str) -> Spec:
    """The name and settings in `text`. Raises FormatError saying where it ends being one, and how one is written, by an example."""
    reader = _SpecReader(text, example)
    spec = reader.spec(0)
    return spec if reader.peek() == "" else reader.refuse("the end")


def _shown(value: Text) -> str:
    return str(value) if isinstance(value, Spec) else f"[{','.join(map(_shown, value))}]"


class _SpecReader:
    """Words and marks, one after another."""

    def __init__(self, text: str, example: str) -> None:
        self.example = example
        self.tokens = [token.strip() for token in _TOKEN.findall(text) if token.strip()]
        self.at = 0

    def peek(self) -> str:
        """The next word or mark, "" at the end."""
        return self.tokens[self.at] if self.at < len(self.tokens) else ""

    def take(self, mark: str) -> bool:
        """Whether `mark` comes next; if so, it is passed."""
        matches = self.peek() == mark
        self.at += matches
        return matches

    def expect(self, mark: str) -> None:
        if not self.take(mark):
            self.refuse(repr(mark))

    def word(self, what: str) -> str:
        word = self.peek()
        if not word or word in _MARKS:
            self.refuse(what)
        self.at += 1
        return word

    def spec(self, depth: int) -> Spec:
        name = self.word("a name")
        if not self.take("{"):
            return Spec(name)
        settings: list[tuple[str, Text]] = []
        while not self.take("}"):
            if settings:
                self.expect(",")
            field = self.word("a setting")
            self.expect("=")
            settings.append((field, self.value(depth + 1)))
        return Spec(name, tuple(settings))

    def value(self, depth: int) -> Text:
        if depth > _MAX_DEPTH:
            raise FormatError(f"solver: expected at most {_MAX_DEPTH} solvers and lists within one another, got more")
        if not self.take("["):
            return self.spec(depth)
        items: list[Text] = []
        while not self.take("]"):
            if items:
                self.expect(",")
            items.append(self.value(depth + 1))
        return tuple(items)

    def refuse(self, expected: str) -> NoReturn:
        before, token = "".join(self.tokens[: self.at]), repr(self.peek()) if self.peek() else "the end"
        after = f" after {before!r}" if before else ""
        raise FormatError(f"solver: expected {expected}{after}, got {token}: write it like {self.example}")


S = TypeVar("S")
_INT_LIMIT = 2**63  # solvers count in 64 bits


@dataclasses.dataclass(frozen=True)
class SolverFamily(Generic[S]):
    known: Mapping[str, type[S]]  # by their names in text
    method: str  # that makes a class one of them, and a setting a solver within a solver
    example: str  # of one as text, for messages
    elsewhere: str = ""  # where more are to be had, for who asks for one that is not known


def named(classes: Sequence[type[S]]) -> dict[str, type[S]]:
    """Solver classes by their names on the command line: `ReadyList` is "ready-list"."""
    return {re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "-", solver.__name__).lower(): solver for solver in classes}


def parse(text: str, family: SolverFamily[S]) -> S:
    """The solver that `text` describes. Raises FormatError naming the solver and the setting, and saying what there is to choose from."""
    return _solver(read_spec(text, family.example), family)


def replaced(solver: S, limits: Mapping[str, float | None]) -> S:
    """`solver` with these limits in place of its own; None leaves one as it is. Raises FormatError where it has no such setting."""
    given: dict[str, Any] = {field: value for field, value in limits.items() if value is not None}
    if not given:
        return solver
    known = _settings(type(solver))
    for field, value in given.items():
        if field not in known:
            _refuse(type(solver).__name__, f"expected a solver that can be limited by {field}", f"one with {_listed(known)}")
        if not value > 0:  # nor is NaN
            _refuse(type(solver).__name__, f"expected {field} to be more than 0", str(value))
    return _checked(type(solver).__name__, partial(dataclasses.replace, solver), given)  # type: ignore[type-var]  # it is a dataclass


def _solver(spec: Spec, family: SolverFamily[S]) -> S:
    if spec.name not in family.known:
        elsewhere = f" ({family.elsewhere})" if family.elsewhere else ""
        raise FormatError(f"solver: expected one of {', '.join(sorted(family.known))}; got {spec.name!r}{elsewhere}")
    solver = family.known[spec.name]
    types = _settings(solver)
    settings: dict[str, Any] = {}
    for field, value in spec.settings:
        if field not in types:
            _refuse(spec.name, f"expected {_listed(types)}", repr(field))
        if field in settings:
            _refuse(spec.name, "expected each setting once", f"{field!r} twice")
        settings[field] = _value(value, types[field], f"{spec.name}: {field}", family)
    missing = [field for field in _required(solver) if field not in settings]
    if missing:
        _refuse(spec.name, f"expected a value for {missing[0]!r}", "none")
    return _checked(spec.name, solver, settings)


def _checked(name: str, make: Callable[..., S], settings: Mapping[str, Any]) -> S:
    """The solver with these settings, or its own word on values that are of their type and that it cannot work with."""
    try:
        solver = make(**settings)
        check_amounts(solver)
        return solver
    except ValueError as error:
        raise FormatError(f"solver {name}: {error}") from error


def _settings(solver: type[Any]) -> dict[str, Any]:
    """The types of the settings that a solver's constructor takes, by field."""
    types = get_type_hints(solver)
    return {field.name: types[field.name] for field in _fields(solver)}


def _required(solver: type[Any]) -> list[str]:
    none = dataclasses.MISSING
    return [field.name for field in _fields(solver) if field.default is none and field.default_factory is none]


def _fields(solver: type[Any]) -> list[dataclasses.Field[Any]]:
    return [field for field in dataclasses.fields(solver) if field.init] if dataclasses.is_dataclass(solver) else []


def _value(text: Text, wanted: Any, where: str, family: SolverFamily[Any]) -> Any:
    if get_origin(wanted) in (Union, UnionType):
        return _one_of(text, get_args(wanted), where, family)
    if get_origin(wanted) is tuple and get_args(wanted)[1:] == (...,):
        if isinstance(text, Spec):
            _refuse(where, f"expected {_wish(wanted, family)}", repr(str(text)))
        return tuple(_value(item, get_args(wanted)[0], where, family) for item in text)
    if isinstance(text, tuple):
        _refuse(where, f"expected {_wish(wanted, family)}", "a list")
    if hasattr(wanted, family.method):
        return _inner(text, wanted, where, family)
    if text.settings:
        _refuse(where, f"expected {_wish(wanted, family)}", repr(str(text)))
    return _scalar(text.name, wanted, where)


def _one_of(text: Text, choices: tuple[Any, ...], where: str, family: SolverFamily[Any]) -> Any:
    """A value of the first of several types that `text` can be; None is `none`, and never what another type makes of a text."""
    if NoneType in choices and text == Spec("none"):
        return None
    types = [choice for choice in choices if choice is not NoneType]
    if len(types) == 1:
        return _value(text, types[0], where, family)
    for choice in types:
        try:
            return _value(text, choice, where, family)
        except FormatError:
            continue  # the next type may fit, and where none does that is said below
    _refuse(where, f"expected {' or '.join(_wish(choice, family) for choice in choices)}", repr(str(text)))


def _inner(spec: Spec, wanted: Any, where: str, family: SolverFamily[S]) -> S:
    """A solver within a solver; where its field names one class, of that class."""
    solver = _solver(spec, family)
    fitting = [name for name, known in family.known.items() if known is wanted]
    if fitting and spec.name not in fitting:
        _refuse(where, f"expected {fitting[0]}", repr(spec.name))
    return solver


def _scalar(text: str, wanted: Any, where: str) -> Any:
    if get_origin(wanted) is Literal:
        words = {str(choice): choice for choice in get_args(wanted)}
    elif wanted is bool:
        words = {"true": True, "false": False}
    elif wanted in (int, float):
        return _number(text, wanted, where)
    elif wanted is str:
        return text
    else:
        _refuse(where, "expected no value: this setting cannot be given as text", repr(text))
    return words[text] if text in words else _refuse(where, f"expected {_word(wanted)}", repr(text))


def _number(text: str, wanted: type[int] | type[float], where: str) -> int | float:
    try:
        number = wanted(text)
    except ValueError:
        _refuse(where, f"expected {_word(wanted)}", repr(text))
    usable = abs(number) < _INT_LIMIT if isinstance(number, int) else not math.isnan(number)
    return number if usable else _refuse(where, f"expected {_word(wanted)}", repr(text))


def _wish(wanted: Any, family: SolverFamily[Any]) -> str:
    """What a type asks for, in words."""
    return "a solver" if hasattr(wanted, family.method) else _word(wanted)


def _word(wanted: Any) -> str:
    if get_origin(wanted) is Literal:
        return f"one of {', '.join(str(choice) for choice in get_args(wanted))}"
    if get_origin(wanted) is tuple:
        return "a list like [a,b]"
    return {bool: "true or false", int: "an integer below 2**63", float: "a number", str: "a word", NoneType: "none"}.get(
        wanted, "what text cannot say"
    )


def _listed(settings: Mapping[str, Any]) -> str:
    return f"settings among {', '.join(settings)}" if settings else "no settings"


def _refuse(where: str, expected: str, got: str) -> NoReturn:
    raise FormatError(f"solver {where}: {expected}, got {got}")


def described(solver: object) -> str:
    """A solver with those of its settings that are not what they are by default: "Exact(max_states=1000)"."""
    if not dataclasses.is_dataclass(solver):
        return repr(solver)
    settings = [(each.name, getattr(solver, each.name)) for each in dataclasses.fields(solver) if each.repr and _is_changed(solver, each)]
    return f"{type(solver).__name__}({', '.join(f'{name}={described(value)}' for name, value in settings)})"


def _is_changed(solver: object, each: dataclasses.Field[object]) -> bool:
    default = each.default if each.default_factory is dataclasses.MISSING else each.default_factory()
    return bool(getattr(solver, each.name) != default)


def check_amounts(solver: Any) -> None:
    """Raises ValueError for a setting that limits a solver to less than nothing."""
    for field in _fields(type(solver)):
        if isinstance(value := getattr(solver, field.name), (int, float)) and not value >= 0:  # nor is NaN
            raise ValueError(f"{type(solver).__name__}: expected {field.name} to be 0 or more, got {value}")


def check_choice(setting: str, value: str, choices: tuple[str, ...]) -> None:
    """Raises ValueError for a word that a solver's setting does not know."""
    if value not in choices:
        raise ValueError(f"{setting}: expected one of {', '.join(map(repr, choices))}, got {value!r}")
