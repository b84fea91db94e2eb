"""What a program puts into the caller's own places while it runs: outputs of the step, put there again after each one.

Looked for are lists, dictionaries and attributes that its functions and modules lead to. A program for which a plain capture is
refused is captured once more with stand-ins in the places of those containers (`containers.py`), which note what it does to them.
"""

from __future__ import annotations

import builtins
import collections
import functools
import gc
import itertools
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.base.places import ABSENT, Beside, Position, held, referred
from lowtide.capture.care.contents import differ
from lowtide.capture.care.follower import Follower
from lowtide.capture.care.surroundings import called_by, containers_of_class, functions_of, is_of_users, names_in
from lowtide.capture.care.turns import undoing
from lowtide.capture.effects.containers import KINDS, Container, EffectLog, StaleError, holds_stand_in, is_stand_in
from lowtide.capture.effects.conversions import stand_in
from lowtide.capture.effects.sums import (
    CountedPlace,
    EarlierNumber,
    EarlierNumbers,
    NumberExpression,
    Recipe,
    Sum,
    Term,
    recipe,
    results_in,
)
from lowtide.capture.effects.variables import Variable
from lowtide.capture.numbers import Number, holds_fakes, is_result
from lowtide.capture.sources import is_users
from lowtide.errors import CaptureError
from lowtide.ir import tree

T = TypeVar("T")
Key: TypeAlias = "tuple[int, Any]"  # the id of an object, a dictionary or a variable, and the name in it

_MOST, _LARGEST = 20_000, 1000  # objects that are looked at; items of a container among which others are looked for
_OWN_OF_MODULES = frozenset(vars(nn.Module()))
_active: list[OutputRecorder] = []  # one at a time, as captures are


@dataclass(frozen=True)
class StepOutputs:
    """What a step puts into the caller's places."""

    actions: tuple[Callable[[list[Any], list[Any]], None], ...] = ()  # of the results that leave, in the program's order, and of `sums`
    counts: tuple[int, ...] = ()  # how many of them each takes
    relied_on: tuple[Container, ...] = ()
    words: tuple[str, ...] = ()  # the same for steps that do the same
    sums: tuple[Sum, ...] = ()  # places that are computed with
    divisors: tuple[Recipe, ...] = ()  # of these numbers, none of which may be zero

    def holds(self) -> bool:
        """Whether the places are there, and hold what the program relies on."""
        if not (all(container.holds() for container in self.relied_on) and all(each.holds() for each in self.sums)):
            return False
        before = self.before() if self.divisors else []
        return all(divisor(iter(()), before) for divisor in self.divisors)

    def before(self) -> list[Any]:
        """What lies in the places that are computed with."""
        return [each.now for each in self.sums]

    def put(self, results: Sequence[Any], before: list[Any]) -> None:
        """Do it again. `results` end with those that leave; `before` lay there when the step began."""
        at = len(results) - sum(self.counts)
        for action, count in zip(self.actions, self.counts, strict=True):
            action(list(results[at : at + count]), before)
            at += count

    def with_plain(self, puts: Iterable[tuple[Any, str, Any]]) -> StepOutputs:
        """Numbers and texts in attributes of objects, too, the same after each step."""
        actions, words = list(self.actions), list(self.words)
        for item, name, now in puts:
            actions.append(functools.partial(_set, item, name, now))
            words.append(f"{type(item).__name__}.{name} {now!r}")
        return replace(self, actions=tuple(actions), counts=(*self.counts, *([0] * (len(actions) - len(self.counts)))), words=tuple(words))


NOTHING_LEFT = StepOutputs()


class OutputRecorder:
    """Follows one capture. `summed` are numbers that the program computes with, and variables that it sets; None where it may not."""

    def __init__(
        self, chosen: frozenset[int] | None = None, summed: Mapping[Key, CountedPlace] | None = None, converts: bool = False
    ) -> None:
        """`chosen`: the containers by id that there are stand-ins for; None for all. `converts`: it makes Python's numbers of tensors."""
        self.chosen, self.summed, self.converts = chosen, summed, converts
        self.sums: dict[Key, Sum] = {}
        self.earlier = EarlierNumbers()
        self.own: frozenset[int] = frozenset()  # the model's modules by id, whose tensors the trace looks after
        self.going_on: dict[int, Position] = {}  # where tensors lie, by id, that the program reads and puts others in the places of
        self.emptied: set[Key] = set()  # variables that the program sets: to read one before would raise Python's NameError
        self.befores: list[weakref.ref[Number]] = []  # in their places
        self.refusals: list[Any] = []
        self.counted: dict[Key, CountedPlace] = {}  # what the program has changed
        self.log = EffectLog()
        self.containers: dict[int, Container] = {}
        self.tables: list[tuple[Any, MutableMapping[str, Any], dict[str, Any]]] = []  # attributes, globals, variables; and those before
        self.numbers: list[weakref.ref[Number]] = []  # that were handed out
        self.put: list[tuple[Any, MutableMapping[str, Any], str]] = []  # what the program has put into such tables
        self.words: tuple[str, ...] = ()
        self.puts_plain = False  # numbers and texts that are those of the capture

    # Before.

    @contextmanager
    def in_place(self, roots: Iterable[Any]) -> Iterator[None]:
        """Stand-ins are in the places of containers while this lasts."""
        with undoing() as undo:
            undo(lambda: _active.__setitem__(slice(None), []))
            _active[:] = [self]
            self._walk(collections.deque(roots), undo)
            yield

    @contextmanager
    def followed(self) -> Iterator[None]:
        """What the program does inside is noted."""
        self.log.active = True
        self.tables = [(item, table, dict(table)) for item, table, _ in self.tables]  # with the model's fakes in their places
        for container in self.containers.values():
            container.show()
        try:
            yield
        finally:
            self.log.active = False
            self._count()

    def _count(self) -> None:
        """What the program has changed that is not followed yet."""
        for item, table, before in self.tables:
            for name, now in table.items() if not isinstance(item, nn.Module) else ():
                was = before.get(name, ABSENT)
                if now is was or (id(item), name) in self.followed_places or (type(item) is dict and hasattr(builtins, name)):
                    continue  # a global that is not there would be Python's own of its name
                sums = _is_number(was) and isinstance(now, (int, float))
                if sums or (_is_of_variables(item) and (holds_fakes(now) or differ(was, now))):
                    old = was.kept.original if is_stand_in(was) else was
                    self.counted[id(item), name] = CountedPlace(functools.partial(_put, table, name, old), sums)
        for container in self.containers.values():
            for key, default in container.asked.items():
                was, now = dict.get(container.original, key, default), dict.get(container.stand_in, key)
                if key in container.written and _is_number(was) and isinstance(now, (int, float)):
                    self.counted[id(container.original), key] = CountedPlace(lambda: None, True, default)

    def _walk(self, waiting: collections.deque[Any], undo: Callable[[Callable[[], object]], None]) -> None:
        seen: set[int] = set()
        tabled: set[int] = set()

        def table_of(item: Any, table: MutableMapping[str, Any]) -> None:
            if id(item) not in tabled:
                tabled.add(id(item))
                self._follow(item, table, undo)

        def place(now: Callable[[], Any], put: Callable[[Any], object]) -> None:
            item = now()
            if self._is_chosen(item):
                undo(functools.partial(put, item))
                put(self._stand_in(item, now, waiting))
            elif isinstance(item, types.BuiltinMethodType) and self._is_chosen(item.__self__):  # `put = kept.append`
                undo(functools.partial(put, item))
                put(getattr(self._stand_in(item.__self__, lambda: now().__self__, waiting), item.__name__))
            elif type(item) is tuple and any(map(self._is_chosen, item)):
                undo(functools.partial(put, item))
                pieces = [(each, functools.partial(lambda at: now()[at], at)) for at, each in enumerate(item)]
                put(tuple(self._stand_in(each, way, waiting) if self._is_chosen(each) else each for each, way in pieces))
                waiting.append(item)
            else:
                waiting.append(item)

        while waiting and len(seen) < _MOST:
            item = waiting.popleft()
            if id(item) in seen or isinstance(item, (torch.Tensor, types.ModuleType, str, int, float)):
                continue
            seen.add(id(item))
            if type(item) in KINDS and len(item) < _LARGEST:
                waiting.extend(item.values() if isinstance(item, dict) else item)
            elif (called := called_by(item)) is not None:
                waiting.extend(called)
            elif isinstance(item, types.FunctionType):
                named = _of_function(item, place, table_of)
                if self.converts:
                    stand_in(item, named, undo)
            elif isinstance(item, type):
                for name in containers_of_class(item):
                    place(functools.partial(vars(item).__getitem__, name), functools.partial(type.__setattr__, item, name))
            elif isinstance(item, nn.Module) or is_of_users(item):
                self._of_object(item, place, waiting, undo)

    def _of_object(self, item: Any, place: Callable[..., None], waiting: collections.deque[Any], undo: Callable[..., None]) -> None:
        table = getattr(item, "__dict__", None)
        if not isinstance(table, dict) or isinstance(item, type):
            return
        self._follow(item, table, undo)
        if isinstance(item, nn.Module):
            self._follow(item, item._buffers, undo)
        for name, value in list(table.items()):
            if (id(item), name) in self.sums:
                continue
            if isinstance(item, nn.Module) and name in _OWN_OF_MODULES:
                waiting.extend(value.values() if isinstance(value, dict) else ())
            else:
                place(functools.partial(table.__getitem__, name), functools.partial(table.__setitem__, name))
        for cls in type(item).__mro__:
            waiting.extend((cls, *functions_of(cls)))

    def _follow(self, item: Any, table: MutableMapping[str, Any], undo: Callable[[Callable[[], object]], None]) -> None:
        """What the program sets in a table: numbers that it may read before, and variables that it may not."""
        self.tables.append((item, table, {}))
        for at, name in self.summed or ():
            if at != id(item):
                continue
            was = table.get(name, ABSENT)
            undo(functools.partial(_put, table, name, was))
            if _is_number(was) and (self.summed or {})[at, name].sums:
                table[name] = self._before((at, name), lambda: table, was)
            else:
                self.emptied.add((at, name))
                table.pop(name, None)

    def _before(self, key: Key, table: Callable[[], Any], value: Any, default: Any = ABSENT) -> EarlierNumber:
        before = EarlierNumber(self.earlier, value, self.refusals)
        self.befores.append(weakref.ref(before))
        self.sums[key] = Sum(table, key[1], default)
        return before

    def _is_chosen(self, item: Any) -> bool:
        return type(item) in KINDS and (self.chosen is None or id(item) in self.chosen)

    def _stand_in(self, original: Any, now: Callable[[], Any], waiting: collections.deque[Any]) -> Any:
        if (known := self.containers.get(id(original))) is not None:
            known.ways.append(now)
            return known.stand_in
        self.containers[id(original)] = found = Container(self.log, original, now)
        is_table = isinstance(original, dict)
        for at, key in self.summed or ():
            if at == id(original):
                default = (self.summed or {})[at, key].default
                value = dict.get(original, key, default)
                if _is_number(value):
                    found.sums[key] = self._before((at, key), lambda: found.now, value, default), default
        for key, item in list(original.items() if is_table else enumerate(original)):
            if isinstance(item, FakeTensor):
                raise CaptureError("the capture before has left something there")
            if is_table and key in found.sums:
                item = found.sums[key][0]
            elif self._is_chosen(item) and len(original) < _LARGEST:
                item = self._stand_in(item, _item_of(found, key), waiting)
                found.within.append(item.kept)
            elif len(original) < _LARGEST:
                waiting.append(item)
            found.kind.__setitem__(found.items, key, item) if is_table else found.kind.append(found.items, item)
        return found.stand_in

    # After.

    def close(self, result: Any) -> None:
        """The program has run. Raises StaleError where what it did follows from what earlier steps leave."""
        self.log.active = False
        if self.refusals:
            raise self.refusals[0]
        if holds_stand_in(result):
            raise StaleError("the program returns a container of its own")
        in_modules = [
            now.kept for item, table, _ in self.tables if isinstance(item, nn.Module) for now in table.values() if is_stand_in(now)
        ]
        for container in in_modules:  # nobody looks there for less than the whole
            in_modules.extend(container.within)
        for container in self.all():
            if stale_at := container.stale_at(as_a_whole=container in in_modules):
                raise StaleError(
                    f"at {stale_at} it reads what other steps leave in a {container.kind.__name__} that it changes: keep what goes on in a "
                    "tensor that each step writes in place (`mean.mul_(0.9).add_(loss.detach())`); behind a clear() of its own it may read "
                    "what it puts there"
                )
        for item, table, before in self.tables:
            for name, now in table.items():
                was = before.get(name, ABSENT)
                if now is was:
                    continue
                if _is_of_variables(item) and (id(item), name) in (*self.sums, *self.emptied):
                    self.put.append((item, table, name))
                    continue
                if not holds_fakes(now) or (id(item) in self.own and isinstance(now, torch.Tensor)):
                    continue
                if is_stand_in(was) and was.kept.changes:
                    raise StaleError(f"it changes attribute {name!r} of a {type(item).__name__}, and puts another in its place")
                self.put.append((item, table, name))

    def holder_of(self, tensors: Iterable[Any]) -> StaleError | None:
        """What is told where a number cannot be added to a tensor of the caller's, or to what a dictionary has just made; else None."""
        tables = [(item, table) for item, table, _ in self.tables if not isinstance(item, nn.Module)]
        tables += [(each, each.items) for each in self.containers.values() if isinstance(each.items, dict)]
        for item, table in tables:
            pairs = dict.items(table) if isinstance(table, dict) else table.items()
            for name, now in pairs:
                if any(now is tensor for tensor in tensors):
                    return StaleError(
                        f"{_called(item, name)} holds a tensor, with which no number that the step reads can be computed: put a number "
                        "there before the step (0.0 for torch.tensor(0.0)), or add the tensor itself in place (`+= loss.detach()`)"
                    )
        if not self.log.missed:
            return None
        return StaleError(f"{self.log.missed}, which no step can follow there: make it before the step, by asking for that key")

    @property
    def changing(self) -> frozenset[int]:
        """Containers by id that the program has changed so far, and those that lead to them."""
        return frozenset(at for at, container in self.containers.items() if container.changes)

    def unread(self) -> frozenset[int]:
        """Those by id of which a program that failed has not read what it may have found there, and those that it has changed."""
        return frozenset(at for at, each in self.containers.items() if each.changes or not (each.read_at or each.whole))

    @property
    def done(self) -> tuple[int, ...]:
        """Another one where the program has put something somewhere meanwhile."""
        counts = len(self.log.events), sum(len(container.written) for container in self.all())
        places = self.followed_places
        return *counts, *(id(table.get(name)) for item, table, _ in self.tables for at, name in places if at == id(item))

    def all(self) -> list[Container]:
        found = list(self.containers.values())
        for container in found:
            found.extend(other for other in container.within if other.made)
        return found

    def values(self) -> list[Any]:
        """The results of the program among what leaves."""
        left = [*(args for _, _, args in self.log.events), *(table[name] for _, table, name in self.put)]
        return [result for value in left for leaf in tree.flatten(value)[0] for result in results_in(leaf.value)]

    def left(self) -> StepOutputs:
        """How to do it again, without anything of the capture in it."""
        actions: list[Callable[[list[Any], list[Any]], None]] = []
        counts, words, lasting, known = [], [], list[bool](), dict[int, int]()
        for number, (value, act, text, stays) in enumerate(self._acts()):
            if any(known.setdefault(id(piece), number) != number for piece in _made(value)):
                raise StaleError("it puts one list, dictionary or object into two places, and each step would put another into each")
            leaves, rebuild = tree.flatten(value)
            at = [index for index, leaf in enumerate(leaves) if is_result(leaf.value)]
            if any(holds_fakes(leaf.value) for leaf in leaves if not is_result(leaf.value)):
                raise CaptureError("a number that the program computes lies in an object that cannot be made again")
            self.puts_plain |= any(type(leaf.value) in (int, float, str, bytes, complex, NumberExpression) for leaf in leaves)
            plain = [None if index in at else leaf.value for index, leaf in enumerate(leaves)]
            actions.append(functools.partial(_act, act, plain, {index: recipe(leaves[index].value) for index in at}, rebuild))
            counts.append(sum(len(results_in(leaves[index].value)) for index in at))
            words.append(f"{text} {[_text(leaf) for leaf in leaves]}")
            lasting.append(bool(at) or not stays)
        relied = tuple(container for container in self.all() if container.changes)
        self.words = tuple(words)
        return StepOutputs(
            tuple(actions),
            tuple(counts),
            relied,
            tuple(itertools.compress(words, lasting)),
            tuple(self.sums.values()),
            tuple(self.earlier.divisors),
        )

    def _acts(self) -> Iterator[tuple[Any, Callable[[Any], object], str, bool]]:
        """What is put where, and whether it may be seen no more where it lies there already: a number or text in a variable."""
        for container, method, args in self.log.events:
            yield args, functools.partial(_call, container, method), method, False
        for item, table, name in self.put:
            yield table[name], functools.partial(table.__setitem__, name), name, _is_of_variables(item)

    def end(self, follower: Follower, beside: Beside, constants: Sequence[Any]) -> Beside:
        """Take back what the program has put into attributes. What is looked at before each step is not what the steps change.

        `constants`: the tensors of the caller's that the program has computed with.
        """
        followed = set(self.followed_places)
        for item, table, name in self.put:
            before = next(before for _, other, before in self.tables if other is table)
            if id(item) not in self.own and (id(item), name) not in followed and not follower.only_writes(item, name):
                was = before.get(name, ABSENT)
                elsewhere = follower.leads_to(was) or any(now is was for _, other, _ in self.tables for now in other.values())
                if elsewhere or not any(was is each for each in constants) or not _may_follow(was, table[name]):
                    raise StaleError(
                        f"it reads {_called(item, name)}, which an earlier step has put there; a buffer that it writes with copy_ goes on "
                        "from step to step"
                    )
                followed.add((id(item), name))
                self.going_on[id(was)] = Position.of(item, name, _called(item, name), "its making")
            if name in before:
                table[name] = before[name]
            else:
                table.pop(name, None)
        changed = tuple(referred(each.original) for each in self.all() if each.changes_itself and not each.made)
        places = tuple(each for each in beside.places if (id(each.holder), each.name) not in followed)
        return Beside(places, (*beside.followed, *changed))

    @property
    def followed_places(self) -> frozenset[Key]:
        """What each step goes on with, or sets anew."""
        return frozenset((*self.sums, *self.emptied))

    def without(self, reads: frozenset[tuple[str, str]], model: nn.Module) -> frozenset[tuple[str, str]]:
        """Those attributes of modules that steps do not change, or their classes'."""
        changed = {id(each.stand_in): each for each in self.all() if each.changes}
        put = {id(table[name]) for item, table, name in self.put if isinstance(item, nn.Module)}
        modules, kept = dict(model.named_modules()), set[tuple[str, str]]()
        for path, name in reads:
            module = modules[path]
            item = held(module, name)
            if id(item) in changed:
                changed[id(item)].ways.append(functools.partial(held, module, name))  # a module may get one of its own
            elif id(item) not in put:
                kept.add((path, name))
        return frozenset(kept)

    def forget(self) -> None:
        for container in self.all():
            container.forget()
        for each in (self.log.events, self.tables, self.put):
            each.clear()

    def refuse_survivors(self) -> None:
        """Raise CaptureError for a number that lies where no step would put it."""
        if survive(self.numbers):
            raise CaptureError("a number that the program computes is kept where it is not found")


def survive(numbers: list[weakref.ref[Number]]) -> bool:
    if any(number() is not None for number in numbers):
        gc.collect()
    return any(number() is not None for number in numbers)


def containers_of(models: Iterable[nn.Module]) -> list[Any]:
    """The lists, dictionaries and generators that modules keep beside torch's own."""
    tables, kinds = [vars(module) for model in models for module in model.modules()], {*KINDS, torch.Generator}
    return [item for table in tables for name, item in table.items() if type(item) in kinds and name not in _OWN_OF_MODULES]


def is_followed() -> bool:
    """Whether what the program under capture puts outside is followed."""
    return bool(_active)


def noted() -> tuple[int, ...]:
    """What a program under capture has put into places so far, as far as that is followed: compared with itself."""
    return _active[-1].done if _active else ()


def _act(
    act: Callable[[Any], object], plain: list[Any], recipes: dict[int, Recipe], rebuild: Any, results: list[Any], before: list[Any]
) -> None:
    filled, left = list(plain), iter(results)
    for index, made in recipes.items():
        filled[index] = made(left, before)
    act(tree.unflatten(rebuild, filled))


def _set(item: Any, name: str, value: Any, results: list[Any], before: list[Any]) -> None:
    object.__setattr__(item, name, value)


def _text(leaf: tree.Leaf) -> str:
    if isinstance(leaf.value, Term):
        return f"{leaf.where} {leaf.value.text()}"
    return leaf.where if is_result(leaf.value) else repr(leaf.value)


def _call(container: Container, method: str, args: tuple[Any, ...]) -> None:
    getattr(container.now, method)(*args)


def _made(value: Any) -> list[Any]:
    """The containers and objects in what is put somewhere that hold what the program has computed."""
    found, waiting = dict[int, Any](), [value]
    while waiting:
        piece = waiting.pop()
        if id(piece) not in found and not is_result(piece) and holds_fakes(piece):
            found[id(piece)] = piece
            waiting.extend(tree.pieces(piece))
    return list(found.values())[1:]


def _item_of(container: Container, key: Any) -> Callable[[], Any]:
    return lambda: container.now[key]


def _is_number(item: Any) -> bool:
    return type(item) in (int, float)


def _is_of_variables(item: Any) -> bool:
    """Whether a table is of globals or of a variable, which notes no reads."""
    return type(item) in (dict, types.CellType)


def _called(holder: Any, name: Any) -> str:
    """A place in words."""
    if isinstance(holder, Container):
        return f"entry {name!r} of a {holder.kind.__name__}"
    return f"variable {name!r}" if _is_of_variables(holder) else f"attribute {name!r} of a {type(holder).__name__}"


def _may_follow(was: Any, now: Any) -> bool:
    """Whether the next step reads a tensor as this one has read the one before."""
    if (
        type(was) is not torch.Tensor
        or type(now) is not FakeTensor
        or isinstance(now, nn.Parameter)
        or was.requires_grad
        or now.requires_grad
    ):
        return False
    return (was.shape, was.stride(), was.dtype, was.device) == (now.shape, now.stride(), now.dtype, now.device)


def _put(table: MutableMapping[str, Any], name: str, was: Any) -> None:
    if was is not ABSENT:
        table[name] = was
    else:
        table.pop(name, None)


def _of_function(function: types.FunctionType, place: Callable[..., None], table_of: Callable[..., None]) -> set[str]:
    """A function's own variables, its defaults, the globals that it names; those names, if it is a user's."""
    for cell, name in zip(function.__closure__ or (), function.__code__.co_freevars, strict=True) if is_users(function) else ():
        table_of(cell, Variable(cell, name))
    for cell in function.__closure__ or ():
        if Position.of(cell, "", "", "").now() is not ABSENT:
            place(functools.partial(getattr, cell, "cell_contents"), functools.partial(setattr, cell, "cell_contents"))
    if not is_users(function):
        return set()
    for at in range(len(function.__defaults__ or ())):
        place(functools.partial(_default, function, at), functools.partial(_put_default, function, at))
    defaults = function.__kwdefaults__ or {}
    for name in defaults:
        place(functools.partial(defaults.__getitem__, name), functools.partial(defaults.__setitem__, name))
    table = function.__globals__
    table_of(table, table)
    named = names_in(function.__code__)
    for name in named:
        if name in table:
            place(functools.partial(table.__getitem__, name), functools.partial(table.__setitem__, name))
    return named


def _default(function: types.FunctionType, at: int) -> Any:
    return (function.__defaults__ or ())[at]


def _put_default(function: types.FunctionType, at: int, item: Any) -> None:
    found = function.__defaults__ or ()
    function.__defaults__ = (*found[:at], item, *found[at + 1 :])
