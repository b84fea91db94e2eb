"""What a program puts into the caller's own places while it runs: outputs of the step, put there again after each one.

Looked for are lists, dictionaries and attributes that its functions and modules lead to. A program for which a plain capture is
refused is captured once more with stand-ins in the places of those containers (`stand_ins.py`), which note what it does to them.
"""

from __future__ import annotations

import builtins
import collections
import functools
import gc
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor

from lowtide.base.places import ABSENT, LENGTH, Beside, Sum, entry, put_entry, referred, static_attribute
from lowtide.capture.care.contents import differ, is_plain
from lowtide.capture.care.follower import Follower
from lowtide.capture.care.turns import listed, module_views, seen, undoing
from lowtide.capture.effects.actions import Act, StepOutputs, outputs_of
from lowtide.capture.effects.calls import NumberOperands, Outlet, calls_followed
from lowtide.capture.effects.code import is_read, rewrite
from lowtide.capture.effects.containers import Container, EffectLog
from lowtide.capture.effects.draws import DrawRecorder, recorders
from lowtide.capture.effects.going_on import GoingOn
from lowtide.capture.effects.search import LARGEST, PlaceSearch
from lowtide.capture.effects.stand_ins import KINDS, EarlierItem, StaleError, is_stand_in, own_of
from lowtide.capture.effects.sums import EarlierNumber, EarlierNumbers, Term, results_in
from lowtide.capture.results import Number, holds_fakes, is_number
from lowtide.capture.sizes.symbols import is_size
from lowtide.errors import CaptureError
from lowtide.ir import tree

Key: TypeAlias = "tuple[int, Any]"  # the id of an object, a dictionary or a variable, and the name in it

_active: list[OutputRecorder] = []  # one at a time, as captures are


@dataclass(frozen=True)
class CountedPlace:
    """What lies in a place that a program has changed, so that later attempts follow it there."""

    put_back: Callable[[], object]
    sums: bool  # numbers before and behind it
    default: Any = ABSENT  # what is read where nothing lies


class OutputRecorder:
    """Follows one capture. `summed` are places of numbers that the program computes with, and variables that it sets."""

    def __init__(self, chosen: frozenset[int] | None, summed: Mapping[Key, CountedPlace], converts: bool) -> None:
        """`chosen`: the containers by id that there are stand-ins for; None for all. `converts`: it makes Python's numbers of tensors."""
        self.chosen, self.summed, self.converts = chosen, summed, converts
        self.sums: dict[Key, Sum] = {}
        self.earlier = EarlierNumbers()
        self.refusals: list[Any] = []
        self.draws = DrawRecorder(self.earlier, self.refusals)
        self.own: frozenset[int] = frozenset()  # the model's modules by id, whose tensors the trace looks after
        self.emptied: set[Key] = set()  # variables that the program sets: to read one before raises Python's NameError
        self.befores: list[weakref.ref[Number]] = []  # in their places
        self.counted: dict[Key, CountedPlace] = {}  # what the program has changed
        self.log = EffectLog()
        self.containers: dict[int, Container] = {}
        self.bare: frozenset[int] = frozenset()  # those that the program has reached where no stand-in is
        self.tables: list[tuple[Any, MutableMapping[str, Any], dict[str, Any]]] = []  # attributes, globals, variables; and those before
        self.numbers: list[weakref.ref[Number]] = []  # that were handed out
        self.put: list[tuple[Any, MutableMapping[str, Any], str]] = []  # what the program has put into such tables
        self.words: tuple[str, ...] = ()
        self.puts_plain = False  # numbers and texts that are those of the capture

    # Before.

    @contextmanager
    def in_place(self, roots: Iterable[Any]) -> Iterator[None]:
        """Stand-ins are in the places of containers while this lasts."""
        with undoing() as undo, module_views() as views, listed(_active, self):
            functions: list[types.FunctionType] = []

            def meet(function: types.FunctionType, named: set[str]) -> None:
                functions.append(function)
                if self.converts and named:
                    rewrite(function, undo)

            follow, is_followed = functools.partial(self._follow, undo), lambda item, name: (id(item), name) in self.sums
            PlaceSearch(self._is_chosen, self._stand_in, follow, is_followed, meet, undo, views.show).walk(collections.deque(roots))
            for item, table, _ in self.tables:
                for at, name in self.emptied:
                    if at == id(item) and any(is_read(name, each.__code__) for each in functions):
                        seen(item, table).pop(name, None)  # for all threads, as Python has no place for the variables of one
            yield

    @contextmanager
    def followed(self, operands: Callable[[], NumberOperands]) -> Iterator[None]:
        """What the program does inside is noted. `operands` makes numbers a part of it."""
        self.log.active = True
        self.tables = [(item, table, dict(seen(item, table))) for item, table, _ in self.tables]  # with the model's fakes in their places
        for container in self.containers.values():
            container.show()
        try:
            with calls_followed(self.log, operands()), self.draws.followed(), listed(recorders, self.draws):
                yield
        finally:
            self.log.active = False
            self._count()

    def _count(self) -> None:
        """What the program has changed that is not followed yet."""
        for item, table, before in self.tables:
            for name, now in seen(item, table).items():
                default = ABSENT if name in before or _is_of_variables(item) else static_attribute(type(item), name)
                was = before.get(name, default)
                if now is was or (id(item), name) in self.followed_places or (type(item) is dict and hasattr(builtins, name)):
                    continue  # a global that is not there would be Python's own of its name
                sums = _may_go_on(was, now)
                if (sums or _is_of_variables(item)) and (holds_fakes(now) or differ(was, now)):
                    put = functools.partial(put_entry, table, name, own_of(was) if default is ABSENT else ABSENT)
                    self.counted[id(item), name] = CountedPlace(put, sums, default if sums else ABSENT)
        for container in self.containers.values():
            items: Any = container.items
            find = functools.partial(dict.get, items) if isinstance(items, dict) else functools.partial(container.kind.__getitem__, items)
            ends = {key < 0 for key in (*container.defaults, *container.written) if type(key) is int and not isinstance(items, dict)}
            for key, default in container.defaults.items() if len(ends) < 2 else ():
                if isinstance(key, torch.Tensor):
                    continue  # a parameter's fake, which is another one in the next attempt
                was = entry(container.original, key, default)
                written = key in container.written and _may_go_on(was, find(key))
                beside = container.changed and key not in container.written and type(was) in (int, float)  # it is asked for in each step
                if container.added > 0 if key is LENGTH else written or beside:
                    plain = key.known() if isinstance(key, Term) and key.known is not None else key  # which is not known behind the capture
                    self.counted[id(container.original), plain] = CountedPlace(lambda: None, True, default)

    def _follow(self, undo: Callable[[Callable[[], object]], None], item: Any, table: MutableMapping[str, Any]) -> None:
        """What the program sets in a table: numbers that it may read before, and variables that it may not."""
        self.tables.append((item, table, {}))
        entries = seen(item, table)
        for at, name in self.summed:
            if at != id(item):
                continue
            was = entries.get(name, ABSENT)
            undo(functools.partial(put_entry, entries, name, was))
            default = self.summed[at, name].default  # of its class
            if _kinds_of(value := default if was is ABSENT else was) and self.summed[at, name].sums:
                entries[name] = self._before((at, name), lambda: table, value, default)
            else:
                self.emptied.add((at, name))

    def _before(self, key: Key, table: Callable[[], Any], value: Any, default: Any = ABSENT) -> EarlierNumber:
        self.sums[key] = Sum(table, key[1], default, _kinds_of(value))
        before = EarlierNumber(self.earlier, value, self.sums[key], self.refusals)
        self.befores.append(weakref.ref(before))
        return before

    def _is_chosen(self, item: Any) -> bool:
        return type(item) in KINDS and (self.chosen is None or id(item) in self.chosen)

    def _stand_in(self, original: Any, now: Callable[[], Any], waiting: collections.deque[Any]) -> Any:
        if (known := self.containers.get(id(original))) is not None:
            known.getters.append(now)
            return known.stand_in
        self.containers[id(original)] = container = Container(self.log, original, now)
        is_table = isinstance(original, dict)
        for at, key in self.summed:
            if at == id(original):
                default = self.summed[at, key].default
                value = entry(original, key, default)
                if key is LENGTH:
                    container.length = self._before((at, key), lambda: container.now, value)
                elif _kinds_of(value):
                    container.has_sums = True
                    container.sums[key] = self._before((at, key), lambda: container.now, value, default), default
        for key, item in list(original.items() if is_table else enumerate(original)):
            if isinstance(item, FakeTensor):
                raise CaptureError("the capture before has left something there")
            if key in container.sums:
                item = container.sums[key][0]
            elif self._is_chosen(item) and len(original) < LARGEST:
                item = self._stand_in(item, functools.partial(lambda container, key: container.now[key], container, key), waiting)
                container.within.append(item.kept)
            elif len(original) < LARGEST:
                waiting.append(item)
            container.kind.__setitem__(container.items, key, item) if is_table else container.kind.append(container.items, item)
        for key, (number, _) in container.sums.items():
            if not is_table and key < 0:
                container.kind.__setitem__(container.items, key, number)
        return container.stand_in

    # After.

    def close(self, result: Any) -> None:
        """The program has run. Raises StaleError where what it did follows from what earlier steps leave."""
        self.log.active = False
        if self.refusals:
            raise self.refusals[0]
        if _holds_new(result):
            raise StaleError("the program returns a container of its own")
        of_modules = [seen(item, table).values() for item, table, _ in self.tables if isinstance(item, nn.Module)]
        in_modules = [now.kept for items in of_modules for now in items if is_stand_in(now)]
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
            for name, now in seen(item, table).items():
                was = before.get(name, ABSENT)
                if now is was:
                    continue
                if (id(item), name) in (*self.sums, *self.emptied):
                    self.put.append((item, table, name))
                    continue
                if not holds_fakes(now) or (self._is_shown(item, table) and isinstance(now, torch.Tensor)):
                    continue
                if is_stand_in(now) and not now.kept.is_new:
                    continue  # the caller's own, put there as it is
                if is_stand_in(was) and was.kept.changes:
                    raise StaleError(f"it changes attribute {name!r} of a {type(item).__name__}, and puts another in its place")
                self.put.append((item, table, name))

    def _is_shown(self, item: Any, table: Any) -> bool:
        """Whether what is put there is there for this thread alone."""
        return id(item) in self.own and type(table) is dict

    @property
    def missed(self) -> StaleError | None:
        """What is told where a number cannot be used in what a dictionary has just made; else None."""
        if not self.log.missed:
            return None
        return StaleError(f"{self.log.missed}, which no step can follow there: make it before the step, by asking for that key")

    @property
    def changing(self) -> frozenset[int]:
        """Containers by id that the program has changed so far, or asks for numbers, and those that lead to them."""
        return frozenset(at for at, container in self.containers.items() if container.matters)

    def unread(self) -> frozenset[int]:
        """Those by id of which a program that failed has not read what it may have found there, and those that it has changed."""
        return frozenset(at for at, each in self.containers.items() if each.matters or not (each.read_at or each.whole))

    @property
    def done(self) -> tuple[int, ...]:
        """Another one where the program has put something somewhere meanwhile."""
        counts = len(self.log.events), sum(len(container.written) for container in self.all())
        places = self.followed_places
        return *counts, *(id(seen(item, table).get(name)) for item, table, _ in self.tables for at, name in places if at == id(item))

    def all(self) -> list[Container]:
        containers = list(self.containers.values())
        for container in containers:
            containers.extend(other for other in container.within if other.is_new)
        return containers

    def values(self, sharing: tree.Sharing) -> list[Any]:
        """The results of the program among what leaves."""
        return [result for value, *_ in self._acts() for leaf in tree.flatten(value, sharing)[0] for result in results_in(leaf.value)]

    def left(self, sharing: tree.Sharing) -> StepOutputs:
        """How to do it again, without anything of the capture in it."""
        relied = tuple(container for container in self.all() if container.matters)
        places, conditions = tuple(self.earlier.places), tuple(self.earlier.conditions)
        outputs, self.words, self.puts_plain = outputs_of(self._acts(), sharing, relied, places, conditions)
        return replace(outputs, draws=self.draws.draws)

    def _acts(self) -> Iterator[Act]:
        """What is put where: a number or text that lies in a variable already is not seen there."""
        for container, method, args in self.log.events:
            yield args, functools.partial(_call, container, method), method, False
        for item, table, name in self.put:
            yield seen(item, table)[name], functools.partial(table.__setitem__, name), name, _is_of_variables(item)

    def end(self, follower: Follower, beside: Beside, constants: Sequence[Any]) -> tuple[Beside, GoingOn]:
        """Take back what the program has put into attributes. What is looked at before each step is not what the steps change.

        `constants`: the tensors of the caller's that the program has computed with.
        """
        followed, containers = set(self.followed_places), self.all()
        going_on = GoingOn(follower, constants, [(item, table) for item, table, _ in self.tables], containers)
        for item, table, name in self.put:
            before, entries = self._before_of(table), seen(item, table)
            if self._is_shown(item, table):
                if going_on.uses(was := own_of(before.get(name, ABSENT))):
                    going_on.follow(item, name, _called(item, name), was, entries[name])
                continue
            if (id(item), name) not in followed and not follower.only_writes(item, name):
                was = before.get(name, ABSENT if _is_of_variables(item) else static_attribute(type(item), name))
                if not _begins(was, entries[name]):  # else a place that is looked at before each step: later ones are captured anew
                    going_on.follow(item, name, _called(item, name), was, entries[name])
                    followed.add((id(item), name))
            put_entry(entries, name, before.get(name, ABSENT))
        for container in containers:
            if container.changes_itself:
                going_on.follow_within(container)
        going_on.places |= self.draws.tensors
        changed = tuple(referred(each.original) for each in containers if each.changes_itself and not each.is_new)
        places = tuple(each for each in beside.places if (id(each.holder), each.name) not in followed)
        put = tuple((referred(item), name) for item, _, name in self.put if isinstance(item, nn.Module))
        self.bare = frozenset(id(each.original) for each in containers if each.is_shared or follower.reaches(each.original))
        numbers = ((each, key) for each in containers for key in each.sums if not each.changes_itself)
        free = tuple((referred(each.original), key) for each, key in numbers)
        return Beside(places, (*beside.followed, *changed), free, put), going_on

    def _before_of(self, table: Any) -> dict[str, Any]:
        return next(before for _, other, before in self.tables if other is table)

    @property
    def followed_places(self) -> frozenset[Key]:
        """What each step goes on with, or sets anew."""
        return frozenset((*self.sums, *self.emptied))

    def asks(self, key: Key) -> bool:
        """Whether each step asks what lies in a place of a number, or nobody does. Else the capture may have met what lies there now."""
        in_container = key[0] in self.containers  # of which all is compared, whether or not the program reads it
        if key not in self.sums or self.earlier.is_shared:
            return False
        return key[0] not in self.bare if in_container else self.earlier.is_used(self.sums[key])

    def without(self, reads: frozenset[tuple[str, str]], model: nn.Module) -> frozenset[tuple[str, str]]:
        """Those attributes of modules that steps do not change, or their classes'."""
        changed = {id(each.stand_in): each for each in self.all() if each.changes}
        put = {
            id(seen(item, table)[name])
            for item, table, name in self.put
            if isinstance(item, nn.Module) and not _begins(self._before_of(table).get(name, ABSENT), seen(item, table)[name])
        }
        modules, kept = dict(model.named_modules()), set[tuple[str, str]]()
        for path, name in reads:
            module = modules[path]
            if (id(module), name) in self.followed_places:
                continue
            item = static_attribute(module, name)
            if id(item) in changed:
                changed[id(item)].getters.append(functools.partial(static_attribute, module, name))  # a module may get one of its own
            elif id(item) not in put:
                kept.add((path, name))
        return frozenset(kept)

    def forget(self) -> None:
        for container in self.all():
            container.forget()
        self.draws.forget()
        for each in (self.log.events, self.tables, self.put):
            each.clear()

    def refuse_survivors(self) -> None:
        """Raise CaptureError for a number that lies where no step would put it."""
        if survive(self.numbers):
            raise CaptureError("a number that the program computes is kept where it is not found")


def _kinds_of(item: Any) -> tuple[type, ...]:
    """What may lie in the place of something that each step goes on with; none for what is not followed so."""
    return (int, float) if type(item) in (int, float) else (type(item),) if type(item) in (str, tuple) and item is not ABSENT else ()


def _may_go_on(was: Any, now: Any) -> bool:
    """Whether what a program has put in the place of something may be followed from step to step."""
    return isinstance(now, _kinds_of(was)) or (is_size(now) and type(was) in (int, float))


def _holds_new(item: Any) -> bool:
    """Whether there is a container in a result that the program has made within one of the caller's, or what lies there from before."""
    if type(item) is EarlierItem or is_stand_in(item):
        return type(item) is EarlierItem or item.kept.is_new
    items = item.values() if isinstance(item, dict) else item if isinstance(item, (list, tuple)) else ()
    return any(map(_holds_new, items))


def survive(numbers: list[weakref.ref[Number]]) -> bool:
    if any(number() is not None for number in numbers):
        gc.collect()
    return any(number() is not None for number in numbers)


def is_followed() -> bool:
    """Whether what the program under capture puts outside is followed."""
    return bool(_active)


def _call(container: Container | Outlet, method: str, args: tuple[Any, ...]) -> None:
    getattr(container.now, method)(*args)


def _is_of_variables(item: Any) -> bool:
    """Whether a table is of globals or of a variable, which notes no reads."""
    return type(item) in (dict, types.CellType)


def _called(holder: Any, name: Any) -> str:
    return f"variable {name!r}" if _is_of_variables(holder) else f"attribute {name!r} of a {type(holder).__name__}"


def _begins(was: Any, now: Any) -> bool:
    """Whether a first step puts a number, a tuple or a tensor where later ones go on with it."""
    if isinstance(now, torch.Tensor):
        return (is_plain(was) or was is ABSENT) and not now.requires_grad
    return (is_number(now) or type(now) in (tuple, list, dict)) and (was is None or was is ABSENT)
